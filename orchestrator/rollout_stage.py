"""The rollouts' side of the scheduler: admitted groups in, ended trajectories out.

group -> [queue, earliest admitted first] -> free slot -> [rollout pool] -> trajectory -> on_end
             |  lost to infrastructure: only this one is sampled again, its siblings stay
             |  its task is quarantined: what waits is not sampled, what runs is stopped
group of an earlier session -> finished slots come back from their files, the others are queued before new groups
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from configs.schema import RolloutConfig
from infra.actors import reason_of
from infra.errors import GagarError
from infra.pool import ActorDrained, ActorLost, ActorPool, ActorTimeout
from infra.spans import ROLLOUT
from infra.telemetry import Telemetry
from infra.waits import Waits
from orchestrator.clock import Clock, Paused
from orchestrator.failures import Failures
from orchestrator.ledger import Member, RollingGroup
from orchestrator.slots import Slots
from rollout.trajectory import Status, Trajectory
from rollout.worker import lost_trajectory

OnEnd = Callable[[RollingGroup, int, Member], Awaitable[None]]


class RolloutStage:
    """Keeps every slot of the rollout pool busy. Its queue is bounded by what is admitted."""

    def __init__(
        self,
        *,
        config: RolloutConfig,
        pool: ActorPool,
        telemetry: Telemetry,
        clock: Clock,
        failures: Failures,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_end: OnEnd,
        on_retry: Callable[[Trajectory], None],
        waits: Waits | None = None,
    ) -> None:
        """`failures` is told of every attempt; `spawn` runs a coroutine beside the others of the run; `on_end` is
        awaited for every trajectory that counts, `on_retry` told of every one that is sampled again."""
        self._config = config
        self._pool = pool
        self._telemetry = telemetry
        self._clock = clock
        self._failures = failures
        self._spawn = spawn
        self._on_end = on_end
        self._on_retry = on_retry
        self._waits = waits or Waits()
        self.paused = Paused(clock)
        self.slots = Slots(max(pool.occupancy()[1], 1))
        self._queue: asyncio.PriorityQueue[tuple[bool, int, int, int, int, RollingGroup]] = asyncio.PriorityQueue()
        self._calls: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        """Task id -> calls of its trajectories that run."""

    def put(
        self, rolling: RollingGroup, slots: Sequence[int], *, attempt: int = 0, losses: int = 0, late: bool = False
    ) -> None:
        """Sample these slots of a group; `attempt` names the trajectories, `losses` counts towards `infra_retries`.
        Groups admitted earlier come first, so that what is lost or was interrupted does not wait behind what is new;
        what is `late` comes after all of them, and not for ever: what waits here keeps others from being admitted."""
        for slot in slots:
            self._queue.put_nowait((late, rolling.number, slot, attempt, losses, rolling))

    async def run(self) -> None:
        """Consumes the queue; starts one trajectory a free slot. Unblocked by a freed slot."""
        while True:
            with self._waits.on("rollouts", "a free slot of the rollout pool", self._occupancy):
                await self.slots.acquire()
            with self._waits.on("rollouts", "the queue of admitted groups", lambda: "empty"):
                _, _, slot, attempt, losses, rolling = await self._queue.get()
            self._spawn(self._one(rolling, slot, attempt, losses))
            del rolling

    def _occupancy(self) -> str:
        return f"{self.slots.taken} of {self.slots.size} slots taken, {self._queue.qsize()} trajectories queued"

    async def _one(self, rolling: RollingGroup, slot: int, attempt: int, losses: int) -> None:
        """One trajectory, in a slot that was acquired for it."""
        trajectory_id = f"{rolling.group_id}/{slot}.{attempt}"
        start_s, paused_s = self._clock.now(), self.paused.total_s()
        payload = transcript = None
        try:
            trajectory, payload, transcript = await self._sample(rolling, trajectory_id)
        except ActorDrained:  # its worker was taken out of the pool: nothing was lost but time
            self.put(rolling, [slot], attempt=attempt + 1, losses=losses)
            return
        except (ActorLost, ActorTimeout) as e:
            if self._pool.occupancy()[1] == 0:
                # Every call would fail at once, for ever: groups would be skipped as fast as the disk takes them.
                raise GagarError(
                    f"no rollout worker is left ({e}); mend what ends them, then run the same command with --resume"
                ) from e
            wall_s = self._clock.now() - start_s
            trajectory = _lost(rolling, trajectory_id, Status.INFRA_WORKER, str(e), wall_s, worker=e.actor)
        finally:
            self.slots.release()
        for task_id in self._failures.attempt(rolling, trajectory):
            for call in self._calls.get(task_id, ()):
                call.cancel()
        again = trajectory.status.masked and losses < self._config.infra_retries
        if again and not self._failures.quarantined(rolling.task.task_id):
            self._on_retry(trajectory)
            # What a broken task repeats waits behind all others: they tell whether it is the task's fault.
            late = self._failures.repeats(trajectory)
            self.put(rolling, [slot], attempt=attempt + 1, losses=losses + 1, late=late)
            return
        effective_s = self._clock.now() - start_s - (self.paused.total_s() - paused_s)
        member = Member(trajectory=trajectory, payload=payload, transcript=transcript, effective_s=effective_s)
        await self._on_end(rolling, slot, member)

    async def _sample(self, rolling: RollingGroup, trajectory_id: str) -> tuple[Trajectory, Any, Any]:
        """A worker's trajectory, with the references to its payload and transcript.

        Raises:
            ActorLost, ActorTimeout: its worker is gone; ActorDrained: it handed the call back.
        """
        from ray.exceptions import RayError

        task = rolling.task
        if self._failures.quarantined(task.task_id):
            return _cancelled(rolling, trajectory_id), None, None
        start_s = self._clock.now()
        call = asyncio.ensure_future(self._call(rolling, trajectory_id))
        self._calls[task.task_id].add(call)
        try:
            with self._telemetry.span(
                ROLLOUT, group_id=rolling.group_id, source=task.source, trajectory_id=trajectory_id
            ):
                trajectory, (payload, transcript) = await call
            return trajectory, payload, transcript
        except asyncio.CancelledError:
            if not self._failures.quarantined(task.task_id) or _is_cancelled():
                raise
            return _cancelled(rolling, trajectory_id), None, None
        except RayError as e:  # Ray's own, and no actor's loss: what the call returned is gone with its node
            error = f"{type(e).__name__}: {reason_of(e)}"
            lost = _lost(rolling, trajectory_id, Status.INFRA_STORAGE, error, self._clock.now() - start_s)
            return lost, None, None
        finally:
            self._calls[task.task_id].discard(call)
            if not self._calls[task.task_id]:
                del self._calls[task.task_id]

    async def _call(self, rolling: RollingGroup, trajectory_id: str) -> Any:
        return await self._pool.call(
            "rollout",
            rolling.task,
            trajectory_id,
            rolling.group_id,
            num_returns=3,
            timeout_s=2 * self._config.limits.wall_s,
        )

    async def bring_back(self, rolling: RollingGroup, files: dict[int, Path], *, whole: bool) -> None:
        """A group of an earlier session: what it had finished goes back into the object store, the rest is queued; of a
        `whole` one the rest was lost for good."""
        if self._failures.quarantined(rolling.task.task_id):
            files, whole = {}, False
        missing = [slot for slot in range(rolling.size) if slot not in files]
        if not whole:
            self.put(rolling, missing)
        await asyncio.gather(*(self._restore(rolling, slot, path) for slot, path in files.items()))
        for slot in missing if whole else ():
            name = f"{rolling.group_id}/{slot}.lost"
            lost = _lost(rolling, name, Status.INFRA_STORAGE, "masked in an earlier session, which kept nothing", 0.0)
            await self._on_end(rolling, slot, Member(trajectory=lost, payload=None, transcript=None))

    async def _restore(self, rolling: RollingGroup, slot: int, path: Path) -> None:
        from ray.exceptions import RayError

        try:
            trajectory, (payload, transcript) = await self._pool.call("restore", path, num_returns=3)
        except (GagarError, RayError):  # the file is damaged, or whoever read it was lost
            self.put(rolling, [slot], attempt=_attempt(path) + 1)
            return
        await self._on_end(rolling, slot, Member(trajectory=trajectory, payload=payload, transcript=transcript))


def _lost(
    rolling: RollingGroup, trajectory_id: str, status: Status, error: str, wall_s: float, *, worker: str | None = None
) -> Trajectory:
    return lost_trajectory(rolling.task, trajectory_id, rolling.group_id, status, error, wall_s, worker=worker)


def _cancelled(rolling: RollingGroup, trajectory_id: str) -> Trajectory:
    return _lost(rolling, trajectory_id, Status.INFRA_CANCELLED, "its task is quarantined (quarantine.jsonl)", 0.0)


def _is_cancelled() -> bool:
    """Whether it is this coroutine's own task that is to end, with the run."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _attempt(path: Path) -> int:
    """rollouts/<group_id>/<slot>.<attempt>.npz"""
    return int(path.stem.partition(".")[2] or 0)
