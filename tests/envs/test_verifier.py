from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from configs.schema import JailSandbox, MinirepoSource
from envs.jail import JailProvider
from envs.replay import judge, patch_of
from envs.sandbox import CommandResult, ScriptedProvider, ScriptedSandbox
from envs.source import make_source
from envs.task import ExactAnswer, FinalState, HiddenTests, Quality, Split, Task, TaskKind
from envs.verifier import LOG_CHARS, is_test_file, verify_answer, verify_patch, verify_state
from envs.workspace import extract_patch, prepare
from infra.errors import SandboxError, VerifierError

pytestmark = pytest.mark.asyncio(loop_scope="module")

CORE = "LIMIT = 3\n\n\ndef allowed(n):\n    return n < LIMIT\n"
VISIBLE = """import unittest

from shop.core import allowed


class VisibleTest(unittest.TestCase):
    def test_small(self):
        self.assertTrue(allowed(1))
"""
HIDDEN = """import unittest

from shop.core import allowed


class HiddenTest(unittest.TestCase):
    def test_limit(self):
        self.assertTrue(allowed(3))

    def test_above(self):
        self.assertFalse(allowed(4))
"""
TASK = Task(
    task_id="hand/train/0/0",
    source="hand",
    kind=TaskKind.CODE,
    split=Split.TRAIN,
    statement="allowed(3) must be true",
    files={"shop/__init__.py": "", "shop/core.py": CORE, "test_visible.py": VISIBLE},
    verifier=HiddenTests(
        files={"test_hidden.py": HIDDEN},
        command="python3 -m unittest -q test_hidden test_visible",
        modules=("test_hidden", "test_visible"),
        timeout_s=20.0,
    ),
)
RIGHT = "sed -i '5s/</<=/' shop/core.py"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[JailProvider]:
    provider = JailProvider(JailSandbox())
    yield provider
    await provider.close()


async def patch_by(provider: JailProvider, command: str) -> str:
    sandbox = await provider.start()
    await prepare(sandbox, TASK)
    result = await sandbox.run(command, timeout_s=20)
    assert result.exit_code == 0, result.output
    patch = await extract_patch(sandbox)
    await sandbox.close()
    return patch


def with_tests(**changes: object) -> Task:
    assert isinstance(TASK.verifier, HiddenTests)
    return replace(TASK, verifier=replace(TASK.verifier, **changes))


async def test_a_right_patch_passes_five_times_alike(provider: JailProvider) -> None:
    patch = await patch_by(provider, RIGHT)
    results = [await verify_patch(TASK, patch, provider) for _ in range(5)]
    assert all(result.passed and result.reward == 1.0 for result in results)
    assert results[0].log.startswith("$ python3 -m unittest -q test_hidden test_visible\n")
    assert results[0].log.endswith("3 of 3 tests passed, 0 skipped")


async def test_no_patch_and_a_wrong_one_fail(provider: JailProvider) -> None:
    for patch in ("", await patch_by(provider, "sed -i '5s/</>/' shop/core.py")):
        result = await verify_patch(TASK, patch, provider)
        assert (result.passed, result.reward) == (False, 0.0)
        assert "AssertionError" in result.log


async def test_a_patch_that_does_not_apply_fails_with_the_reason(provider: JailProvider) -> None:
    other = (await patch_by(provider, RIGHT)).replace("return n < LIMIT", "return n > LIMIT")
    for patch, reason in ((other, "patch failed: shop/core.py:2"), ("no diff at all", "No valid patches")):
        result = await verify_patch(TASK, patch, provider)
        assert not result.passed
        assert "the patch does not apply" in result.log
        assert reason in result.log


@pytest.mark.parametrize(
    "edit",
    [
        "printf 'import unittest\\n' > test_visible.py && cp test_visible.py test_hidden.py",
        "rm test_visible.py && mkdir test_visible.py test_hidden.py && touch test_visible.py/x test_hidden.py/x",
        "mkdir test_hidden && touch test_hidden/__init__.py",
        "printf 'def load_tests(*a):\\n  import unittest\\n  return unittest.TestSuite()\\n' >> test_visible.py",
        "echo 'import os; os._exit(0)' | tee unittest.py json.py sitecustomize.py test_hidden.cpython-311.so",
    ],
)
async def test_editing_the_tests_changes_nothing(provider: JailProvider, edit: str) -> None:
    result = await verify_patch(TASK, await patch_by(provider, edit), provider)
    assert not result.passed


async def test_a_right_patch_that_also_edits_the_visible_tests_passes(provider: JailProvider) -> None:
    patch = await patch_by(provider, f"{RIGHT} && echo broken > test_visible.py")
    assert (await verify_patch(TASK, patch, provider)).passed


FORGERIES = {
    "exit": "import os\nos._exit(0)",
    "sys_exit": "import sys\nsys.exit(0)",
    "exit_in_call": "def allowed(n):\n    import os\n    os._exit(0)",
    "skip": "import unittest\ndef allowed(n):\n    raise unittest.SkipTest('no')",
    "assert_nothing": "import unittest\nunittest.TestCase.assertTrue = unittest.TestCase.assertFalse = lambda *a: None",
    "run_nothing": "import unittest\nunittest.TestCase.__call__ = lambda self, result: result.addSuccess(self)",
    "print_report": "import os\nprint('OK', flush=True)\nprint('{\"run\": 3, \"passed\": 3}', flush=True)\nos._exit(0)",
    "expected_failure": (
        "import sys, unittest\n"
        "for m in list(sys.modules.values()):\n"
        "    for v in list(vars(m).values()) if hasattr(m, '__dict__') else ():\n"
        "        if isinstance(v, type) and issubclass(v, unittest.TestCase): v.__unittest_expecting_failure__ = True"
    ),
    "read_key": (
        "import glob, os\n"
        "for path in glob.glob('/tmp/.*') + [f'/proc/{os.getppid()}/mem', f'/proc/{os.getppid()}/environ']:\n"
        "    try: print('leak', path, open(path, 'rb').read(1) and 'readable', flush=True)\n"
        "    except (OSError, IsADirectoryError): pass"
    ),
    "daemon": "import os, time\nif os.fork() == 0:\n    time.sleep(60)",
}


@pytest.mark.parametrize("name", sorted(FORGERIES))
async def test_a_result_cannot_be_forged_from_the_tested_module(provider: JailProvider, name: str) -> None:
    forged = FORGERIES[name] + "\n"
    head = f"cat > head <<'EOF'\n{forged}EOF\n"
    command = f"{head}cat head shop/core.py > new && mv new shop/core.py && rm head"
    if "def allowed" in forged:
        command = f"{head}mv head shop/core.py"
    result = await verify_patch(TASK, await patch_by(provider, command), provider)
    assert not result.passed
    if name == "read_key":
        assert "leak" in result.log  # the runner's own text, which is no secret
        assert "/mem readable" not in result.log
        assert result.log.count("leak") <= 4


@pytest.mark.parametrize("split", list(Split))
async def test_built_in_code_tasks_are_judged_as_in_process(provider: JailProvider, split: Split) -> None:
    source = make_source("code", MinirepoSource(type="minirepo", groups_per_step=1))
    task = source.task(split, 0)
    for trace in source.experts(task):
        result = await verify_patch(task, patch_of(task, trace.actions), provider)
        assert result.passed == judge(task, trace.actions) == (trace.quality is not Quality.WRONG), trace.strategy
    assert task.reference_patch is not None
    assert (await verify_patch(task, task.reference_patch, provider)).passed
    assert not (await verify_patch(task, "", provider)).passed


async def test_tests_that_run_out_of_time_fail(provider: JailProvider) -> None:
    patch = await patch_by(provider, "echo 'while True: pass' >> shop/core.py")
    result = await verify_patch(with_tests(timeout_s=0.7), patch, provider)
    assert not result.passed
    assert "killed after 0.7 s" in result.log


async def test_a_command_without_modules_is_judged_by_its_exit_code(provider: JailProvider) -> None:
    task = with_tests(modules=(), command="python3 -m unittest -q test_hidden 2>&1")
    assert (await verify_patch(task, await patch_by(provider, RIGHT), provider)).passed
    result = await verify_patch(task, "", provider)
    assert not result.passed
    assert "FAILED (failures=1)" in result.log


async def test_smuggled_byte_code_does_not_run(provider: JailProvider) -> None:
    compile_right = (
        f"{RIGHT} && python3 -c \"import py_compile; py_compile.compile('shop/core.py', "
        'invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)" && git checkout -q shop/core.py && '
        "ls shop/__pycache__/*.pyc && > .git/info/exclude"
    )
    patch = await patch_by(provider, compile_right)
    assert "GIT binary patch" in patch
    assert not (await verify_patch(TASK, patch, provider)).passed


async def test_long_logs_keep_head_and_tail(provider: JailProvider) -> None:
    patch = await patch_by(provider, 'echo \'print("first"); print("x" * 50000)\' >> shop/core.py')
    log = (await verify_patch(TASK, patch, provider)).log
    assert len(log) < LOG_CHARS + 100
    assert "first" in log
    assert "characters cut]" in log
    assert log.endswith("2 of 3 tests passed, 0 skipped")


async def test_only_the_sandbox_can_fail_the_verifier() -> None:
    def refuse() -> ScriptedSandbox:
        raise SandboxError("no room")

    with pytest.raises(VerifierError, match="no room"):
        await verify_patch(TASK, "", ScriptedProvider(refuse))

    def lose(command: str) -> CommandResult:
        raise SandboxError("gone")

    provider = ScriptedProvider(lambda: ScriptedSandbox(lose))
    with pytest.raises(VerifierError, match="gone"):
        await verify_patch(TASK, "", provider)
    assert provider.started[0].closed
    with pytest.raises(VerifierError, match="gone"):
        await verify_state(STATE, ScriptedSandbox(lose))


STATE = Task(
    task_id="hand/train/0/1",
    source="hand",
    kind=TaskKind.GENERAL,
    split=Split.TRAIN,
    statement="",
    files={"in.txt": "b\na\n"},
    verifier=FinalState(files={"out/sorted.txt": "a\nb\n", "in.txt": None, "empty": ""}),
)


@pytest.mark.parametrize(
    ("command", "passed", "why"),
    [
        ("mkdir out; sort in.txt > out/sorted.txt; rm in.txt; touch empty other", True, "as wanted"),
        ("mkdir out; sort in.txt > out/sorted.txt; touch empty", False, "in.txt: must not exist"),
        ("mkdir out; sort in.txt > out/sorted.txt; ln -sf none in.txt; touch empty", False, "in.txt: must not exist"),
        ("mkdir out; printf 'a\\nb' > out/sorted.txt; rm in.txt; touch empty", False, "out/sorted.txt: differs"),
        ("mkdir out; printf 'a\\nb\\nc' > out/sorted.txt; rm in.txt; touch empty", False, "out/sorted.txt: differs"),
        ("rm in.txt; touch empty", False, "out/sorted.txt: is missing"),
        ("mkdir -p out/sorted.txt; rm in.txt; touch empty", False, "out/sorted.txt: is no readable file"),
        ("mkdir out; mkfifo out/sorted.txt; rm in.txt; touch empty", False, "out/sorted.txt: is no readable file"),
        ("chmod 000 /workspace", False, "cannot be read"),
    ],
)
async def test_final_state(provider: JailProvider, command: str, passed: bool, why: str) -> None:
    sandbox = await provider.start()
    await prepare(sandbox, STATE)
    await sandbox.run(command, timeout_s=20)
    result = await verify_state(STATE, sandbox)
    assert (result.passed, result.reward) == (passed, float(passed))
    assert why in result.log
    await sandbox.close()


async def test_exact_answers() -> None:
    task = replace(STATE, kind=TaskKind.SINGLE_TURN, verifier=ExactAnswer(answer="42"))
    assert verify_answer(task, " 42\n").passed
    for answer in ("", "4 2", "42.0", "the answer is 42"):
        result = verify_answer(task, answer)
        assert not result.passed
        assert repr(answer) in result.log


@pytest.mark.parametrize("path", ["test_a.py", "a/test_b.py", "a/b_test.py", "tests/data.json", "conftest.py"])
async def test_test_files(path: str) -> None:
    assert is_test_file(path)
    assert not is_test_file(path.replace("test", "best"))
