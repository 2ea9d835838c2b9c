"""An endpoint that goes away and comes back, over real HTTP: groups wait, none falls back, all are graded (M1.10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from grader_parts import CLEAN, NOISY, task, trajectory, transcript
from tenacity.wait import wait_fixed

from configs.schema import EndpointGraderBackend, GraderConfig, RubricConfig
from grader.candidates import label_group
from grader.client import EndpointModel
from grader.endpoint import Endpoint
from grader.exchange import GradeReply
from grader.scripted import judge_by_size
from grader.verdict import FallbackReason, compose_verdict, render_verdict
from grader.worker import GraderWorker
from infra.errors import Boundary
from orchestrator.alarms import Alarm
from orchestrator.bench.parts import NoTelemetry
from orchestrator.clock import Clock
from orchestrator.grading_stage import OUTAGES, GradingStage
from orchestrator.ledger import CompleteGroup, Member
from orchestrator.outage import Outage

GROUPS = tuple(f"code-{i:06d}" for i in range(6))
SEED = 3
KEY = "sk-secret-of-the-test"


def group(group_id: str) -> CompleteGroup:
    """Two passes and a failure; the statement names the group, so that the server knows which one it is asked about."""
    mine = replace(task(), statement=f"This is {group_id}.")
    members = []
    for slot, (passed, patch) in enumerate([(True, CLEAN), (True, NOISY), (False, CLEAN)]):
        name = f"{group_id}/{slot}.0"
        members.append(
            Member(
                trajectory=replace(trajectory(slot, passed), trajectory_id=name, group_id=group_id),
                payload=None,
                transcript=replace(transcript(slot, patch), trajectory_id=name),
            )
        )
    index = int(group_id.partition("-")[2])
    return CompleteGroup(
        group_id=group_id, task=mine, index=index, members=tuple(members), admitted_s=0.0, completed_s=0.0
    )


def verdict(group_id: str) -> str:
    """A valid one, with the labels that the grader will use."""
    one = group(group_id)
    labelled = label_group(
        group_id=group_id,
        task=one.task,
        trajectories=[m.trajectory for m in one.members],
        transcripts=[m.transcript for m in one.members],
        order_seed=SEED + one.index,
    )
    return render_verdict(compose_verdict({c.label: judge_by_size(c) for c in labelled.passing}, RubricConfig()))


class Server:
    """Grades every group rightly, unless `refuse` says otherwise; can be closed, and opened again at its port."""

    def __init__(self) -> None:
        self.port = unused_port()
        self.refuse: Callable[[str], int | None] = lambda group_id: None
        self.graded: list[str] = []
        self.served: TestServer | None = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        name = next((g for g in GROUPS if g in text), "probe")
        if (status := self.refuse(name)) is not None:
            return web.Response(status=status, text="no")
        self.graded.append(name)
        content = "ok" if name == "probe" else verdict(name)
        message = {"role": "assistant", "content": content}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def open(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        self.served = TestServer(app, port=self.port)
        await self.served.start_server()

    async def close(self) -> None:
        if self.served is not None:
            await self.served.close()
            self.served = None


class Worker:
    """One grader behind the pool's interface, in this process."""

    def __init__(self, port: int, *, timeout_s: float) -> None:
        backend = EndpointGraderBackend(
            type="endpoint", base_url=f"http://127.0.0.1:{port}/v1", model="m", max_retries=1, request_timeout_s=5.0
        )
        self.config = GraderConfig(backend=backend, mode="single", timeout_s=timeout_s, endpoint_wait_s=20.0)
        model = EndpointModel(backend, self.config, api_key=KEY)
        model.endpoint = Endpoint(backend, api_key=KEY, concurrency=4, backoff_s=0.01, max_backoff_s=0.02)
        self.model = model
        self.worker = GraderWorker(self.config, RubricConfig(), model=model)

    def occupancy(self) -> tuple[int, int]:
        return 0, 2

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        return await getattr(self.worker, method)(*args)


class Run:
    """A grading stage over one worker and one server."""

    def __init__(self, *, wait_s: float = 20.0, timeout_s: float = 30.0) -> None:
        self.server = Server()
        self.pool = Worker(self.server.port, timeout_s=timeout_s)
        self.wait_s = wait_s
        self.replies: dict[str, GradeReply] = {}
        self.alarms: list[Alarm] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.stage: GradingStage

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        spawned = asyncio.get_running_loop().create_task(work)
        self.tasks.add(spawned)

    def _on_grade(self, given: CompleteGroup, reply: GradeReply) -> None:
        assert given.group_id not in self.replies, "graded once"
        self.replies[given.group_id] = reply

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.stage = GradingStage(
            config=self.pool.config,
            seed=SEED,
            pool=cast(Any, self.pool),
            telemetry=cast(Any, NoTelemetry()),
            clock=Clock(),
            canaries=None,
            spawn=self._spawn,
            step=lambda: 0,
            on_grade=self._on_grade,
            on_alarm=self.alarms.append,
        )
        self.stage.outage = Outage(
            probe=self.stage._probe,
            wait_s=self.wait_s,
            clock=Clock(),
            spawn=self._spawn,
            on_alarm=self.alarms.append,
            pauses=wait_fixed(0.02),
        )
        self._spawn(self.stage.run())
        try:
            yield
        finally:
            for spawned in self.tasks:
                spawned.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await self.pool.worker.close()
            await self.server.close()

    async def put(self, *groups: str) -> None:
        for group_id in groups:
            await self.stage.put(group(group_id))

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not done():  # noqa: ASYNC110 - nobody could set an event for each of these
                await asyncio.sleep(0.01)

    def outage_alarms(self) -> list[bool]:
        return [alarm.on for alarm in self.alarms if alarm.name == "endpoint_lost"]


def keep(refusing: int) -> Callable[[str], int | None]:
    return lambda group_id: refusing


@pytest.mark.parametrize("how", ["gone", 401, 403, 500, 503])
async def test_groups_wait_for_an_endpoint_that_is_away_and_all_are_graded(how: str | int) -> None:
    run = Run()
    async with run.running():
        await run.server.open()
        await run.put(GROUPS[0])
        await run.until(lambda: len(run.replies) == 1)
        if how == "gone":
            await run.server.close()
        else:
            run.server.refuse = keep(int(how))
        await run.put(*GROUPS[1:])
        await run.until(lambda: bool(run.outage_alarms()))
        await asyncio.sleep(0.3)
        assert len(run.replies) == 1, "nobody falls back while the endpoint is away"
        assert run.stage.alarms == ("endpoint_lost",)
        if how == "gone":
            await run.server.open()
        else:
            run.server.refuse = lambda group_id: None
        await run.until(lambda: len(run.replies) == len(GROUPS))
        assert {g: r.fallback_reason for g, r in run.replies.items()} == dict.fromkeys(GROUPS)
        assert all(reply.grade is not None for reply in run.replies.values())
        assert run.outage_alarms() == [True, False]
        assert run.stage.alarms == ()
        assert all(KEY not in alarm.text for alarm in run.alarms)


async def test_an_endpoint_that_stays_away_costs_fallbacks_until_it_answers() -> None:
    run = Run(wait_s=0.3)
    async with run.running():
        await run.put(*GROUPS[:3])
        await run.until(lambda: len(run.replies) == 3)
        assert {r.fallback_reason for r in run.replies.values()} == {FallbackReason.ENDPOINT_LOST}
        assert run.outage_alarms() == [True, True], "begun, and given up"
        assert run.stage.alarms == ("endpoint_lost",)
        await run.server.open()
        await run.put(*GROUPS[3:])
        await run.until(lambda: len(run.replies) == len(GROUPS))
        assert all(run.replies[g].grade is not None for g in GROUPS[3:])
        assert run.outage_alarms() == [True, True, False]


async def test_a_group_that_loses_the_endpoint_each_time_it_is_back_is_the_cause() -> None:
    run = Run()
    async with run.running():
        await run.server.open()
        run.server.refuse = lambda group_id: 500 if group_id == GROUPS[1] else None
        await run.put(*GROUPS[:3])
        await run.until(lambda: len(run.replies) == 3)
        assert run.replies[GROUPS[1]].fallback_reason is FallbackReason.ENDPOINT_LOST
        assert run.replies[GROUPS[0]].grade is not None
        assert run.replies[GROUPS[2]].grade is not None
        assert run.server.graded.count("probe") >= OUTAGES


async def test_a_time_limit_that_passes_while_the_endpoint_is_away_is_no_fault_of_the_group() -> None:
    run = Run(timeout_s=0.3)
    run.pool.model.endpoint = Endpoint(
        cast(EndpointGraderBackend, run.pool.config.backend).model_copy(update={"max_retries": 50}),
        api_key=KEY,
        concurrency=4,
        backoff_s=1.0,
        max_backoff_s=1.0,
    )
    async with run.running():
        await run.put(GROUPS[0])
        await run.until(lambda: bool(run.outage_alarms()))
        assert run.replies == {}
        await run.server.open()
        await run.until(lambda: len(run.replies) == 1)
        assert run.replies[GROUPS[0]].fallback_reason is None


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_what_is_an_answer_is_no_outage(status: int) -> None:
    run = Run()
    async with run.running():
        await run.server.open()
        run.server.refuse = keep(status)
        await run.put(GROUPS[0])
        await run.until(lambda: len(run.replies) == 1)
        assert run.replies[GROUPS[0]].fallback_reason is FallbackReason.ENDPOINT_ERROR
        assert run.outage_alarms() == []
        assert await run.pool.worker.probe() is None, "somebody answers"


async def test_a_probe_says_what_is_wrong_and_never_the_key() -> None:
    run = Run()
    async with run.running():
        said = await run.pool.worker.probe()
        assert said is not None and "ConnectError" in said
        await run.server.open()
        run.server.refuse = keep(401)
        said = await run.pool.worker.probe()
        assert said is not None and "HTTP 401" in said and "key" in said and KEY not in said
        run.server.refuse = lambda group_id: None
        assert await run.pool.worker.probe() is None


def test_a_lost_endpoint_is_of_the_network() -> None:
    from grader.endpoint import EndpointLostError

    assert EndpointLostError("away").boundary is Boundary.NETWORK
