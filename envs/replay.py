"""What the commands of scripted experts print and do, computed in process: exact, and fast.

Only the command forms that experts use are known, anything else raises ValueError. For trusted code only: tests run in
this process.
"""

from __future__ import annotations

import builtins
import re
import types
import unittest
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from envs.patch import unified_diff
from envs.replay_shell import Shell
from envs.task import ExactAnswer, FinalState, HiddenTests, Task

SUBMIT = "submit"
TEST_COMMAND = "python3 -m unittest -q 2>&1 | tail -n 1"
"""How experts run the visible tests: the last line says "OK" or "FAILED (failures=1)"."""

_TOKEN = re.compile(r"\s*(?:'([^']*)'|(>>|&&|[<>|])|([A-Za-z0-9_./=+:,-]+))(?=\s|$)")


def replay(task: Task, actions: Sequence[str]) -> list[tuple[str, int]]:
    """Raw output and exit code of every action but the final submit or answer.

    Raises ValueError for unknown command forms.
    """
    return _run(task, actions)[1]


def final_files(task: Task, actions: Sequence[str]) -> dict[str, str]:
    """The workspace after the actions, path -> content. Raises ValueError for unknown command forms."""
    return _run(task, actions)[0].files


def patch_of(task: Task, actions: Sequence[str]) -> str:
    """What the actions change in the repository, as `git diff` prints it; empty for tasks without hidden tests."""
    if not isinstance(task.verifier, HiddenTests):
        return ""
    return unified_diff(task.files, final_files(task, actions))


def judge(task: Task, actions: Sequence[str]) -> bool:
    """The verifier's word on the state after the actions, or on the answer (M1.2)."""
    verifier = task.verifier
    if isinstance(verifier, ExactAnswer):
        return bool(actions) and actions[-1].strip() == verifier.answer
    files = final_files(task, actions)
    if isinstance(verifier, FinalState):
        return all(files.get(path) == content for path, content in verifier.files.items())
    names = verifier.modules or tuple(path.removesuffix(".py") for path in verifier.files)
    return run_tests({**files, **verifier.files}, names) == "OK"


def run_tests(files: Mapping[str, str], modules: Sequence[str]) -> str:
    """Last line of `python3 -m unittest -q MODULES` over in-memory files."""
    importer = _Importer(files)
    counts = _Counts()
    for name in modules:
        try:
            module = importer.load(name)
        except Exception:  # a module that does not import counts as one error, as in unittest
            counts.error_count += 1
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, unittest.TestCase):
                unittest.defaultTestLoader.loadTestsFromTestCase(value).run(counts)
    parts = [f"failures={counts.failure_count}"] * bool(counts.failure_count)
    parts += [f"errors={counts.error_count}"] * bool(counts.error_count)
    return f"FAILED ({', '.join(parts)})" if parts else "OK"


class _Counts(unittest.TestResult):
    """Counts without formatting tracebacks, which would take most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.failure_count = 0
        self.error_count = 0

    def addFailure(self, test: Any, err: Any) -> None:
        self.failure_count += 1

    def addError(self, test: Any, err: Any) -> None:
        self.error_count += 1


class _Importer:
    """Imports modules from in-memory files into fresh namespaces, everything else as usual."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._loaded: dict[str, types.ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> types.ModuleType:
        if name not in self._loaded:
            module = types.ModuleType(name)
            module.__dict__["__builtins__"] = self._builtins
            exec(_compiled(self._files[_path(name)], _path(name)), module.__dict__)
            self._loaded[name] = module
        return self._loaded[name]

    def _import(self, name: str, *rest: Any) -> types.ModuleType:
        return self.load(name) if _path(name) in self._files else __import__(name, *rest)


def _path(module: str) -> str:
    return module.replace(".", "/") + ".py"


@lru_cache(maxsize=2048)
def _compiled(source: str, path: str) -> types.CodeType:
    return compile(source, path, "exec")


def _run(task: Task, actions: Sequence[str]) -> tuple[Shell, list[tuple[str, int]]]:
    shell = Shell(task.files)
    if isinstance(task.verifier, ExactAnswer):
        return shell, []
    return shell, [_step(shell, action) for action in actions if action != SUBMIT]


def _step(shell: Shell, action: str) -> tuple[str, int]:
    if action != TEST_COMMAND:
        return shell.run(action)
    names = sorted(path.removesuffix(".py") for path in shell.files if re.fullmatch(r"test\w*\.py", path))
    return run_tests(shell.files, names) + "\n", 0
