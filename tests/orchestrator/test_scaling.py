"""`gagar scale` on a running run: the request, the loop that answers it, and the command that waits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.errors import ConfigError, GagarError
from configs.schema import AutoscaleConfig, ScalingConfig
from infra.actors import ScriptedActor, ScriptedActors
from infra.pool import ActorPool
from orchestrator import cli_scale, control
from orchestrator.cli import app
from orchestrator.scaling import Scaling
from orchestrator.status import _process_start


class Worker:
    """Works until told that it may end."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate

    async def work(self) -> None:
        await self.gate.wait()


class Site:
    """Two scripted pools, the loop over them, and a clock of its own."""

    def __init__(self, run_dir: Path, *, broken: str = "", **config: Any) -> None:
        self.run_dir = run_dir
        self.gate = asyncio.Event()
        self.broken = ""
        self.said: list[str] = []
        self.now_s = 0.0
        self.queues: dict[str, float] = {}
        self.rollout = self.pool("rollout")
        self.grader = self.pool("grader")
        self.scaling = Scaling(
            run_dir=run_dir,
            pools={"rollout": self.rollout, "grader": self.grader},
            config=ScalingConfig(**config),
            queue_s=lambda name: self.queues.get(name, 0.0),
            most={"grader": 5},
            say=self.said.append,
            clock=lambda: self.now_s,
        )

    def pool(self, name: str) -> ActorPool:
        return ActorPool(
            name,
            lambda _: ScriptedActor(Worker(self.gate), broken=self.broken),
            size=2,
            slots=2,
            max_failures=1,
            first_backoff_s=0.001,
            actors=ScriptedActors(),
        )

    async def start(self) -> None:
        await asyncio.gather(self.rollout.ready(), self.grader.ready())

    async def ticks(self, count: int = 5) -> control.ScaleAnswer:
        """Looks some times, a second apart on its clock; the last answer."""
        for _ in range(count):
            self.scaling.tick()
            self.now_s += 1.0
            await asyncio.sleep(0.005)
        answer = control.read(self.run_dir / control.ANSWER, control.ScaleAnswer)
        assert answer is not None
        return answer


async def test_a_request_grows_one_pool_and_drains_another_and_is_answered(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.start()
    calls = [asyncio.create_task(site.grader.call("work")) for _ in range(4)]
    await asyncio.sleep(0.01)
    request = control.ask(tmp_path, {"rollout": 5, "grader": 1}, 60.0)
    answer = await site.ticks()
    assert (answer.id, answer.state) == (request.id, "working")
    assert answer.pools["rollout"].live == 5
    assert (answer.pools["grader"].live, answer.pools["grader"].draining) == (1, 1)
    site.gate.set()
    await asyncio.gather(*calls)
    answer = await site.ticks()
    assert (answer.state, answer.pools["grader"].draining) == ("done", 0)
    assert answer.effect_s >= 5.0
    assert any("rollout: 2 -> 5" in line for line in site.said)
    assert any("scaled in" in line and "grader 2 -> 1" in line for line in site.said)


async def test_what_drained_workers_hand_back_is_counted(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.start()
    calls = [asyncio.create_task(site.grader.call("work")) for _ in range(4)]
    await asyncio.sleep(0.01)
    control.ask(tmp_path, {"grader": 1}, 0.0)
    answer = await site.ticks(10)
    assert (answer.state, answer.pools["grader"].handed_back) == ("done", 2)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"rollouts": 3}, "there is no pool 'rollouts'; this run has rollout, grader"),
        ({"rollout": 0}, "needs at least one actor"),
        ({"rollout": 5000}, "more than 1024, the most that scaling.max_actors allows"),
        ({"grader": 6}, "more than 5, the most that the configuration of the grader pool allows"),
        ({"rollout": 9}, "outside scaling.rollout, which keeps it from 2 to 8"),
    ],
)
async def test_nonsense_is_refused_and_changes_nothing(tmp_path: Path, sizes: dict[str, int], why: str) -> None:
    limits = AutoscaleConfig(min=2, max=8) if sizes == {"rollout": 9} else None
    site = Site(tmp_path, rollout=limits)
    await site.start()
    control.ask(tmp_path, {"grader": 2, **sizes}, None)
    answer = await site.ticks(1)
    assert answer.state == "refused"
    assert why in answer.text
    assert site.rollout.state().target == site.grader.state().target == 2


async def test_actors_that_do_not_start_are_told_of(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.start()
    site.broken = "no disk"
    control.ask(tmp_path, {"rollout": 3}, None)
    answer = await site.ticks(20)
    assert answer.state == "failed"
    assert "rollout stays at 2 of 3" in answer.text


async def test_a_newer_request_takes_the_place_of_the_one_at_work(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.start()
    calls = [asyncio.create_task(site.rollout.call("work")) for _ in range(4)]
    await asyncio.sleep(0.01)
    control.ask(tmp_path, {"rollout": 1}, 60.0)
    assert (await site.ticks(2)).state == "working"
    second = control.ask(tmp_path, {"rollout": 2}, 60.0)
    answer = await site.ticks(2)
    assert (answer.id, answer.state) == (second.id, "done")
    assert any("superseded" in line for line in site.said)
    site.gate.set()
    await asyncio.gather(*calls)


async def test_a_damaged_request_is_told_of_once_and_ends_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.start()
    (tmp_path / control.REQUEST).write_text("{")
    loop = asyncio.create_task(site.scaling.run())
    await asyncio.sleep(0.05)
    assert not loop.done()
    assert len(site.said) == 1 and "control.json: cannot be read" in site.said[0]
    loop.cancel()


async def test_the_policy_acts_on_a_queue_and_tells_why(tmp_path: Path) -> None:
    site = Site(tmp_path, grader=AutoscaleConfig(min=1, max=3, target_queue_s=10.0), cooldown_s=2.0)
    await site.start()
    calls = [asyncio.create_task(site.grader.call("work")) for _ in range(4)]
    await asyncio.sleep(0.01)
    site.queues["grader"] = 90.0
    for _ in range(12):
        site.scaling.tick()
        site.now_s += 1.0
        await asyncio.sleep(0.005)
    assert site.grader.state().live == 3
    assert any("grader: 2 -> 3 (4 of 4 slots busy, oldest wait 90 s)" in line for line in site.said)
    scalars = site.scaling.scalars()
    assert scalars["pool/grader/size"] == 3.0
    assert scalars["pool/grader/busy"] == 4.0
    assert scalars["pool/grader/queue_s"] == 90.0
    site.gate.set()
    await asyncio.gather(*calls)


# ---- the command ----------------------------------------------------------------------------------------------------


def running(run_dir: Path, state: str = "running") -> None:
    """A status file as this process would write it."""
    (run_dir / "config.yaml").write_text("")
    start = _process_start(os.getpid())
    status = {"state": state, "pid": os.getpid(), "process_start": start, "host": socket.gethostname()}
    (run_dir / "status.json").write_text(json.dumps({**status, "written_s": time.time()}))


@pytest.mark.parametrize("text", ["rollout", "rollout=", "=3", "rollout=1.5", "rollout=-1", "rollout=0"])
def test_sizes_that_are_none_are_refused_before_anything_is_asked(text: str) -> None:
    with pytest.raises(ConfigError):
        cli_scale.parse([text])


def test_a_pool_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        cli_scale.parse(["rollout=1", "rollout=2"])


def test_a_run_that_has_ended_is_not_scaled(tmp_path: Path) -> None:
    running(tmp_path, "finished")
    with pytest.raises(GagarError, match=r"is not running \(finished\): there is nothing to scale"):
        cli_scale.scale(tmp_path, ["rollout=3"])
    assert not (tmp_path / control.REQUEST).exists()


def test_the_command_shows_progress_and_reports_the_time_to_effect(tmp_path: Path) -> None:
    running(tmp_path)

    def drive() -> None:
        async def go() -> None:
            site = Site(tmp_path)
            await site.start()
            for _ in range(2000):
                site.scaling.tick()
                site.now_s += 0.01
                if any("scaled in" in line for line in site.said):
                    return
                await asyncio.sleep(0.01)

        asyncio.run(go())

    driver = threading.Thread(target=drive)
    driver.start()
    result = CliRunner().invoke(app, ["scale", str(tmp_path), "rollout=4", "grader=1"])
    driver.join()
    assert result.exit_code == 0, result.output
    assert "rollout 2 -> 4: 4 ready; grader 2 -> 1: 1 ready" in result.output
    assert "in effect after" in result.output


def test_a_refusal_is_the_commands_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(tmp_path)
    request = control.ask(tmp_path, {"graders": 3}, None)
    answer = control.ScaleAnswer(id=request.id, state="refused", text="there is no pool 'graders'")
    control.write(tmp_path / control.ANSWER, answer)
    with pytest.raises(GagarError, match="refused: there is no pool 'graders'"):
        cli_scale.wait(tmp_path, request, 5.0)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_forgets_what_an_earlier_session_was_asked(tmp_path: Path) -> None:
    control.ask(tmp_path, {"rollout": 9}, None)
    control.clear(tmp_path)
    assert control.read(tmp_path / control.REQUEST, control.ScaleRequest) is None
