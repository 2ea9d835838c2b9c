"""The files of a repository that decide how it is tested, and that a patch therefore cannot change."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Collection, Iterable

from envs.task import HiddenTests, Task

_CONFIGURATION = frozenset(
    ("conftest.py", "pytest.ini", ".pytest.ini", "setup.cfg", "pyproject.toml", "tox.ini", "noxfile.py", ".coveragerc")
)
_START_UP = frozenset(("sitecustomize.py", "usercustomize.py"))
_MODULE_ENDINGS = (".py", ".pyc", ".so")


def is_test_file(path: str) -> bool:
    """Whether a file is part of the tests by the usual names: test_*.py, *_test.py, conftest.py, tests/*."""
    folders, name = path.split("/")[:-1], posixpath.basename(path)
    return name == "conftest.py" or name.startswith("test_") or name.endswith("_test.py") or "tests" in folders


def tampered(
    task: Task, tests: HiddenTests, changed: Iterable[str], base: Collection[str] | None = None
) -> tuple[str, ...]:
    """Those of the changed paths that the verifier does not take from a patch, sorted.

    They are the task's test files, the places of the hidden ones, and what steers tests from outside of them, new or
    not: configuration of test runners, modules that Python imports by itself, and ones named like the standard library.
    New tests are a patch's own business. Configuration that the reference patch changes is what the task is about.

    Args:
        base: paths of the base, where `task.files` does not hold them.
    """
    base = task.files if base is None else base
    asked_for = files_of(task.reference_patch or "")
    roots = {root(path) for path in base}
    found = []
    for path in changed:
        known = path in base or any(path.startswith(f"{file}/") for file in base)
        hidden = any(path == file or file.startswith(f"{path}/") for file in tests.files)
        steers = _steers(path) or (root(path) not in roots and _shadows(path))
        if hidden or (known and is_test_file(path)) or (steers and path not in asked_for):
            found.append(path)
    return tuple(sorted(set(found)))


def root(path: str) -> str:
    """Name by which Python would import the top of a path."""
    return path.split("/")[0].split(".")[0]


def _steers(path: str) -> bool:
    name = posixpath.basename(path)
    return name in _CONFIGURATION or name in _START_UP or name.endswith(".pth")


def _shadows(path: str) -> bool:
    return root(path) in sys.stdlib_module_names and path.endswith(_MODULE_ENDINGS)


def files_of(patch: str) -> frozenset[str]:
    """Paths that a unified diff leaves changed or new."""
    return frozenset(line.removeprefix("+++ b/") for line in patch.splitlines() if line.startswith("+++ b/"))
