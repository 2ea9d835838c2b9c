from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from configs.schema import JailSandbox
from envs.jail import JailProvider
from envs.sandbox import CommandResult, Sandbox, ScriptedSandbox
from envs.task import FinalState, HiddenTests, Split, Task, TaskKind
from envs.workspace import extract_patch, prepare
from infra.errors import SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")

CODE = Task(
    task_id="hand/train/0/0",
    source="hand",
    kind=TaskKind.CODE,
    split=Split.TRAIN,
    statement="",
    files={"shop/core.py": "def f(n):\n    return n < 3\n", "README": "x\n"},
    verifier=HiddenTests(files={}, command="true"),
)
GENERAL = Task(
    task_id="hand/train/0/1",
    source="hand",
    kind=TaskKind.GENERAL,
    split=Split.TRAIN,
    statement="",
    files={"in.txt": "1\n"},
    verifier=FinalState(files={"out.txt": "1\n"}),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[JailProvider]:
    provider = JailProvider(JailSandbox())
    yield provider
    await provider.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider: JailProvider) -> AsyncIterator[Sandbox]:
    sandbox = await provider.start()
    yield sandbox
    await sandbox.close()


async def shell(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run(command, timeout_s=20)
    assert result.exit_code == 0, result.output
    return result.output


async def test_a_code_task_starts_from_the_same_commit_everywhere(provider: JailProvider, sandbox: Sandbox) -> None:
    await prepare(sandbox, CODE)
    assert await shell(sandbox, "git status --porcelain; git log --format=%an; git ls-files") == (
        "developer\nREADME\nshop/core.py\n"
    )
    again = await provider.start()
    await prepare(again, CODE)
    assert await shell(sandbox, "git rev-parse HEAD") == await shell(again, "git rev-parse HEAD")
    await shell(again, "echo y >> README && git commit -qam change")
    await again.close()


async def test_a_general_task_has_files_and_no_repository(sandbox: Sandbox) -> None:
    await prepare(sandbox, GENERAL)
    assert await shell(sandbox, "ls -A") == "in.txt\n"


async def test_no_change_is_an_empty_patch(sandbox: Sandbox) -> None:
    await prepare(sandbox, CODE)
    assert await extract_patch(sandbox) == ""
    await shell(sandbox, "mkdir shop/__pycache__ && touch shop/__pycache__/core.pyc")
    assert await extract_patch(sandbox) == ""


async def test_an_edit_comes_out_as_git_prints_it(sandbox: Sandbox) -> None:
    await prepare(sandbox, CODE)
    await shell(sandbox, "sed -i '2s/</<=/' shop/core.py")
    assert (await extract_patch(sandbox)).splitlines()[-6:] == [
        "--- a/shop/core.py",
        "+++ b/shop/core.py",
        "@@ -1,2 +1,2 @@",
        " def f(n):",
        "-    return n < 3",
        "+    return n <= 3",
    ]


async def test_everything_since_the_base_counts_and_the_patch_recreates_it(
    provider: JailProvider, sandbox: Sandbox
) -> None:
    await prepare(sandbox, CODE)
    await shell(
        sandbox,
        "git mv README NOTES && git commit -qm move && echo new > 'a b.txt' && printf '\\0\\1\\2' > bin && "
        "ln -s a link && chmod +x shop/core.py && mkdir -p x/y && echo deep > x/y/z && git checkout -qb other",
    )
    patch = await extract_patch(sandbox)
    listing = "find . -path ./.git -prune -o -type f -printf '%p %m ' -exec cat {} ';' -o -type l -print | sort"
    other = await provider.start()
    await prepare(other, CODE)
    await other.write_files({"p": patch})
    await shell(other, "git apply p && rm p")
    assert await shell(other, listing) == await shell(sandbox, listing)
    await other.close()


async def test_bytes_that_are_no_text_come_out_as_they_are(provider: JailProvider, sandbox: Sandbox) -> None:
    """Latin-1, say: a patch in which such a byte became another would not apply, and a right solution would fail."""
    await prepare(sandbox, CODE)
    await shell(sandbox, "printf 'caf\\xe9 \\x85\\r\\n\\xe2\\x80\\xa8\\r' > README")
    patch = await extract_patch(sandbox)
    assert "+caf\udce9 \udc85\r\n+\u2028\r" in patch
    other = await provider.start()
    await prepare(other, CODE)
    await other.write_files({"p": patch})
    await shell(other, "git apply --whitespace=nowarn p")
    assert await shell(other, "base64 README") == await shell(sandbox, "base64 README")
    await other.close()


async def test_what_a_killed_git_left_does_not_hide_the_work(sandbox: Sandbox) -> None:
    """The final state is verified as it is (M1.3)."""
    await prepare(sandbox, CODE)
    await shell(sandbox, "echo y >> README; touch .git/index.lock")
    assert "+y" in await extract_patch(sandbox)


@pytest.mark.parametrize(
    "trick",
    [
        "git config core.fsmonitor 'touch /tmp/ran #'",
        "mkdir .git/hooks && cd .git/hooks && printf '#!/bin/sh\\ntouch /tmp/ran' > post-index-change && "
        "chmod +x post-index-change && cd ../..",
        "git config diff.external 'touch /tmp/ran #' && echo '*.py diff=x' > .git/info/attributes && "
        "git config diff.x.textconv 'touch /tmp/ran; cat'",
    ],
)
async def test_settings_of_the_repository_do_not_run(sandbox: Sandbox, trick: str) -> None:
    await prepare(sandbox, CODE)
    await shell(sandbox, f"{trick} && echo y >> README")
    assert "+y" in await extract_patch(sandbox)
    assert await shell(sandbox, "ls -A /tmp") == ""


async def test_a_broken_repository_gives_an_empty_patch(sandbox: Sandbox) -> None:
    await prepare(sandbox, CODE)
    await shell(sandbox, "echo y >> README; rm -rf .git")
    assert await extract_patch(sandbox) == ""


async def test_only_a_lost_sandbox_is_an_error() -> None:
    def full(command: str) -> CommandResult:
        return CommandResult(output="No space left on device", exit_code=1, timed_out=False, duration_s=0.0)

    with pytest.raises(SandboxError, match="No space left"):
        await prepare(ScriptedSandbox(full), CODE)
    assert await extract_patch(ScriptedSandbox(full)) == ""

    def lost(command: str) -> CommandResult:
        raise SandboxError("gone")

    with pytest.raises(SandboxError, match="gone"):
        await extract_patch(ScriptedSandbox(lost))
