"""The ledger: stages, batches, staleness, and conservation under any interleaving."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import data, integers
from scripted import ScriptedSource, trajectory

from envs.task import Split, TaskKind
from orchestrator.credit import GroupOutcome, skipped
from orchestrator.ledger import CompleteGroup, Ledger, Member, ReadyGroup, RollingGroup, Stage
from rollout.trajectory import Status

SOURCE = ScriptedSource("code", TaskKind.CODE)


def admit(ledger: Ledger, index: int, size: int = 2) -> RollingGroup:
    rolling = RollingGroup(
        group_id=f"code-{index:06d}",
        task=SOURCE.task(Split.TRAIN, index),
        index=index,
        size=size,
        version=0,
        admitted_s=0.0,
    )
    ledger.admit(rolling)
    return rolling


def finish(
    ledger: Ledger, rolling: RollingGroup, slot: int, *, versions: tuple[int, ...] = (0,), lost: bool = False
) -> CompleteGroup | None:
    status = Status.INFRA_SANDBOX if lost else Status.SUBMITTED
    t = trajectory(f"{rolling.group_id}/{slot}.0", task=rolling.task, status=status, versions=versions)
    return ledger.record(rolling.group_id, slot, Member(trajectory=t, payload=None, transcript=None), 1.0)


def ready(ledger: Ledger, group: CompleteGroup) -> ReadyGroup:
    r = ReadyGroup(group=group, credit=skipped(GroupOutcome.FAILED), reply=None, ready_s=2.0)
    ledger.make_ready(r)
    return r


def complete(ledger: Ledger, index: int, **kwargs: object) -> CompleteGroup:
    rolling = admit(ledger, index)
    assert finish(ledger, rolling, 1, **kwargs) is None  # type: ignore[arg-type]
    group = finish(ledger, rolling, 0, **kwargs)  # type: ignore[arg-type]
    assert group is not None
    return group


def test_members_keep_slot_order_however_they_end() -> None:
    group = complete(Ledger(), 7)
    assert [m.trajectory.trajectory_id for m in group.members] == ["code-000007/0.0", "code-000007/1.0"]


def test_a_group_id_is_admitted_once_even_after_its_end() -> None:
    ledger = Ledger()
    ledger.end(complete(ledger, 0), GroupOutcome.SKIPPED_ALL_FAIL)
    with pytest.raises(ValueError, match="admitted before"):
        admit(ledger, 0)


def test_a_slot_ends_once() -> None:
    ledger = Ledger()
    rolling = admit(ledger, 0)
    finish(ledger, rolling, 0)
    with pytest.raises(ValueError, match="ended twice"):
        finish(ledger, rolling, 0)


def test_a_group_ends_once() -> None:
    ledger = Ledger()
    group = complete(ledger, 0)
    ledger.end(group, GroupOutcome.SKIPPED_ALL_PASS)
    with pytest.raises(ValueError, match="neither"):
        ledger.end(group, GroupOutcome.SKIPPED_ALL_PASS)


def test_batch_takes_the_oldest_and_leaves_the_surplus() -> None:
    ledger = Ledger()
    for i in range(3):
        ready(ledger, complete(ledger, i))
    assert ledger.take_batch({"code": 4}) is None
    batch = ledger.take_batch({"code": 2})
    assert batch is not None and [r.group.index for r in batch] == [0, 1]
    assert ledger.count(Stage.READY) == 1 and ledger.living == 3, "the running step still owns its groups"
    assert ledger.pending() == {"code": [2]}, "groups in the running step are not sampled again after a resume"
    ledger.check()


def test_stale_groups_leave_before_the_batch() -> None:
    ledger = Ledger()
    ready(ledger, complete(ledger, 0, versions=(1, 3)))
    ready(ledger, complete(ledger, 1, versions=(2,)))
    assert [r.group.index for r in ledger.take_stale(version=3, max_staleness=1)] == [0]
    assert ledger.count(Stage.READY) == 1


def test_masked_trajectories_end_as_masked() -> None:
    ledger = Ledger()
    rolling = admit(ledger, 0)
    finish(ledger, rolling, 0, lost=True)
    group = finish(ledger, rolling, 1)
    assert group is not None and len(group.valid) == 1
    ledger.end(group, GroupOutcome.SKIPPED_TOO_FEW_VALID)
    assert ledger.ended == {"masked": 1, "skipped_too_few_valid": 1}
    ledger.check()


def test_check_notices_a_lost_trajectory() -> None:
    ledger = Ledger()
    admit(ledger, 0)
    ledger.dispatched += 1
    with pytest.raises(ValueError, match="3 trajectories dispatched, but 2 living and 0 ended"):
        ledger.check()


class Conservation(RuleBasedStateMachine):
    """Any order of admissions, ends, gradings, batches and drops keeps the counts equal."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.next = 0
        self.open: list[tuple[RollingGroup, list[int]]] = []
        self.graded: list[CompleteGroup] = []
        self.version = 0

    @rule(size=integers(1, 4))
    def admit(self, size: int) -> None:
        self.open.append((admit(self.ledger, self.next, size), list(range(size))))
        self.next += 1

    @precondition(lambda self: self.open)
    @rule(d=data())
    def finish(self, d: object) -> None:
        i = d.draw(integers(0, len(self.open) - 1))  # type: ignore[attr-defined]
        rolling, slots = self.open[i]
        slot = slots.pop(d.draw(integers(0, len(slots) - 1)))  # type: ignore[attr-defined]
        lost = d.draw(integers(0, 3)) == 0  # type: ignore[attr-defined]
        group = finish(self.ledger, rolling, slot, versions=(self.version,), lost=lost)
        assert (group is not None) == (not slots)
        if group is not None:
            self.graded.append(group)
            self.open.pop(i)

    @precondition(lambda self: self.graded)
    @rule(skip=integers(0, 1))
    def grade(self, skip: int) -> None:
        group = self.graded.pop()
        if skip:
            self.ledger.end(group, GroupOutcome.SKIPPED_ALL_FAIL)
        else:
            ready(self.ledger, group)

    @rule()
    def step(self) -> None:
        for r in self.ledger.take_stale(self.version, 1):
            self.ledger.end(r.group, GroupOutcome.DROPPED_STALE)
        for r in self.ledger.take_batch({"code": 2}) or []:
            oldest = r.group.oldest_version
            assert oldest is None or self.version - oldest <= 1
            self.ledger.end(r.group, GroupOutcome.TRAINED)
        self.version += 1

    @invariant()
    def counts_add_up(self) -> None:
        self.ledger.check()


Conservation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConservation = Conservation.TestCase
