"""Checks: commands in the grader's own sandbox, which holds one candidate's tree."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from grader_parts import CLEAN, CORE, HARDCODED, NOISY, group_of, request_of

from configs.schema import JailSandbox
from envs.jail import JailProvider
from envs.sandbox import CommandResult, ScriptedProvider, ScriptedSandbox
from grader.candidates import CandidateGroup, label_group
from grader.checks import Checker, CheckError
from infra.errors import SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one provider, so that its servers serve many tests

OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, "")]
TOTAL = 'python3 -c "from shop.core import total; print(total([1, 2]), total([4]))"'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[JailProvider]:
    provider = JailProvider(JailSandbox(memory_mib=256, max_processes=40, file_size_mib=4, workspace_mib=16))
    yield provider
    await provider.close()


def label(group: CandidateGroup, slot: int) -> str:
    return next(c.label for c in group.candidates if c.trajectory.trajectory_id == f"g1/{slot}.0")


def checker(group: CandidateGroup, provider: JailProvider | ScriptedProvider, **changes: float) -> Checker:
    settings = {"limit": 20, "timeout_s": 20.0, "output_chars": 4000, **changes}
    return Checker(
        group,
        provider,
        limit=int(settings["limit"]),
        timeout_s=settings["timeout_s"],
        output_chars=int(settings["output_chars"]),
    )


# --- in the real jail -------------------------------------------------------------------------------------------------


async def test_a_command_sees_the_candidates_tree(provider: JailProvider) -> None:
    """M2.1: a targeted check; failing candidates can be checked too."""
    group = group_of(OUTCOMES)
    checks = checker(group, provider)
    found = {slot: (await checks.run(label(group, slot), TOTAL)).output for slot in range(4)}
    assert found == {0: "3 4\n", 1: "3 4\n", 2: "3 -4\n", 3: "-3 -4\n"}
    result = await checks.run(label(group, 1), "cat shop/extra.py; git status --short; exit 3")
    assert (result.exit_code, result.number, result.candidate) == (3, 5, label(group, 1))
    assert result.output == "UNUSED = 1\nOTHER = 2\n M shop/core.py\n?? shop/extra.py\n"
    assert [check.number for check in checks.results] == [1, 2, 3, 4, 5]
    await checks.close()


async def test_another_candidate_gets_a_fresh_sandbox(provider: JailProvider) -> None:
    """What the code of one left behind must not colour what is seen of the next."""
    group = group_of(OUTCOMES)
    checks = checker(group, provider)
    first, second = label(group, 0), label(group, 2)
    spoil = "echo x > shop/core.py; echo y > /tmp/left; mkdir -p ~/.x; git config core.hooksPath /tmp; sleep 99 &"
    await checks.run(first, spoil)
    assert (await checks.run(first, "cat shop/core.py /tmp/left")).output == "x\ny\n"  # the same one is kept
    result = await checks.run(second, f"ls -A /tmp; git config core.hooksPath; pgrep sleep; {TOTAL}")
    assert result.output.endswith("3 -4\n")
    assert "left" not in result.output
    assert (await checks.run(first, TOTAL)).output == "3 4\n"  # and it starts anew
    await checks.close()


async def test_the_time_limit(provider: JailProvider) -> None:
    group = group_of(OUTCOMES)
    checks = checker(group, provider, timeout_s=1.0)
    result = await checks.run("C1", "echo before; sleep 60; echo after")
    assert result.exit_code is None
    assert result.output == "before\n"
    assert (await checks.run("C1", "echo still here")).output == "still here\n"
    await checks.close()


async def test_head_and_tail_of_long_output_are_kept(provider: JailProvider) -> None:
    group = group_of(OUTCOMES)
    checks = checker(group, provider, output_chars=200)
    result = await checks.run("C1", "seq 1 100000; printf '\\377\\000'")
    assert result.output.startswith("1\n2\n3\n")
    assert "characters cut]" in result.output
    assert "100000" in result.output[-20:]
    assert len(result.output) < 300
    result.output.encode()
    await checks.close()


async def test_there_is_no_network(provider: JailProvider) -> None:
    checks = checker(group_of(OUTCOMES), provider)
    script = "import socket; socket.create_connection(('10.0.0.1', 80), timeout=5)"
    result = await checks.run("C1", f'python3 -c "{script}"')
    assert result.exit_code == 1
    assert "unreachable" in result.output
    await checks.close()


async def test_the_record_is_not_touched(provider: JailProvider) -> None:
    """Patches, logs and turns are what they were, whatever a check does."""
    group = group_of(OUTCOMES)
    before = repr(group)
    checks = checker(group, provider)
    for candidate in group.candidates:
        await checks.run(candidate.label, "rm -rf .git * /tmp/*; echo gone")
    await checks.close()
    assert repr(group) == before
    assert group.task.files["shop/core.py"] == CORE


async def test_a_patch_that_does_not_apply(provider: JailProvider) -> None:
    request, transcripts = request_of([(True, CLEAN), (False, CLEAN)])
    broken = CLEAN.replace("result = 0", "result = 1")
    group = label_group(
        group_id="g1",
        task=request.task,
        trajectories=request.trajectories,
        transcripts=[dataclasses.replace(transcripts[0], patch=broken), transcripts[1]],
        order_seed=request.order_seed,
    )
    checks = checker(group, provider)
    with pytest.raises(CheckError, match="does not apply"):
        await checks.run(label(group, 0), "true")
    assert (await checks.run(label(group, 1), TOTAL)).output == "3 4\n"
    await checks.close()


async def test_a_command_can_kill_its_sandbox_but_not_the_checks(provider: JailProvider) -> None:
    group = group_of(OUTCOMES)
    checks = checker(group, provider)
    await checks.run("C1", "kill -9 -1; kill -9 1")
    for _ in range(3):
        try:
            result = await checks.run("C1", "echo alive")
        except SandboxError:
            continue
        assert result.output == "alive\n"
    await checks.close()


# --- with a scripted sandbox ------------------------------------------------------------------------------------------


def fine(command: str) -> CommandResult:
    return CommandResult(output="", exit_code=0, timed_out=False, duration_s=0.0)


async def test_the_sandbox_starts_at_the_first_check_and_is_closed() -> None:
    provider = ScriptedProvider(lambda: ScriptedSandbox(fine))
    checks = checker(group_of(OUTCOMES), provider)
    await checks.close()
    assert provider.started == []
    await checks.run("C1", "true")
    await checks.run("C1", "true")
    assert [sandbox.closed for sandbox in provider.started] == [False]
    await checks.run("C2", "true")
    assert [sandbox.closed for sandbox in provider.started] == [True, False]
    await checks.close()
    await checks.close()
    assert all(sandbox.closed for sandbox in provider.started)


@pytest.mark.parametrize("when", ["start", "base64", "git apply", "the check"])
async def test_a_lost_sandbox_is_given_up_and_replaced(when: str) -> None:
    """It costs one check, never the grading."""
    losses = [when]

    def respond(command: str) -> CommandResult:
        if losses and losses[0] in command:
            losses.clear()
            raise SandboxError("lost")
        return fine(command)

    def make() -> ScriptedSandbox:
        if losses == ["start"]:
            losses.clear()
            raise SandboxError("none to be had")
        return ScriptedSandbox(respond)

    provider = ScriptedProvider(make)
    checks = checker(group_of(OUTCOMES), provider, limit=3)
    with pytest.raises(SandboxError):
        await checks.run("C1", "the check")
    assert all(sandbox.closed for sandbox in provider.started)
    assert checks.results == ()
    assert checks.left == 2
    assert (await checks.run("C1", "the check")).number == 1
    await checks.close()


async def test_a_cancelled_check_leaves_nothing_open() -> None:
    """The grading's time-out cancels what is under way; closing comes after it."""
    blocked = asyncio.Event()

    class Slow(ScriptedSandbox):
        async def run(self, command: str, *, timeout_s: float) -> CommandResult:
            if command == "sleep":
                await blocked.wait()
            return await super().run(command, timeout_s=timeout_s)

    provider = ScriptedProvider(lambda: Slow(fine))
    checks = checker(group_of(OUTCOMES), provider)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(checks.run("C1", "sleep"), 0.05)
    await checks.close()
    assert [sandbox.closed for sandbox in provider.started] == [True]


async def test_several_that_ask_at_once_take_turns() -> None:
    group = group_of(OUTCOMES)
    provider = ScriptedProvider(lambda: ScriptedSandbox(fine))
    checks = checker(group, provider)
    results = await asyncio.gather(*(checks.run(c.label, "true") for c in group.candidates))
    assert sorted(r.number for r in results) == [1, 2, 3, 4]
    assert sum(not sandbox.closed for sandbox in provider.started) == 1
    await checks.close()


@pytest.mark.parametrize(
    ("name", "command", "message"),
    [
        ("C9", "true", "no candidate C9"),
        ("C1", " \n", "empty"),
        ("C1", "a\0b", "NUL"),
        ("C1", "echo \ud800", "surrogate"),
    ],
)
async def test_what_cannot_be_run(name: str, command: str, message: str) -> None:
    provider = ScriptedProvider(lambda: ScriptedSandbox(fine))
    checks = checker(group_of(OUTCOMES), provider, limit=1)
    with pytest.raises(CheckError, match=message):
        await checks.run(name, command)
    assert provider.started == []
    await checks.run("C1", "true")
    with pytest.raises(CheckError, match="used up"):
        await checks.run("C1", "true")
    await checks.close()
