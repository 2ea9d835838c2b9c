"""mini-swe-agent, unmodified, over the gateway: installed beside the environment on the first run, if PyPI answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from sampling_engine import SamplingEngine
from test_agent import CODE
from test_gateway_clients import TOOL_TEMPLATE
from test_gateway_harness import episode, provider
from test_gateway_session import check_exact

from configs.schema import JailSandbox, LimitsConfig, MiniSweAgentHarness, RolloutConfig
from envs.jail import JailProvider
from rollout.chat import ChatFormat
from rollout.gateway.server import Gateway
from rollout.harness import Harness, make_harness, run_harness_episode
from rollout.trajectory import Status

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
SITE = Path(sys.prefix) / "mini-swe-agent"
FIX = "sed -i 's/n < LIMIT/n <= LIMIT/' shop/core.py"


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    if not (SITE / "minisweagent").is_dir():
        lock = str(ROOT / "requirements" / "mini-swe-agent.txt")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(SITE), "-r", lock]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            pytest.skip(f"mini-swe-agent cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    sys.path.append(str(SITE))  # last: the environment's own versions win
    yield
    sys.path.remove(str(SITE))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    await gateway.close()


@pytest.fixture(scope="module")
def chat(tokenizer_dir: str) -> ChatFormat:
    return ChatFormat.load(tokenizer_dir)


@pytest.fixture(scope="module")
def harness(_package: None) -> Harness:
    file = str(ROOT / "configs" / "harness" / "mini_swe_agent.yaml")
    made = make_harness(RolloutConfig(harness=MiniSweAgentHarness(type="mini_swe_agent", config_file=file)))
    assert made is not None
    return made


async def test_it_solves_a_task_in_the_jail(gateway: Gateway, chat: ChatFormat, harness: Harness) -> None:
    said = iter(["grep -n LIMIT shop/core.py", FIX, "ls nowhere", "submit"])
    engine = SamplingEngine([], script=lambda prompt: chat.encode(next(said)))
    jails = JailProvider(JailSandbox())
    try:
        trajectory, payload, transcript = await run_harness_episode(
            harness=harness,
            gateway=gateway,
            task=CODE,
            trajectory_id="g/0.0",
            group_id="g",
            engine=engine,
            chat=chat,
            provider=jails,
            config=RolloutConfig(limits=LimitsConfig(max_total_tokens=4000, command_timeout_s=60, wall_s=500)),
        )
    finally:
        await jails.close()
    assert (trajectory.status, trajectory.passed, trajectory.error) == (Status.SUBMITTED, True, None)
    assert (trajectory.turns, trajectory.contexts, trajectory.drift) == (4, 1, 0)
    assert [turn.exit_code for turn in transcript.turns] == [0, 0, 2, 0]
    assert transcript.turns[1].observation == "[ok]"
    assert "[exit 2]" in transcript.turns[2].observation
    assert transcript.patch.endswith("-    return n < LIMIT\n+    return n <= LIMIT\n")
    assert payload is not None
    check_exact(payload, engine, "g/0.0")
    # What follows a reply is exactly the observation, as the built-in loop would show it.
    first = chat.initial("", CODE.statement)
    assert payload.token_ids[: len(first)].tolist() == first


async def test_fifty_at_once_are_token_exact(gateway: Gateway, chat: ChatFormat, harness: Harness) -> None:
    engine = SamplingEngine([i for i in range(5, 290) if i not in chat.stop_ids])
    results = await asyncio.gather(
        *(episode(gateway, chat, engine, harness=harness, name=f"g{i}/0.0", max_turns=3, wall_s=500) for i in range(50))
    )
    for index, (trajectory, payload, _) in enumerate(results):
        assert (trajectory.status, trajectory.turns, trajectory.drift) == (Status.TURN_LIMIT, 3, 0), trajectory
        assert payload is not None
        check_exact(payload, engine, f"g{index}/0.0")


async def test_its_tool_calls_are_rendered_by_the_template(
    gateway: Gateway, tokenizer_dir: str, tmp_path: Path, harness: Harness
) -> None:
    for file in Path(tokenizer_dir).iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    chat = ChatFormat.load(str(tmp_path))
    commands = iter(["ls", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"])

    def script(prompt: Sequence[int]) -> Sequence[int]:
        call = f'{{"name": "bash", "arguments": {{"command": "{next(commands)}"}}}}'
        return chat.encode(f"THOUGHT\n<tool_call>\n{call}\n</tool_call>")

    engine = SamplingEngine([], script=script)
    shipped = make_harness(RolloutConfig(harness=MiniSweAgentHarness(type="mini_swe_agent", tool_calls=True)))
    trajectory, payload, _ = await episode(
        gateway, chat, engine, harness=shipped, sandboxes=provider(), max_turns=3, max_turn_tokens=400,
        max_total_tokens=20_000, wall_s=500,
    )  # fmt: skip
    assert (trajectory.status, trajectory.turns, trajectory.drift) == (Status.SUBMITTED, 2, 0), trajectory
    assert payload is not None
    check_exact(payload, engine, "g/0.0")


async def test_a_fault_of_its_configuration_masks(gateway: Gateway, chat: ChatFormat, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("agent: {system_template: '', instance_template: '{{ nobody }}'}\n")
    harness = make_harness(
        RolloutConfig(harness=MiniSweAgentHarness(type="mini_swe_agent", config_file=str(tmp_path / "bad.yaml")))
    )
    engine = SamplingEngine([5])
    trajectory, payload, _ = await episode(gateway, chat, engine, harness=harness)
    assert trajectory.status is Status.INFRA_WORKER and payload is None
    assert "nobody" in (trajectory.error or "")
