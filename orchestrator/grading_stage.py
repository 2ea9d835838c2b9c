"""The graders' side of the scheduler: complete groups in, one grade or one reason for having none out (M1.4, M1.10).

    group -> [queue] -> request, attempt 0 -> [grader pool] -> reply, held against the request (M2.6) -> on_grade
                              |  the grader died or hung: the same group once more, as attempt 1; then a fallback
                              |  its endpoint is away: it waits until that is over, and is graded then (outage.py)
    canary (a stored group whose grade is known) -> through the same slots and the same pool -> canaries.jsonl

A reply belongs to the one call that waits for it, and counts only if group, attempt, trajectories and versions are
those that this call sent. One that comes late, twice, or for another group moves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from configs.schema import GraderConfig
from grader.exchange import GradeReply, GradeRequest, accept, base_state_of, lost_reply
from grader.verdict import FallbackReason
from infra.pool import ActorDrained, ActorLost, ActorPool, ActorTimeout
from infra.spans import CANARY, GRADE, QUEUE
from infra.telemetry import Telemetry
from infra.waits import Waits
from orchestrator.alarms import Alarm, GraderWatch
from orchestrator.canaries import Canaries
from orchestrator.clock import Clock
from orchestrator.ledger import CompleteGroup
from orchestrator.outage import Outage
from orchestrator.slots import Slots

ATTEMPTS = 2
"""How often a group is handed to a grader: again only if the first one died or hung."""

OUTAGES = 3
"""How many outages of the endpoint a group waits through. One that loses it again each time it is back is the cause."""
_PROBE_S = 60.0
"""What a worker gets to say whether the endpoint answers."""


class GradingStage:
    """Keeps every slot of the grader pool busy with a group of its own, and watches how good the grades are."""

    def __init__(
        self,
        *,
        config: GraderConfig,
        seed: int,
        pool: ActorPool,
        telemetry: Telemetry,
        clock: Clock,
        canaries: Canaries | None,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        step: Callable[[], int],
        on_grade: Callable[[CompleteGroup, GradeReply], None],
        on_alarm: Callable[[Alarm], None],
        check: Callable[[GradeRequest, GradeReply], GradeReply] = accept,
        waits: Waits | None = None,
    ) -> None:
        """`seed` decides the candidates' orders (M2.5); `spawn` runs a coroutine beside the others of the run; `step`
        tells the optimiser steps done; `on_grade` and `on_alarm` are told what comes of it."""
        slots = pool.occupancy()[1]
        self._seed = seed
        self._pool = pool
        self._telemetry = telemetry
        self._clock = clock
        self._canaries = canaries
        self._spawn = spawn
        self._on_grade = on_grade
        self._on_alarm = on_alarm
        self._step = step
        self._check = check
        self._waits = waits or Waits()
        self._deadline_s = config.timeout_s * 1.5 + 10.0
        """The worker keeps timeout_s itself; this one is for a worker that hangs."""
        self._queue: asyncio.Queue[CompleteGroup] = asyncio.Queue()
        """Bounded by what is admitted: see `full`."""
        self.slots = Slots(max(slots, 1))
        self._canaries_at_once = 0 if canaries is None else canaries.at_once(slots)
        self.watch = GraderWatch(config, canaries.past if canaries else ())
        self.outage = Outage(
            probe=self._probe, wait_s=config.endpoint_wait_s, clock=clock, spawn=spawn, on_alarm=on_alarm
        )
        self.canaries_graded = 0
        self.waiting: dict[str, float] = {}
        """Groups that no grader has begun, and when their last trajectory ended."""

    @property
    def full(self) -> bool:
        """Whether so many groups wait for a grader that no more of those to be graded should be admitted."""
        return len(self.waiting) >= 2 * self.slots.size

    @property
    def alarms(self) -> tuple[str, ...]:
        """Names of the alarms that are on."""
        return (*self.outage.alarms, *self.watch.alarms)

    async def put(self, group: CompleteGroup) -> None:
        """Hand over an eligible group (M1.6)."""
        self.waiting[group.group_id] = group.completed_s
        await self._queue.put(group)

    async def run(self) -> None:
        """Consumes the queue; starts one grading a free slot, and a canary after it when one is due. Unblocked by a
        freed slot. Slots are given out in turn, so a canary waits for one no longer than a group would."""
        while True:
            with self._waits.on("grading", "the queue of complete groups", lambda: "empty"):
                group = await self._queue.get()
            with self._waits.on("grading", "a free slot of the grader pool", self._occupancy):
                await self.slots.acquire()
            since_s = self.waiting.pop(group.group_id)
            self._telemetry.record_span(QUEUE, since_s, self._clock.now(), group_id=group.group_id)
            self._spawn(self._grade(group))
            del group  # else its payloads stay in the object store until the next one comes
            if self._canaries is not None and self._canaries.due(self._canaries_at_once):
                self._spawn(self._grade_canary(self._canaries))

    def _occupancy(self) -> str:
        return f"{self.slots.taken} of {self.slots.size} slots taken, {len(self.waiting)} groups wait"

    async def _grade(self, group: CompleteGroup) -> None:
        """One group, in a slot that was acquired for it."""
        waited_s = self._clock.now() - group.completed_s
        request = GradeRequest(
            group_id=group.group_id,
            task=group.task,
            base_state=base_state_of(group.task),
            trajectories=tuple(m.trajectory for m in group.valid),
            order_seed=self._seed + group.index,
            submitted_unix_s=self._clock.unix() - waited_s,
        )
        with self._telemetry.span(GRADE, group_id=group.group_id):
            reply = await self._ask(request, [m.transcript for m in group.valid])
        self._tell(self.watch.group(reply.fallback_reason))
        self._on_grade(group, reply)

    async def _grade_canary(self, canaries: Canaries) -> None:
        """One stored group: what comes back says something of the graders, and is nothing to be trained on."""
        canary = await canaries.take()
        group = canary.group
        await self.slots.acquire()
        request = GradeRequest(
            group_id=group.group_id,
            task=group.task,
            base_state=base_state_of(group.task),
            trajectories=group.trajectories,
            order_seed=self._seed + canary.number,
            submitted_unix_s=self._clock.unix(),
        )
        with self._telemetry.span(CANARY, group_id=group.group_id):
            reply = await self._ask(request, group.transcripts)
        self.canaries_graded += 1
        self._tell(self.watch.canary(canaries.record(canary, reply, self._step())))

    async def _ask(self, request: GradeRequest, transcripts: Sequence[Any]) -> GradeReply:
        """A grader's answer, and the slot back. Whatever goes wrong costs a fallback, never more (M1.10)."""
        from ray.exceptions import RayError

        start_s = self._clock.now()
        losses = outages = 0
        try:
            while True:
                try:
                    answer = await self._pool.call("grade", request, *transcripts, timeout_s=self._deadline_s)
                    reply = self._check(request, answer)
                    if not await self._again(reply, outages):
                        return reply
                    outages += 1
                    request = replace(request, submitted_unix_s=self._clock.unix())
                except (ActorLost, ActorTimeout) as e:
                    losses += not isinstance(e, ActorDrained)  # handed back: nobody is at fault
                    if losses == ATTEMPTS:
                        return lost_reply(request, str(e), run_s=self._clock.now() - start_s)
                    request = replace(request, attempt=request.attempt + 1, submitted_unix_s=self._clock.unix())
                except RayError as e:  # Ray's own: a transcript was lost with its node, so nobody can read the group
                    return lost_reply(request, f"{type(e).__name__}: {e}", run_s=self._clock.now() - start_s)
        finally:
            self.slots.release()

    async def _again(self, reply: GradeReply, outages: int) -> bool:
        """Whether the same group is to be graded again, after waiting for an endpoint that was lost."""
        if reply.fallback_reason is not FallbackReason.ENDPOINT_LOST:
            if reply.turns:
                self.outage.answered()
            return False
        return outages < OUTAGES and await self.outage.over(reply.detail)

    async def _probe(self) -> str | None:
        """What is wrong with the endpoint, as a grader sees it; None if it answers."""
        try:
            wrong: str | None = await self._pool.call("probe", timeout_s=_PROBE_S)
            return wrong
        except (ActorLost, ActorTimeout) as e:
            return str(e)

    def _tell(self, changes: list[Alarm]) -> None:
        for alarm in changes:
            self._on_alarm(alarm)
