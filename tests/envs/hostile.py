"""What the tests of hostile policies share: an honest task, and a provider with limits that bombs reach quickly."""

from __future__ import annotations

from configs.schema import JailSandbox
from envs.jail import JailProvider
from envs.task import HiddenTests, Split, Task, TaskKind
from envs.verifier import Verification, verify_patch
from envs.workspace import extract_patch, prepare

LIMITS = JailSandbox(
    memory_mib=160, max_processes=40, cpu_s=2.0, file_size_mib=8, workspace_mib=24, max_files=3000, start_timeout_s=120
)
CORE = "LIMIT = 3\n\n\ndef allowed(n):\n    return n < LIMIT\n\n\ndef shape(n):\n    return {'n': n}\n"
VISIBLE = """import unittest

from shop.core import allowed


class VisibleTest(unittest.TestCase):
    def test_small(self):
        self.assertTrue(allowed(1))
"""
HIDDEN = """import unittest

from shop.core import allowed, shape


class HiddenTest(unittest.TestCase):
    def test_limit(self):
        self.assertIs(allowed(3), True)

    def test_above(self):
        self.assertFalse(allowed(4))

    def test_shape(self):
        self.assertEqual(shape(2), {"n": 2, "even": True})
"""
TASK = Task(
    task_id="hand/train/0/0",
    source="hand",
    kind=TaskKind.CODE,
    split=Split.TRAIN,
    statement="allowed(3) must be true, shape(2) must say whether n is even",
    files={
        "shop/__init__.py": "",
        "shop/core.py": CORE,
        "test_visible.py": VISIBLE,
        "setup.cfg": "[tool]\nx = 1\n",
        "data/a.txt": "1\n",
    },
    verifier=HiddenTests(
        files={"test_hidden.py": HIDDEN},
        command="python3 -m unittest -q test_hidden test_visible",
        modules=("test_hidden", "test_visible"),
        timeout_s=30.0,
    ),
)
HONEST = CORE.replace("<", "<=").replace("{'n': n}", "{'n': n, 'even': n % 2 == 0}")


async def patch_by(provider: JailProvider, command: str, files: dict[str, str] | None = None) -> str:
    """The patch that a rollout leaves which writes files and runs a command."""
    sandbox = await provider.start()
    try:
        await prepare(sandbox, TASK)
        await sandbox.write_files(files or {})
        await sandbox.run(command, timeout_s=30)
        return await extract_patch(sandbox)
    finally:
        await sandbox.close()


async def honest(provider: JailProvider, patch: str) -> Verification:
    """The verdict on a right solution."""
    return await verify_patch(TASK, patch, provider)
