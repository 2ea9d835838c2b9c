"""Rollouts that a harness runs through the gateway: how they end, and what of them the learner gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import httpx
import pytest
import pytest_asyncio
from sampling_engine import SamplingEngine
from test_agent import STATE
from test_gateway_session import check_exact

from configs.schema import LimitsConfig, RolloutConfig
from envs.sandbox import CommandResult, ScriptedProvider, ScriptedSandbox
from envs.task import Task
from infra.errors import EngineError, HarnessError, SandboxError
from rollout.chat import ChatFormat
from rollout.engine import Engine, ScriptedEngine
from rollout.gateway.server import Endpoint, Gateway
from rollout.harness import Commands, Harness, run_harness_episode
from rollout.trajectory import Payload, Status, Trajectory, Transcript

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What mini-swe-agent's last command says."""
Result = tuple[Trajectory, Payload | None, Transcript]


class Client:
    """A harness for tests: appends what commands say, until the policy says `submit`."""

    def __init__(self, *, before: Callable[[int], Awaitable[None]] | None = None, compact_at: int = 99) -> None:
        self._before = before
        self._compact_at = compact_at

    async def run(self, *, task: Task, endpoint: Endpoint, commands: Commands) -> Status:
        messages = [{"role": "user", "content": task.statement}]
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        async with httpx.AsyncClient(base_url=endpoint.base_url, headers=headers, timeout=60) as client:
            for turn in range(100):
                if self._before is not None:
                    await self._before(turn)
                answer = await client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0.2})
                if answer.status_code != 200:
                    raise HarnessError(f"no reply: {answer.text}")
                text = answer.json()["choices"][0]["message"]["content"]
                if text == "submit":
                    return Status.SUBMITTED
                result = await commands.run(text, timeout_s=60)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result.output}]
                if turn == self._compact_at:
                    messages = [messages[0], {"role": "user", "content": "so far so good"}]
        raise AssertionError


@pytest.fixture(scope="module")
def chat(tokenizer_dir: str) -> ChatFormat:
    return ChatFormat.load(tokenizer_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    await gateway.close()


def saying(chat: ChatFormat, *messages: str) -> ScriptedEngine:
    said = iter([*messages])
    return ScriptedEngine(lambda name, prompt: [*chat.encode(next(said)), chat.end_id])


def provider(duration_s: float = 0.1) -> ScriptedProvider:
    """Sandboxes that copied `a` to `b`, whatever they are told."""

    def respond(command: str) -> CommandResult:
        if command == "lose":
            raise SandboxError("gone")
        if "base64 -w0" in command:  # the verifier reads b
            return CommandResult(output="=MQo=", exit_code=0, timed_out=False, duration_s=0.0)
        if command.rstrip("'").endswith(f"echo {SUBMITTED}"):  # the environment before it may say so too
            return CommandResult(output=f"{SUBMITTED}\n", exit_code=0, timed_out=False, duration_s=0.0)
        exit_code = 3 if command in ("ls", "cat a") else 0
        return CommandResult(output=f"did {command}", exit_code=exit_code, timed_out=False, duration_s=duration_s)

    return ScriptedProvider(lambda: ScriptedSandbox(respond))


async def episode(
    gateway: Gateway,
    chat: ChatFormat,
    engine: Engine,
    *,
    harness: Harness | None = None,
    sandboxes: ScriptedProvider | None = None,
    name: str = "g/0.0",
    **limits: float,
) -> Result:
    given = {"max_turn_tokens": 40, "max_total_tokens": 4000, **limits}
    return await run_harness_episode(
        harness=harness or Client(),
        gateway=gateway,
        task=STATE,
        trajectory_id=name,
        group_id="g",
        engine=engine,
        chat=chat,
        provider=sandboxes or provider(),
        config=RolloutConfig(limits=LimitsConfig.model_validate(given)),
    )


async def test_a_harness_that_submits(gateway: Gateway, chat: ChatFormat) -> None:
    sandboxes = provider()
    trajectory, payload, transcript = await episode(
        gateway, chat, saying(chat, "ls", "cat a", "submit"), sandboxes=sandboxes
    )
    assert (trajectory.status, trajectory.turns, trajectory.contexts, trajectory.drift) == (Status.SUBMITTED, 3, 1, 0)
    assert trajectory.passed and trajectory.reward == 1.0
    assert [(t.action, t.observation, t.exit_code) for t in transcript.turns] == [
        ("ls", "did ls", 3), ("cat a", "did cat a", 3), ("submit", "", None),
    ]  # fmt: skip
    assert payload is not None and trajectory.payload_sha256 == payload.sha256()
    assert trajectory.response_tokens == payload.loss_mask.sum() == sum(t.response_tokens for t in transcript.turns)
    assert trajectory.total_tokens == len(payload.token_ids)
    assert trajectory.prompt_tokens == len(chat.initial(None, STATE.statement))
    assert trajectory.notes == ("temperature=0.2 has no effect: the run's sampling is recorded",)
    assert trajectory.sandbox_s >= 0.2
    assert all(sandbox.closed for sandbox in sandboxes.started)


async def test_many_at_once_with_compaction_are_token_exact(gateway: Gateway, chat: ChatFormat) -> None:
    engine = SamplingEngine([i for i in range(5, 290) if i not in chat.stop_ids])
    results = await asyncio.gather(
        *(
            episode(gateway, chat, engine, harness=Client(compact_at=1), name=f"g{i}/0.0", max_turns=4)
            for i in range(20)
        )
    )
    for index, (trajectory, payload, _) in enumerate(results):
        assert payload is not None
        assert (trajectory.status, trajectory.contexts, trajectory.drift) == (Status.TURN_LIMIT, 2, 1)
        check_exact(payload, engine, f"g{index}/0.0")


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({"max_turns": 2}, Status.TURN_LIMIT),
        ({"max_total_tokens": 60, "max_turn_tokens": 20}, Status.TOKEN_LIMIT),
        ({"command_budget_s": 0.15}, Status.TIME_LIMIT),
    ],
)
async def test_a_budget_ends_it_and_what_is_left_is_verified(
    gateway: Gateway, chat: ChatFormat, limits: dict[str, float], status: Status
) -> None:
    trajectory, payload, _ = await episode(gateway, chat, saying(chat, *["ls"] * 30), **limits)
    assert trajectory.status is status and trajectory.passed
    assert payload is not None and payload.loss_mask.any()
    assert len(payload.token_ids) <= limits.get("max_total_tokens", 4000)


async def test_what_is_lost_masks_and_says_what(gateway: Gateway, chat: ChatFormat) -> None:
    def lose(name: str, prompt: Sequence[int]) -> Sequence[int]:
        raise EngineError("no engine")

    async def fail(turn: int) -> None:
        raise HarnessError("a fault of its own")

    async def hang(turn: int) -> None:
        await asyncio.sleep(60)

    class Idle:
        async def run(self, *, task: Task, endpoint: Endpoint, commands: Commands) -> Status:
            return Status.SUBMITTED

    cases: list[tuple[Engine, Harness, dict[str, float], Status, str]] = [
        (ScriptedEngine(lose), Client(), {}, Status.INFRA_ENGINE, "no engine"),
        (saying(chat, "lose"), Client(), {}, Status.INFRA_SANDBOX, "gone"),
        (saying(chat, "ls"), Client(before=fail), {}, Status.INFRA_WORKER, "a fault of its own"),
        (saying(chat, "ls"), Idle(), {}, Status.INFRA_WORKER, "without a reply"),
        (saying(chat, "ls"), Client(before=hang), {"wall_s": 0.5}, Status.INFRA_WALL, "wall_s = 0.5"),
        (saying(chat, "ls"), Client(), {"max_total_tokens": 5, "max_turn_tokens": 2}, Status.INFRA_SETUP, "max_total"),
    ]
    for engine, harness, limits, status, error in cases:
        sandboxes = provider()
        trajectory, payload, _ = await episode(gateway, chat, engine, harness=harness, sandboxes=sandboxes, **limits)
        assert (trajectory.status, trajectory.passed, trajectory.reward, payload) == (status, None, None, None)
        assert error in (trajectory.error or "")
        assert all(sandbox.closed for sandbox in sandboxes.started)
