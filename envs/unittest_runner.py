"""Runs unittest modules for the verifier, in a process that the tested code never enters.

Sent into the sandbox as text. There are two processes. The child imports the repository and does with it what it is
asked to (`envs.remote_calls`). The parent holds the tests in its memory alone, asks the child for whatever they import
from the repository, and compares what comes back with what they want.

Argument: a file with the tests and a key, gone before the first line of tested code runs. The parent's memory and files
are closed to the child. The last line of output is the report with its code under the key: whoever reads or writes the
output cannot make another. A run that ends early prints none.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any, NoReturn

from envs.remote_calls import Link, serve

OUTPUT_BYTES = 32 * 1024
"""Of what the tested code printed, this much of the head and of the tail is shown."""


def install_imports(link: Link, sources: dict[str, str], roots: set[str]) -> None:
    """Tests are imported from `sources`, the modules of the repository (`roots` name the known ones) from the child.

    New ones only if a test names them: what the standard library looks for in vain, for other Pythons say, is not for
    the child to give. What unittest needs is there before.
    """
    import importlib.util
    import linecache
    import re
    import unittest  # noqa: F401

    named = set(re.findall(r"\w+", "\n".join([*sources, *sources.values()])))

    class RemoteModule(types.ModuleType):
        __spec__: Any

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__spec__.loader.remote, name)

        def __setattr__(self, name: str, value: Any) -> None:
            # What the import system sets stays here: names of its own, and modules below this one.
            if name.startswith("__") or isinstance(value, types.ModuleType):
                super().__setattr__(name, value)
            else:
                setattr(self.__spec__.loader.remote, name, value)

    class FromChild:
        remote: Any = None

        def create_module(self, spec: Any) -> types.ModuleType | None:
            try:
                self.remote = link.ask("import", spec.name)
            except ModuleNotFoundError:
                below = spec.name.replace(".", "/") + "/"
                if not any(path.startswith(below) for path in sources):
                    raise
                return None  # a folder of tests alone
            return RemoteModule(spec.name)

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    class FromSources:
        def __init__(self, path: str) -> None:
            self.path = path

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: types.ModuleType) -> None:
            text = sources[self.path]
            linecache.cache[self.path] = (len(text), None, text.splitlines(True), self.path)
            exec(compile(text, self.path, "exec"), module.__dict__)

    class Finder:
        def __init__(self, everything: bool) -> None:
            self.everything = everything

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            place, top = name.replace(".", "/"), name.partition(".")[0]
            for file, is_package in ((place + "/__init__.py", True), (place + ".py", False)):
                if file in sources:
                    tests: Any = FromSources(file)
                    return importlib.util.spec_from_loader(name, tests, origin=file, is_package=is_package)
            if top not in roots and not (self.everything and top in named):
                return None
            roots.add(top)
            child: Any = FromChild()
            return importlib.util.spec_from_loader(name, child, is_package=True)

    finders: list[Any] = sys.meta_path
    finders.insert(0, Finder(everything=False))
    finders.append(Finder(everything=True))


def run_tests(modules: list[str]) -> dict[str, int]:
    """Run the modules and count. A test passes only if it runs to its end: skips and expected failures do not."""
    import importlib
    import unittest

    class Report(unittest.TextTestResult):
        passed = 0

        def addSuccess(self, test: unittest.TestCase) -> None:
            super().addSuccess(test)
            self.passed += 1

    kind: Any = Report
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(loader.loadTestsFromModule(importlib.import_module(name)) for name in modules)
    result: Any = unittest.TextTestRunner(stream=sys.stdout, verbosity=1, resultclass=kind).run(suite)
    return {
        "run": result.testsRun,
        "passed": result.passed,
        "bad": len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses),
        "skipped": len(result.skipped) + len(result.expectedFailures),
    }


def hide_memory() -> None:
    """Close this process's memory, files and environment to all others of its user."""
    import ctypes

    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def show(output: int) -> None:
    """Print what the tested code printed."""
    size = os.fstat(output).st_size
    head = os.pread(output, OUTPUT_BYTES, 0)
    start = max(len(head), size - OUTPUT_BYTES)
    cut = b"\n[%d bytes cut]\n" % (start - len(head)) if start > len(head) else b""
    text = head + cut + os.pread(output, OUTPUT_BYTES, start)
    if text:
        sys.stdout.flush()
        sys.stdout.buffer.write(b"--- printed by the tested code:\n" + text + b"\n")


def main() -> None:
    """Fork, let the child serve, run the tests and print the report."""
    path = sys.argv[1]
    # The repository may have a package of that name, too.
    for name in ("envs.remote_calls", "envs"):
        sys.modules.pop(name, None)
    sys.path.pop(0)
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    output = os.open(path + ".out", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    os.unlink(path + ".out")
    if os.fork() == 0:
        for fd in (request_write, reply_read):
            os.close(fd)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # Waits for the first request, and so until the file is gone and the parent closed to it.
        serve(os.fdopen(request_read), os.fdopen(reply_write, "w"))
        os._exit(0)
    for fd in (request_read, reply_write):
        os.close(fd)
    with open(path) as file:
        bundle = json.load(file)
    os.unlink(path)
    try:
        hide_memory()
    except (ImportError, OSError) as error:
        finish(bundle["key"], {"cannot": str(error)})
    link = Link(os.fdopen(request_write, "w"), os.fdopen(reply_read))
    install_imports(link, bundle["sources"], set(bundle["roots"]))
    try:
        report = run_tests(bundle["modules"])
    finally:
        show(output)
    finish(bundle["key"], report)


def finish(key: str, report: dict[str, Any]) -> NoReturn:
    """Print the report and end, without waiting for what the tested code left behind."""
    from hashlib import blake2b

    text = json.dumps(report)
    code = blake2b(text.encode(), key=bytes.fromhex(key)).hexdigest()
    print(f"\n{code} {text}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
