"""What moving a trajectory through the driver's bounded queues, and a group through the ledger, costs."""

from __future__ import annotations

import asyncio
import time

from envs.task import Split, TaskKind
from orchestrator.bench.figures import Figure, Options, figure, timed
from orchestrator.bench.parts import half_pass
from orchestrator.credit import Credit, GroupOutcome, credit
from orchestrator.ledger import Ledger, Member, ReadyGroup, RollingGroup
from orchestrator.simulation.load import SimulatedSource

ITEMS = 20_000
GROUPS, SIZE = 1_000, 16


def run(options: Options) -> list[Figure]:
    """Operations a CPU second of this process: a put with its get, or a trajectory through the ledger."""
    times = options.times(5)
    queue = [ITEMS / timed(lambda: asyncio.run(_queue(ITEMS)), clock=time.process_time) for _ in range(times)]
    ledger = [GROUPS * SIZE / timed(_ledger, clock=time.process_time) for _ in range(times)]
    return [
        figure("bounded asyncio queue, put and get", "1/CPU s", queue),
        figure(f"ledger, trajectories in groups of {SIZE}, {GROUPS} groups at once", "1/CPU s", ledger),
    ]


async def _queue(items: int) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=64)

    async def produce() -> None:
        for i in range(items):
            await queue.put(i)

    async def consume() -> None:
        for _ in range(items):
            await queue.get()

    await asyncio.gather(produce(), consume())


def _ledger() -> None:
    """Every group from admission to training."""
    from configs.schema import AlgorithmConfig

    source = SimulatedSource("sums", TaskKind.SINGLE_TURN)
    ledger = Ledger()
    algorithm = AlgorithmConfig()
    given: Credit | None = None
    for index in range(GROUPS):
        group_id = f"sums-{index:06d}"
        task = source.task(Split.TRAIN, index)
        ledger.admit(
            RollingGroup(group_id=group_id, task=task, index=index, size=SIZE, version=0, admitted_s=float(index))
        )
        for slot in range(SIZE):
            trajectory = half_pass(task, f"{group_id}/{slot}.0", group_id)
            member = Member(trajectory=trajectory, payload=None, transcript=None)
            complete = ledger.record(group_id, slot, member, float(index))
        assert complete is not None
        if given is None:  # what advantages cost is not the ledger's
            given = credit([m.trajectory for m in complete.members], algorithm, grade=None, fallback_reason=None)
        ledger.make_ready(ReadyGroup(group=complete, credit=given, reply=None, ready_s=float(index)))
    batch = ledger.take_batch({"sums": GROUPS})
    assert batch is not None
    for ready in batch:
        ledger.end(ready.group, GroupOutcome.TRAINED)
    ledger.check()
