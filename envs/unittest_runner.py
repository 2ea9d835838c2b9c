"""Runs unittest modules for the verifier and says what really ran.

Sent into the sandbox as text: nothing of ours is there, and its Python may be older. Arguments: a file with a key,
then the modules. The last line of the output is the key and a JSON report; a run that ends early, with whatever exit
code, prints none. There are two processes: the parent learns the key and never runs task code, the child runs the tests
and never sees the key, which left the disk before the first import. A test counts as passed only if it ran to its end:
skipped tests and expected failures do not, and nothing does once `unittest.TestCase` was changed under the runner.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import unittest
from types import ModuleType
from typing import Any


class Report(unittest.TextTestResult):
    """Counts the tests that passed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        """Called by unittest for each test that ran to its end."""
        super().addSuccess(test)
        self.passed += 1


def run_tests(modules: list[str], pipe: int) -> None:
    """Run the modules of the working directory and write one line of JSON to the pipe."""
    sys.path.insert(0, os.getcwd())
    # Bound before the first line of task code runs.
    write, dumps, machinery = os.write, json.dumps, dict(vars(unittest.TestCase))
    suite = unittest.TestSuite(unittest.TestLoader().loadTestsFromModule(load(name)) for name in modules)
    result: Any = unittest.TextTestRunner(stream=sys.stdout, verbosity=1, resultclass=Report).run(suite)
    report = {
        "run": result.testsRun,
        "passed": result.passed,
        "bad": len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses),
        "skipped": len(result.skipped) + len(result.expectedFailures),
        "changed": dict(vars(unittest.TestCase)) != machinery,
    }
    write(pipe, dumps(report).encode() + b"\n")


def load(name: str) -> ModuleType:
    """Import a test module from its own file: a package or library of the same name would come first otherwise."""
    parent = name.rpartition(".")[0]
    if parent:
        importlib.import_module(parent)
    spec: Any = importlib.util.spec_from_file_location(name, os.path.abspath(name.replace(".", "/") + ".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def hide_memory() -> None:
    """Keep other processes of the same user, the child among them, from reading this one's memory."""
    try:
        import ctypes
    except ImportError:
        return
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def main() -> None:
    """Fork, let the child run the tests, and print its report under the key."""
    key_path, modules = sys.argv[1], sys.argv[2:]
    go_read, go_write = os.pipe()
    report_read, report_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report_read)
        os.close(go_write)
        os.read(go_read, 1)
        os.close(go_read)
        sys.argv = ["unittest", *modules]
        run_tests(modules, report_write)
        sys.stdout.flush()
        os._exit(0)
    os.close(report_write)
    hide_memory()
    with open(key_path) as file:
        key = file.read()
    os.unlink(key_path)
    os.write(go_write, b"x")
    # One line, not to the end: task code may have left processes behind that hold the pipe.
    with os.fdopen(report_read, "rb") as stream:
        line = stream.readline()
    os.waitpid(child, 0)
    try:
        report = json.loads(line)
    except ValueError:
        report = None
    print(f"\n{key} {json.dumps(report)}", flush=True)


if __name__ == "__main__":
    main()
