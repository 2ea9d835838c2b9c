"""The files of a repository that decide how it is tested, and that a patch therefore cannot change."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Collection, Iterable

from envs.task import HiddenTests, Task

_CONFIGURATION = frozenset(
    (
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "setup.cfg", "pyproject.toml"),
        *("tox.ini", "tox.toml", "noxfile.py", ".coveragerc"),
    )
)
_RUNNERS = frozenset(
    (
        *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "pygments", "exceptiongroup", "tomli"),
        *("xdist", "execnet", "coverage", "pytest_cov", "pytest_asyncio", "pytest_timeout", "nose", "nose2", "tox"),
    )
)
"""What runs tests, and what that imports: `python -m pytest` looks into the repository first."""
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

    They are the task's test files, the places of the hidden ones, what Python would import in the place of either, and
    what steers tests from outside of them, new or not: configuration of test runners, `__init__.py` in folders of tests
    that had none, modules that Python imports by itself, ones named like the standard library or like test runners,
    and the entry points by which pytest finds plugins. New tests are a patch's own business. Configuration that the
    reference patch changes is what the task is about.

    Args:
        base: paths of the base, where `task.files` does not hold them.
    """
    base = task.files if base is None else base
    asked_for = files_of(task.reference_patch or "")
    roots = importable(base)
    judges = [path for path in (*tests.files, *filter(is_test_file, base)) if path.endswith(".py")]
    places = {_module(path) for path in judges}
    found = []
    for path in changed:
        known = path in base or any(path.startswith(f"{file}/") for file in base)
        hidden = any(path == file or file.startswith(f"{path}/") for file in tests.files)
        replaces = {_module(path), _module(path).removesuffix("/__init__")} & places
        contains = path not in base and _makes_package(path, judges)
        steers = contains or _steers(path) or (root(path) not in roots and _shadows(path))
        if hidden or replaces or (known and is_test_file(path)) or (steers and path not in asked_for):
            found.append(path)
    return tuple(sorted(set(found)))


def root(path: str) -> str:
    """Name by which Python would import the top of a path."""
    return path.split("/")[0].split(".")[0]


def importable(paths: Iterable[str]) -> set[str]:
    """Names that Python imports from the root of a repository with these files. A folder that is no package yields to
    the standard library, whatever lies in it."""
    modules = [path for path in paths if path.endswith(_MODULE_ENDINGS)]
    return {
        root(path)
        for path in modules
        if root(path) not in sys.stdlib_module_names or "/" not in path or path == f"{root(path)}/__init__.py"
    }


def _module(path: str) -> str:
    """What Python imports as one: a/b for a/b.py, a/b.abi3.so, and a/b itself, which may be a link."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, name.split(".")[0]) if path.endswith(_MODULE_ENDINGS) else path


def _makes_package(path: str, judges: Iterable[str]) -> bool:
    """Whether a folder of tests becomes a package by this file, which then runs before they do."""
    folder = posixpath.dirname(path)
    is_inside = is_test_file(path) and any(file.startswith(f"{folder}/") for file in judges)
    return is_inside and _module(path).endswith("/__init__")


def _steers(path: str) -> bool:
    folder, name = posixpath.split(path)
    plugs_in = name == "entry_points.txt" and folder.endswith((".dist-info", ".egg-info"))
    return name in _CONFIGURATION or name in _START_UP or name.endswith(".pth") or plugs_in


def _shadows(path: str) -> bool:
    is_module = path.endswith(_MODULE_ENDINGS) or path == root(path)  # a link to a folder is a package, too
    return is_module and root(path) in (sys.stdlib_module_names | _RUNNERS)


def files_of(patch: str) -> frozenset[str]:
    """Paths that a unified diff leaves changed or new."""
    return frozenset(line.removeprefix("+++ b/") for line in patch.splitlines() if line.startswith("+++ b/"))
