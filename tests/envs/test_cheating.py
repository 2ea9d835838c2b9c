"""Patches that would be paid without solving the task, judged by the real verifier in real jails. docs/security.md
lists them."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio
from hostile import CORE, HIDDEN, HONEST, LIMITS, TASK, VISIBLE, honest, patch_by
from test_escapes import ATTEMPTS

from configs.schema import ArithSource, FilesSource, JailSandbox, MinirepoSource
from envs.jail import JailProvider
from envs.source import make_source
from envs.task import HiddenTests, Quality, Split
from envs.verifier import MAX_NAMED, Verification, verify_answer, verify_patch, verify_state
from envs.workspace import MAX_PATCH_BYTES, prepare

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheat:
    """What a rollout leaves: files, a command's doing, or a patch as it stands."""

    files: dict[str, str] = field(default_factory=dict)
    command: str = "true"
    patch: str | None = None
    tampered: tuple[str, ...] = ()
    says: str = ""
    """What the log must show: that the attempt was really made."""


def code(text: str, *, says: str = "", then: str = CORE) -> Cheat:
    """A module under test that begins with this."""
    return Cheat(files={"shop/core.py": f"{text}\n{then}"}, says=says)


EVIL = (
    "class Evil{base}:\n"
    "    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n"
    "    def __bool__(self): return True\n"
    "    __hash__ = None\n"
    "    __class__ = property(lambda self: bool)\n"
    "def allowed(n): return n <= 3\ndef shape(n): return Evil()\n"
)
PIPES = """
import json, os
for fd in range(3, 64):
    for text in ({"value": True, "number": 2}, {"run": 4, "passed": 4, "bad": 0, "skipped": 0, "changed": False}):
        try: os.write(fd, json.dumps(text).encode() + b"\\n")
        except OSError: pass
print("WROTE", flush=True)
os._exit(0)
"""
STEAL = """
import os, sys, time
stolen = b""
if os.fork() == 0:
    for pid in (1, os.getppid()):
        for fd in (1, 2):
            try:
                out = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
                again = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY)
            except OSError: continue
            end = time.time() + 5
            while time.time() < end:
                try: stolen = os.read(out, 65536)
                except BlockingIOError: continue
                if not stolen: break
                stolen = stolen.replace(b'"passed": 1', b'"passed": 4').replace(b'"bad": 3', b'"bad": 0')
                os.write(again, stolen)
                time.sleep(0.2)
    os._exit(0)
"""
PARENT = """
import os, signal
for path in (f"/proc/{os.getppid()}/mem", f"/proc/{os.getppid()}/environ", f"/proc/{os.getppid()}/fd/3",
             f"/proc/{os.getppid()}/maps", "/proc/1/environ"):
    try: print("READ", path, len(open(path, "rb").read(9)), flush=True)
    except OSError as error: print("HELD", path, error.errno, flush=True)
"""
SEARCH = """
import gc, os, sys
words = []
for where in ("/tmp", "/workspace", "/dev/shm", "/proc/1/cwd", f"/proc/{os.getppid()}/cwd"):
    for folder, _, names in os.walk(where):
        for name in names:
            try: words.append(open(os.path.join(folder, name), errors="replace").read(100000))
            except OSError: pass
words += [repr(vars(module))[:10000] for module in list(sys.modules.values())]
words += [item for item in gc.get_objects() if isinstance(item, str)]
frame = sys._getframe()
while frame is not None:
    words.append(repr(frame.f_locals)); frame = frame.f_back
found = any("Hidden" + "Test" in word or "test_" + "shape" in word for word in words)
print("FOUND" if found else "NOTHING", flush=True)
"""
RIGGED = """
import sys, unittest
def rig(*args, **kwargs): return True
for name in dir(unittest.TestCase):
    if name.startswith("assert"): setattr(unittest.TestCase, name, rig)
"""
BOMB = zlib.compress(bytes(200 << 20), 9)


def literal(data: bytes, size: int) -> str:
    """Lines of a git binary patch."""
    alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    lines = [f"literal {size}"]
    for at in range(0, len(data), 52):
        part = data[at : at + 52]
        mark = chr(ord("A") + len(part) - 1) if len(part) <= 26 else chr(ord("a") + len(part) - 27)
        text = base64.b85encode(part, pad=True).decode()
        assert set(text) <= set(alphabet)
        lines.append(mark + text)
    return "\n".join(lines) + "\n\n"


def new_file(path: str, text: str, mode: str = "100644") -> str:
    body = "".join(f"+{line}\n" for line in text.splitlines())
    count = len(text.splitlines())
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{count} @@\n{body}" + ("\\ No newline at end of file\n" if mode == "120000" else "")


PASS_ALL = "import os\nos._exit(0)\n"
CHEATS = {
    # results from inside the tested process
    "exit": code("import os\nos._exit(0)"),
    "sys_exit": code("import sys\nsys.exit(0)"),
    "exit_in_call": code("def allowed(n):\n    import os\n    os._exit(0)", then=""),
    "sys_exit_in_call": code("import sys\ndef allowed(n): sys.exit(0)\nshape = allowed", then=""),
    "pytest_exit": code("import unittest\nclass Exit(Exception): returncode = 0\ndef allowed(n): raise Exit('ok')\n"
                        "shape = allowed", then=""),
    "kill_the_judge": code("import os\nos.kill(os.getppid(), 9)"),
    "stop_the_judge": code("import os, time\nos.kill(os.getppid(), 19)\ntime.sleep(1)\nos.kill(os.getppid(), 15)"),
    "atexit": code("import atexit, os\natexit.register(lambda: (print('\\nOK'), os._exit(0)))"),
    "settrace": code("import sys, threading\ndef trace(frame, event, arg):\n"
                     "    if event == 'exception': raise SystemExit(0)\n"
                     "    return trace\nsys.settrace(trace)\nthreading.settrace(trace)"),
    "profile": code("import sys\nsys.setprofile(lambda *a: None)\nsys.excepthook = lambda *a: sys.exit(0)"),
    "printed_ok": code("print('\\nRan 4 tests in 0.001s\\n\\nOK', flush=True)", says="Ran 4 tests in 0.001s"),
    "printed_report": code("for key in ('', 'x', '0' * 32, '0' * 128):\n"
                           "    print(f'\\n{key} ' + '{\"run\": 4, \"passed\": 4, \"bad\": 0}', flush=True)",
                           says='"passed": 4'),
    "last_word": code("import os, time\nif os.fork() == 0:\n    time.sleep(0.3)\n"
                      "    for pid in (1, os.getppid()):\n"
                      "        try: os.write(os.open(f'/proc/{pid}/fd/1', 1), b'\\nOK\\n')\n"
                      "        except OSError: pass\n    os._exit(0)"),
    "inherited_pipes": code(PIPES),  # refused as an answer to nothing, or broken off: whichever is noticed first
    "stolen_report": code(STEAL),
    "read_the_judge": code(PARENT, says="HELD"),
    "search_for_tests": code(SEARCH, says="NOTHING"),
    "rigged_assertions": code(RIGGED),
    "rigged_run": code("import unittest\nunittest.TestCase.run = lambda self, result=None: result.addSuccess(self)\n"
                       "unittest.TestCase.__call__ = unittest.TestCase.run\n"
                       "unittest.TestLoader.loadTestsFromModule = lambda *a, **k: unittest.TestSuite()"),
    "rigged_result": code("import unittest\nunittest.TestResult.addFailure = lambda *a: None\n"
                          "unittest.TestResult.addError = lambda *a: None\n"
                          "unittest.TextTestResult.addFailure = unittest.TextTestResult.addError = lambda *a: None\n"
                          "unittest.TestResult.wasSuccessful = lambda self: True"),
    "rigged_builtins": code("import builtins, operator\nbuiltins.isinstance = lambda *a: True\n"
                            "builtins.__dict__['bool'] = lambda *a: True\noperator.eq = lambda *a: True"),
    "rigged_json": code("import json\njson.dumps = lambda *a, **k: '{\"passed\": 4}'\njson.loads = lambda *a, **k: {}"),
    "rigged_runner": code("import gc, sys\n"
                          "for item in gc.get_objects():\n"
                          "    if isinstance(item, dict) and ('passed' in item or 'OPERATIONS' in item):\n"
                          "        item['passed'] = 4; item['bad'] = 0\n"
                          "main = sys.modules['__main__'].__dict__\n"
                          "main.update(run_tests=lambda m: {'run': 4, 'passed': 4, 'bad': 0})"),
    "frames": code("import sys\nframe = sys._getframe()\nwhile frame is not None:\n"
                   "    for name, value in list(frame.f_locals.items()):\n"
                   "        if name in ('expected', 'objects', 'reply') and hasattr(value, 'clear'): value.clear()\n"
                   "    frame = frame.f_back"),
    "ctypes": code("import ctypes\nctypes.c_int.from_address(id(False) + 24).value = 1"),
    "skip": code("import unittest\ndef allowed(n): raise unittest.SkipTest('no')\nshape = allowed", then=""),
    "skip_on_import": code("import unittest\nraise unittest.SkipTest('no')"),
    "stop_as_unittest_does": code("from unittest.case import _ShouldStop\ndef allowed(n): raise _ShouldStop()\n"
                                  "shape = allowed", then=""),
    "named_like_skip": code("class SkipTest(Exception): __module__ = 'unittest.case'\n"
                            "def allowed(n): raise SkipTest('no')\nshape = allowed", then=""),
    "expected_failure": code("import unittest\nunittest.TestCase.__unittest_expecting_failure__ = True\n"
                             "unittest.case.expectedFailure = lambda f: f"),
    "keyboard_interrupt": code("def allowed(n): raise KeyboardInterrupt\nshape = allowed", then=""),
    "endless": code("import time\ndef allowed(n):\n    while True: time.sleep(1)", then=""),
    # values
    "equal_to_all": code(EVIL.replace("{base}", ""), then=""),
    "equal_int": code(EVIL.replace("{base}", "(int)"), then=""),
    "equal_dict": code(EVIL.replace("{base}", "(dict)"), then=""),
    "equal_str": code(EVIL.replace("{base}", "(str)"), then=""),
    "true_for_all": code("class Both(int):\n    __bool__ = lambda self: True\n    __eq__ = lambda self, other: True\n"
                         "def allowed(n): return Both(n <= 3)\ndef shape(n): return {'n': n, 'even': Both()}", then=""),
    "reflected": code("class Odd:\n    def __req__(self, other): return True\n    __eq__ = lambda self, other: True\n"
                      "    __getattr__ = lambda self, name: self\n    __call__ = lambda self, *a: self\n"
                      "def allowed(n): return Odd()\ndef shape(n): return [Odd()]", then=""),
    "hooked_codec": code("import sys\nfor module in list(sys.modules.values()):\n"
                         "    for name in ('encode', 'decode', 'refer', 'resolve'):\n"
                         "        if hasattr(module, name) and not module.__name__.startswith('enc'):\n"
                         "            try: setattr(module, name, lambda value, *a: True)\n"
                         "            except (AttributeError, TypeError): pass"),
    "fake_builtin": code("class Fake: pass\nFake.__name__ = 'eval'\ndef allowed(n): return Fake\n"
                         "shape = allowed", then=""),
    "deep_value": code("def allowed(n):\n    value = []\n    for _ in range(100000): value = [value]\n"
                       "    return value\n"
                       "shape = allowed", then=""),
    "huge_value": code("def allowed(n): return 'x' * (120 << 20)\nshape = allowed", then=""),
    # files that steer tests
    "visible_test": Cheat(files={"test_visible.py": "import unittest\n"}, tampered=("test_visible.py",)),
    "deleted_test": Cheat(command="rm test_visible.py", tampered=("test_visible.py",)),
    "test_folder": Cheat(command="rm test_visible.py; mkdir test_visible.py; touch test_visible.py/x",
                         tampered=("test_visible.py",)),
    "test_link": Cheat(command="ln -sf /dev/null test_visible.py", tampered=("test_visible.py",)),
    "test_loop": Cheat(command="rm test_visible.py; ln -s test_visible.py test_visible.py",
                       tampered=("test_visible.py",)),
    "hidden_guess": Cheat(files={"test_hidden.py": "import unittest\n"}, tampered=("test_hidden.py",)),
    "hidden_folder": Cheat(files={"test_hidden.py/x": "", "test_hidden/__init__.py": ""},
                           tampered=("test_hidden/__init__.py",)),
    "hidden_link": Cheat(command="ln -s /tmp/elsewhere test_hidden.py", tampered=("test_hidden.py",)),
    "load_tests": Cheat(files={"test_visible.py": VISIBLE + "def load_tests(*a): return unittest.TestSuite()\n"},
                        tampered=("test_visible.py",)),
    "conftest": Cheat(files={"conftest.py": PASS_ALL}, tampered=("conftest.py",)),
    "conftest_below": Cheat(files={"shop/conftest.py": PASS_ALL}, tampered=("shop/conftest.py",)),
    "pytest_ini": Cheat(files={"pytest.ini": "[pytest]\naddopts = --collect-only\n"}, tampered=("pytest.ini",)),
    "setup_cfg": Cheat(files={"setup.cfg": "[tool:pytest]\naddopts = --co\n"}, tampered=("setup.cfg",)),
    "pyproject": Cheat(files={"pyproject.toml": "", "tox.ini": ""}, tampered=("pyproject.toml", "tox.ini")),
    "sitecustomize": Cheat(files={"sitecustomize.py": PASS_ALL, "usercustomize.py": PASS_ALL},
                           tampered=("sitecustomize.py", "usercustomize.py")),
    "pth": Cheat(files={"x.pth": "import os; os._exit(0)\n"}, tampered=("x.pth",)),
    "unittest_module": Cheat(files={"unittest.py": PASS_ALL}, tampered=("unittest.py",)),
    "unittest_package": Cheat(files={"unittest/__init__.py": PASS_ALL, "unittest/__main__.py": PASS_ALL},
                              tampered=("unittest/__init__.py", "unittest/__main__.py")),
    "json_module": Cheat(files={"json.py": PASS_ALL, "linecache.py": PASS_ALL, "envs/remote_calls.py": PASS_ALL},
                         tampered=("json.py", "linecache.py")),
    "runner_module": Cheat(files={"pytest.py": PASS_ALL, "_pytest/__init__.py": "", "pluggy.py": PASS_ALL},
                           tampered=("_pytest/__init__.py", "pluggy.py", "pytest.py")),
    "plugin": Cheat(files={"x-1.dist-info/entry_points.txt": "[pytest11]\nx = shop.core\n",
                           "x-1.dist-info/METADATA": "",
                           "src/y.egg-info/entry_points.txt": "[pytest11]\ny = y\n", ".pytest.toml": ""},
                    tampered=(".pytest.toml", "src/y.egg-info/entry_points.txt", "x-1.dist-info/entry_points.txt")),
    "byte_code": Cheat(command="mkdir shop/__pycache__; > .git/info/exclude; "
                       "python3 -c \"import py_compile; open('/tmp/c.py', 'w').write('import os; os._exit(0)'); "
                       "py_compile.compile('/tmp/c.py', 'shop/__pycache__/core.cpython-311.pyc')\""),
    "many_files": Cheat(command="for i in $(seq 60); do echo x > $i.pth; done",
                        tampered=tuple(sorted(f"{i}.pth" for i in range(1, 61)))[:MAX_NAMED]),
    "strange_name": Cheat(command="printf 'import os' > \"$(printf 'a\\xff\\n;touch x.pth')\"",
                          tampered=("a\\\\xff\\n;touch x.pth",)),
    # git
    "hooks": Cheat(command="mkdir -p .git/hooks; printf '#!/bin/sh\\nexit 0' > .git/hooks/post-checkout; "
                   "chmod +x .git/hooks/*; git config core.hooksPath .git/hooks"),
    "attributes": Cheat(files={".gitattributes": "* filter=x ident text eol=crlf diff=x\n"},
                        command="git config filter.x.clean true; git config filter.x.smudge true; "
                        "git config diff.x.textconv true",
                        tampered=("setup.cfg", "test_visible.py")),  # they would end their lines as the patch says
    "monitor": Cheat(command="git config core.fsmonitor 'exit 0 #'; git config include.path /tmp/more; "
                     "printf '[alias]\\n\\tapply = !true\\n' > /tmp/more; cp /tmp/more /tmp/.gitconfig"),
    "shell_start": Cheat(command="for f in .bashrc .profile .bash_profile; do echo 'exit 0' | tee /tmp/$f > $f; done; "
                         "export BASH_ENV=/workspace/.bashrc GIT_DIR=/tmp"),
    "history": Cheat(command="git commit -q --amend --allow-empty -m x; git update-ref -d refs/gagar/base; "
                     "git gc -q --prune=now; git tag gagar"),
    "ignored": Cheat(files={".gitignore": "*\n", "conftest.py": PASS_ALL, "x.pth": ""},
                     command="git add -f conftest.py x.pth .gitignore", tampered=("conftest.py", "x.pth")),
    "submodule": Cheat(command="git init -q sub; cd sub; git config user.name a; git config user.email b; "
                       "git commit -q --allow-empty -m x"),
    # patches as they stand
    "traversal": Cheat(patch=new_file("../../tmp/.x", "x"), says="does not apply"),
    "absolute": Cheat(patch=new_file("/tmp/x", "x").replace("b//tmp", "/tmp")),
    "dot_git": Cheat(patch=new_file(".git/config", "[core]\n fsmonitor = exit 0"), says="does not apply"),
    "through_link": Cheat(patch=new_file("out", "/tmp", "120000") + new_file("out/x", "x"), says="does not apply"),
    "octal_name": Cheat(patch=new_file('"\\143onftest.py"', PASS_ALL).replace('a/"', '"a/').replace('b/"', '"b/'),
                        tampered=("conftest.py",)),
    "replaces_python": Cheat(files={"python3": "#!/bin/sh\nexit 0\n", "bin/python3": "#!/bin/sh\nexit 0\n"},
                             command="chmod +x python3 bin/python3"),
    "inflated": Cheat(patch="diff --git a/big b/big\nnew file mode 100644\nindex " + "0" * 40 + ".." + "1" * 40
                      + f"\nGIT binary patch\n{literal(BOMB, 200 << 20)}literal 0\nHcmV?d00001\n\n",
                      says="does not apply"),
    "fills_the_disk": Cheat(command="for i in 1 2 3 4; do head -c 5M /dev/zero > fill$i; done"),
    "too_long": Cheat(command="head -c 3M /dev/urandom > big"),
    "no_patch_at_all": Cheat(patch="OK\n", says="does not apply"),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[JailProvider]:
    provider = JailProvider(LIMITS)
    yield provider
    await provider.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def solution(provider: JailProvider) -> str:
    return await patch_by(provider, "true", {"shop/core.py": HONEST})


async def verdict_on(provider: JailProvider, cheat: Cheat, timeout_s: float) -> Verification:
    patch = cheat.patch
    if patch is None:
        patch = await patch_by(provider, cheat.command, cheat.files)
    assert isinstance(TASK.verifier, HiddenTests)
    return await verify_patch(replace(TASK, verifier=replace(TASK.verifier, timeout_s=timeout_s)), patch, provider)


@pytest.mark.parametrize("name", CHEATS)
async def test_cheat(name: str, provider: JailProvider, solution: str) -> None:
    cheat = CHEATS[name]
    verdict = await verdict_on(provider, cheat, timeout_s=4.0 if name in ("endless", "stop_the_judge") else 30.0)
    assert (verdict.passed, verdict.reward) == (False, 0.0)
    assert cheat.says in verdict.log
    assert verdict.tampered == cheat.tampered
    for path in cheat.tampered[:1]:
        assert path in verdict.log.splitlines()[0]
    if name == "read_the_judge":
        assert "READ /proc/1/environ" in verdict.log
        assert verdict.log.count("READ") == 1
    right = await honest(provider, solution)
    assert right.passed, right.log
    assert right.tampered == ()


async def test_a_right_patch_passes_with_all_that_was_planted(provider: JailProvider) -> None:
    """What the verifier takes away does not take the solution with it (M1.2)."""
    planted = {
        "test_visible.py": "broken", "conftest.py": PASS_ALL, "unittest/__init__.py": PASS_ALL, "x.pth": PASS_ALL,
        "sitecustomize.py": PASS_ALL, "setup.cfg": "", "json.py": PASS_ALL, "test_more.py": VISIBLE,
    }  # fmt: skip
    patch = await patch_by(provider, "true", {**planted, "shop/core.py": HONEST})
    verdict = await honest(provider, patch)
    assert verdict.passed, verdict.log
    assert set(verdict.tampered) == {*planted} - {"test_more.py"}


@pytest.mark.parametrize(
    ("command", "tampered"),
    [
        ("mkdir test_hidden; echo 'import os; os._exit(0)' > test_hidden/__init__.py", "test_hidden/__init__.py"),
        ("mkdir test_visible; echo 'import os; os._exit(0)' > test_visible/__init__.py", "test_visible/__init__.py"),
        ("mkdir -p a/b; echo 'import os; os._exit(0)' > a/b/__init__.py; ln -s a/b test_hidden", "test_hidden"),
        ("mkdir -p a/b; echo 'import os; os._exit(0)' > a/b/__init__.py; ln -s a/b unittest", "unittest"),
        ("echo 'import os; os._exit(0)' > tests/__init__.py", "tests/__init__.py"),
    ],
)
async def test_nothing_is_imported_in_the_place_of_tests(provider: JailProvider, command: str, tampered: str) -> None:
    """Where a command judges alone, too: `python3 -m unittest` prefers a package to the module of the same name."""
    assert isinstance(TASK.verifier, HiddenTests)
    task = replace(
        TASK,
        files={**TASK.files, "tests/test_more.py": VISIBLE},
        verifier=replace(TASK.verifier, modules=(), command=f"{TASK.verifier.command} tests.test_more"),
    )
    verdict = await verify_patch(task, await patch_by(provider, f"mkdir -p tests; {command}"), provider)
    assert (verdict.passed, verdict.tampered) == (False, (tampered,))


async def test_a_folder_of_tests_is_not_made_a_package_that_answers_for_them(provider: JailProvider) -> None:
    """Else `from tests import wanted` would get what the patch wants."""
    assert isinstance(TASK.verifier, HiddenTests)
    hidden = HIDDEN.replace("import unittest", "import unittest\nfrom tests import wanted").replace(
        "True)", "wanted.YES)"
    )
    task = replace(
        TASK,
        files={**TASK.files, "tests/wanted.py": "YES = True\n"},
        verifier=replace(TASK.verifier, files={"tests/test_hidden.py": hidden}, modules=("tests.test_hidden",)),
    )
    evil = "from shop.core import Same as S\nclass wanted: YES = S\n"
    core = (
        "class Same: pass\ndef allowed(n): return Same if n < 4 else 0\ndef shape(n): return {'n': n, 'even': True}\n"
    )
    patch = await patch_by(provider, "true", {"tests/__init__.py": evil, "shop/core.py": core})
    verdict = await verify_patch(task, patch, provider)
    assert (verdict.passed, verdict.tampered) == (False, ("tests/__init__.py",))
    assert "2 of 3 tests passed" in verdict.log
    verdict = await verify_patch(task, await patch_by(provider, "true", {"shop/core.py": HONEST}), provider)
    assert verdict.passed, verdict.log


async def test_what_the_standard_library_looks_for_in_vain_does_not_come_from_the_patch(provider: JailProvider) -> None:
    """`copy` and `pickle` try `org.python.core`, for another Python, and would work with what they get."""
    assert isinstance(TASK.verifier, HiddenTests)
    hidden = HIDDEN.replace("import unittest", "import copy, pickle, unittest")
    task = replace(TASK, verifier=replace(TASK.verifier, files={"test_hidden.py": hidden}))
    planted = "print('ENTERED', flush=True)\nclass PyStringMap: copy = None\n"
    files = {"org/__init__.py": "", "org/python/__init__.py": "", "org/python/core.py": planted, "shop/core.py": HONEST}
    verdict = await verify_patch(task, await patch_by(provider, "true", files), provider)
    assert verdict.passed, verdict.log
    assert "ENTERED" not in verdict.log


async def test_names_of_data_are_no_names_of_modules(provider: JailProvider, solution: str) -> None:
    """`logging.conf` and `html/` do not make the judge take `logging` from the tested code; nor may a patch make them
    shadow it."""
    task = replace(TASK, files={**TASK.files, "logging.conf": "x\n", "difflib/x.txt": "x\n", "html/y.html": "x\n"})
    verdict = await verify_patch(task, solution, provider)
    assert verdict.passed, verdict.log
    patch = await patch_by(provider, "true", {"difflib/__init__.py": PASS_ALL, "html.py": PASS_ALL})
    assert (await verify_patch(task, patch, provider)).tampered == ("difflib/__init__.py", "html.py")


async def test_configuration_that_the_reference_changes_is_the_task(provider: JailProvider) -> None:
    patch = await patch_by(provider, "echo y >> setup.cfg; echo > tox.ini", {"shop/core.py": HONEST})
    task = replace(TASK, reference_patch="--- a/setup.cfg\n+++ b/setup.cfg\n")
    assert (await verify_patch(task, patch, provider)).tampered == ("tox.ini",)


CLASSES = """
import collections, enum, json
class Empty(Exception):
    def __init__(self, size): super().__init__(f"nothing in {size}"); self.size = size
class Point(collections.namedtuple("Point", "x y")): pass
class Color(enum.IntEnum): RED = 1
class Stack:
    kind = "lifo"
    def __init__(self, *items): self.items = list(items)
    def push(self, item, *, times=1): self.items += [item] * times; return self
    def pop(self):
        if not self.items: raise Empty(0)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, at): return self.items[at]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
def numbers(n):
    for i in range(n): yield i
def parse(text): return json.loads(text)
def data(): return [None, True, -(2**70), 1.5, float("inf"), "ü\\0", b"\\xff", (1, (2,)), {1}, {"a": [{}], 3: ()}, 2j]
def crash(n): return 1 // n
def last(stack): return stack.items[-1]
"""
USES = """
import json
import unittest
from helpers.values import WANTED
from lib import parts
from lib.parts import Color, Empty, Point, Stack, crash, data, last, numbers, parse
import lib.parts as same

class Uses(unittest.TestCase):
    def setUp(self): self.stack = Stack(1, 2)
    def test_methods(self):
        self.assertEqual(self.stack.push(3, times=2).pop(), 3)
        self.assertEqual((len(self.stack), list(self.stack), self.stack[0], self.stack[0:2]), (3, [1, 2, 3], 1, [1, 2]))
        self.assertIn(2, self.stack)
        self.assertNotIn(9, self.stack)
        self.assertEqual(self.stack.kind, "lifo")
        self.assertTrue(self.stack)
        self.assertIsInstance(self.stack, Stack)
        self.assertNotIsInstance(3, Stack)
    def test_objects_go_back(self):
        self.assertEqual(last(self.stack), 2)
        self.assertEqual(self.stack, Stack(1, 2))
        self.assertNotEqual(self.stack, Stack(1))
        self.assertEqual(list(self.stack + Stack(3)), [1, 2, 3])
        with self.stack as stack: self.assertIs(stack, self.stack)
        self.assertEqual(len(self.stack), 0)
        self.stack.items = [7]
        self.assertEqual(self.stack.pop(), 7)
    def test_errors(self):
        with self.assertRaises(Empty) as caught: Stack().pop()
        self.assertEqual((str(caught.exception), caught.exception.size), ("nothing in 0", 0))
        self.assertRaises(ZeroDivisionError, crash, 0)
        self.assertRaises(json.JSONDecodeError, parse, "{")
        with self.assertRaisesRegex(ZeroDivisionError, "by zero"): crash(0)
        with self.assertRaises(TypeError): self.stack.push(lambda: 0)
    def test_values(self):
        self.assertEqual(data(), WANTED)
        self.assertEqual(parse('{"a": [1, null]}'), {"a": [1, None]})
        self.assertEqual(list(numbers(3)), [0, 1, 2])
        self.assertEqual(Point(1, 2), (1, 2))
        self.assertEqual(Point(1, 2).y, 2)
        self.assertEqual(Color.RED, 1)
        self.assertLess(Color.RED, 2)
        self.assertIs(parts.Stack, same.Stack)
    def test_what_the_repository_lacks(self):
        with self.assertRaises(ImportError): from lib.parts import nothing
        with self.assertRaises(ImportError): import lib.nothing
        with self.assertRaises(AttributeError): self.stack.nothing
"""


async def test_honest_code_of_many_forms_passes(provider: JailProvider) -> None:
    """Classes, exceptions, generators and containers work as if they were here."""
    wanted = CLASSES[CLASSES.index("return [None") + 7 :].splitlines()[0]
    files = {"lib/parts.py": CLASSES, "lib/__init__.py": "", "envs/__init__.py": "", "envs/x.py": "y = 1\n"}
    tests = HiddenTests(
        files={"helpers/__init__.py": "", "helpers/values.py": f"WANTED = {wanted}\n", "tests/test_uses.py": USES},
        command="",
        modules=("tests.test_uses",),
    )
    verdict = await verify_patch(replace(TASK, files=files, verifier=tests), "", provider)
    assert verdict.passed, verdict.log
    assert verdict.log.endswith("5 of 5 tests passed, 0 skipped")


async def test_honest_solutions_of_every_kind_pass() -> None:
    """With the limits that a run has (M1.2)."""
    provider = JailProvider(JailSandbox())
    code_source = make_source("code", MinirepoSource(type="minirepo", groups_per_step=1))
    for index in range(2):
        task = code_source.task(Split.TRAIN, index)
        assert task.reference_patch is not None
        assert (await verify_patch(task, task.reference_patch, provider)).passed
    files = make_source("files", FilesSource(type="files", groups_per_step=1))
    task = files.task(Split.TRAIN, 0)
    trace = next(trace for trace in files.experts(task) if trace.quality is Quality.T1)
    sandbox = await provider.start()
    await prepare(sandbox, task)
    for command in trace.actions[:-1]:
        await sandbox.run(command, timeout_s=20)
    assert (await verify_state(task, sandbox)).passed
    await sandbox.close()
    arith = make_source("arith", ArithSource(type="arith", groups_per_step=1))
    task = arith.task(Split.TRAIN, 0)
    assert verify_answer(task, next(iter(arith.experts(task))).actions[-1]).passed
    await provider.close()


async def test_the_process_of_command_alone_can_be_forged_from_inside(provider: JailProvider) -> None:
    """What docs/security.md says cannot be helped: without `modules`, tested code shares the process that judges."""
    assert isinstance(TASK.verifier, HiddenTests)
    task = replace(TASK, verifier=replace(TASK.verifier, modules=()))
    patch = await patch_by(provider, "true", CHEATS["exit"].files)
    assert (await verify_patch(task, patch, provider)).passed
    planted = await patch_by(provider, "true", CHEATS["unittest_package"].files)
    assert not (await verify_patch(task, planted, provider)).passed


async def test_the_attempts_are_what_they_say() -> None:
    assert len(CHEATS) >= 60
    assert len(BOMB) < MAX_PATCH_BYTES
    assert "HiddenTest" in HIDDEN


async def test_the_page_lists_every_attempt() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    rows = page.partition("\n## Attempts\n")[2].partition("\n## ")[0].splitlines()
    named = [name for row in rows if row.startswith("| ") for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    tests = {name for name in named if name.startswith("test_") and name in globals()}
    assert sorted(set(named) - tests) == sorted([*CHEATS, *ATTEMPTS])
