"""The ledger: stages, batches, staleness, and conservation under any interleaving."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import booleans, integers, randoms, sampled_from
from scripted import MemoryLog, ScriptedSource, trajectory

from envs.task import Split, TaskKind
from grader.exchange import GradeReply, GradeRequest, lost_reply
from orchestrator.credit import GroupOutcome, skipped
from orchestrator.ledger import CompleteGroup, Ledger, Member, ReadyGroup, RollingGroup, Stage, is_stale
from orchestrator.slots import Slots
from rollout.trajectory import Status, Trajectory

SOURCE = ScriptedSource("code", TaskKind.CODE)


def rolling_group(index: int, size: int = 2, version: int = 0) -> RollingGroup:
    return RollingGroup(
        group_id=f"code-{index:06d}",
        task=SOURCE.task(Split.TRAIN, index),
        index=index,
        size=size,
        version=version,
        admitted_s=0.0,
    )


def admit(ledger: Ledger, index: int, size: int = 2, version: int = 0) -> RollingGroup:
    rolling = rolling_group(index, size, version)
    ledger.admit(rolling)
    return rolling


def made_by(
    rolling: RollingGroup, slot: int, attempt: int, versions: tuple[int, ...], *, lost: bool = False
) -> Trajectory:
    status = Status.INFRA_SANDBOX if lost else Status.SUBMITTED
    return trajectory(f"{rolling.group_id}/{slot}.{attempt}", task=rolling.task, status=status, versions=versions)


def reply_for(group: CompleteGroup) -> GradeReply:
    trajectories = tuple(m.trajectory for m in group.valid)
    request = GradeRequest(
        group_id=group.group_id, task=group.task, base_state="", trajectories=trajectories, order_seed=0
    )
    return lost_reply(request, "", run_s=0.0)


def finish(
    ledger: Ledger, rolling: RollingGroup, slot: int, *, versions: tuple[int, ...] = (0,), lost: bool = False
) -> CompleteGroup | None:
    t = made_by(rolling, slot, 0, versions, lost=lost)
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


def test_groups_that_a_resume_brings_back_are_admitted_once_too() -> None:
    """In any order, and then the stream goes on, past them; orders of admission are counted over all of them."""
    ledger = Ledger()
    back = [rolling_group(i) for i in (7, 2, 5)]
    for group in back:
        ledger.admit(group, again=True)
    with pytest.raises(ValueError, match="admitted before"):
        ledger.admit(rolling_group(5), again=True)
    fresh = [admit(ledger, i) for i in (3, 4)]
    for index in (2, 3, 5, 7):
        with pytest.raises(ValueError, match="admitted before"):
            admit(ledger, index)
    fresh += [admit(ledger, i) for i in (6, 8)]
    assert [g.number for g in (*back, *fresh)] == list(range(7))
    assert not ledger._counts["code"].back, "the stream has passed them"


def test_what_was_admitted_takes_no_memory_once_it_has_ended() -> None:
    ledger = Ledger()

    def groups(indices: range) -> int:
        tracemalloc.start()
        for index in indices:
            ledger.end(complete(ledger, index), GroupOutcome.SKIPPED_ALL_FAIL)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return held

    groups(range(10))
    assert groups(range(10, 1010)) < 20_000, "bytes; ids alone would be 60,000"


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


def test_a_batch_is_taken_in_order_of_admission() -> None:
    ledger = Ledger()
    groups = [complete(ledger, i) for i in range(3)]
    for group in reversed(groups):
        ready(ledger, group)
    batch = ledger.take_batch({"code": 2})
    assert batch is not None and [r.group.index for r in batch] == [0, 1], "not in that of their completion"


def test_a_batch_waits_for_what_would_grow_too_old() -> None:
    """M6.4, wait: the group of version 0 must be in the step that makes version 2 of a run with staleness 1."""
    ledger = Ledger()
    old = admit(ledger, 0)
    ready(ledger, complete(ledger, 1))
    assert ledger.take_batch({"code": 1}, step=1, wait_staleness=1) is None
    assert ledger.take_batch({"code": 2}, step=0, wait_staleness=1) is None, "quota first"
    finish(ledger, old, 0)
    group = finish(ledger, old, 1)
    assert group is not None
    ready(ledger, group)
    batch = ledger.take_batch({"code": 1}, step=1, wait_staleness=1)
    assert batch is not None and [r.group.index for r in batch] == [0]


def test_groups_that_will_be_dropped_hold_no_slot_under_the_bound() -> None:
    ledger = Ledger()
    admit(ledger, 0)
    assert ledger.outstanding("code") == 1 and ledger.outstanding("code", oldest=1) == 0


class Conservation(RuleBasedStateMachine):
    """Any order of admissions, ends, losses, gradings, batches, drops, scaling, crashes and resumes: counts add up,
    no group is graded twice, none is trained twice, and none is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.log = MemoryLog()
        self.ledger = Ledger(self.log)
        self.slots = Slots(4)
        self.open: dict[str, tuple[RollingGroup, dict[int, int]]] = {}
        """Group -> its slots that have not ended, with the attempt that runs."""
        self.complete: dict[str, CompleteGroup] = {}
        self.grades: dict[str, GradeReply] = {}
        self.admitted: set[str] = set()
        self.graded: Counter[str] = Counter()
        self.ends: dict[str, list[str]] = {}
        """Group -> its ends that a checkpoint did not lose."""
        self.sampled: Counter[str] = Counter()
        """Ends of trajectories, by id."""
        self.version = 0
        self.checkpoint: tuple[int, int, dict[str, list[str]]] = (0, 0, {})
        """Mark, version and ends of the last one."""

    @rule(size=integers(1, 4))
    def admit(self, size: int) -> None:
        rolling = admit(self.ledger, len(self.admitted), size, self.version)
        self.admitted.add(rolling.group_id)
        self.open[rolling.group_id] = (rolling, dict.fromkeys(range(size), 0))

    @precondition(lambda self: self.admitted)
    @rule(pick=randoms(use_true_random=False), again=booleans())
    def admit_twice(self, pick: Random, again: bool) -> None:
        """Alive in this session: refused, however it came."""
        living = sorted({*self.open, *self.complete, *self.ledger._ready})
        if not living:
            return
        group = rolling_group(int(pick.choice(living).removeprefix("code-")))
        with pytest.raises(ValueError, match="admitted before"):
            self.ledger.admit(group, again=again)

    @precondition(lambda self: self.open)
    @rule(pick=randoms(use_true_random=False), end=sampled_from(["finish", "finish", "mask", "retry"]))
    def trajectory_ends(self, pick: Random, end: str) -> None:
        rolling, running = self.open[pick.choice(sorted(self.open))]
        slot = pick.choice(sorted(running))
        if end == "retry":  # lost, or handed back by a drained worker: only it is sampled again
            running[slot] += 1
            return
        made = made_by(rolling, slot, running.pop(slot), (self.version,), lost=end == "mask")
        if end == "finish":
            self.log.keep(made)
            self.sampled[made.trajectory_id] += 1
        self._ended(rolling, slot, made)

    def _ended(self, rolling: RollingGroup, slot: int, made: Trajectory) -> None:
        member = Member(trajectory=made, payload=None, transcript=None)
        group = self.ledger.record(rolling.group_id, slot, member, 1.0)
        assert (group is not None) == (not self.open[rolling.group_id][1])
        if group is not None:
            del self.open[rolling.group_id]
            self.complete[group.group_id] = group

    @precondition(lambda self: self.complete)
    @rule(pick=randoms(use_true_random=False), outcome=sampled_from(["ready", "ready", "fallback", "skip", "stale"]))
    def grade(self, pick: Random, outcome: str) -> None:
        group = self.complete.pop(pick.choice(sorted(self.complete)))
        if outcome == "skip":
            self._end(group, GroupOutcome.SKIPPED_ALL_FAIL)
        elif outcome == "stale":
            self._end(group, GroupOutcome.DROPPED_STALE)
        else:
            reply = self.grades.pop(group.group_id, None)
            if reply is None:
                self.graded[group.group_id] += 1
                self.ledger.graded(group.group_id, reply_for(group))
            ready(self.ledger, group)

    def _end(self, group: CompleteGroup, outcome: GroupOutcome) -> None:
        self.ledger.end(group, outcome)
        self.ends.setdefault(group.group_id, []).append(outcome.value)

    @rule(wait=booleans())
    def step(self, wait: bool) -> None:
        for r in self.ledger.take_stale(self.version, 1):
            self._end(r.group, GroupOutcome.DROPPED_STALE)
        batch = self.ledger.take_batch({"code": 2}, step=self.version, wait_staleness=1 if wait else None)
        if batch is None:
            return
        self.version += 1
        for r in batch:
            assert not is_stale(r.group, self.version - 1, 1)
            self._end(r.group, GroupOutcome.TRAINED)

    @rule(size=integers(0, 9))
    def scale(self, size: int) -> None:
        self.slots.resize(size)
        assert self.slots.size == max(size, 1)

    @rule()
    def save(self) -> None:
        mark = self.log.mark()
        self.checkpoint = (mark, self.version, {group: list(ends) for group, ends in self.ends.items()})
        self.log.forget(mark)

    @rule()
    def crash_and_resume(self) -> None:
        mark, self.version, ends = self.checkpoint
        self.ends = {group: list(found) for group, found in ends.items()}
        left = self.log.load(mark)
        self.ledger = Ledger(self.log)
        self.open, self.complete = {}, {}
        assert all(k.whole for k in left if k.reply is not None), "a graded group is complete"
        self.grades = {k.group_id: k.reply for k in left if k.reply is not None}
        assert {k.group_id for k in left} == self.admitted - set(self.ends), "all but those that a checkpoint covers"
        for kept in left:
            rolling = rolling_group(kept.index, kept.size, min(kept.version, self.version))
            self.ledger.admit(rolling, again=True)
            self.open[kept.group_id] = (rolling, dict.fromkeys(range(kept.size), 0))
            for slot, path in kept.rollouts.items():
                self.open[kept.group_id][1].pop(slot)
                self._ended(rolling, slot, self.log.disk[path])
            for slot in range(kept.size) if kept.whole else ():
                if slot not in kept.rollouts:
                    self.open[kept.group_id][1].pop(slot)
                    self._ended(rolling, slot, made_by(rolling, slot, 0, (0,), lost=True))

    @invariant()
    def counts_add_up(self) -> None:
        self.ledger.check()
        living = {*self.open, *self.complete, *self.ledger._ready}
        assert living | set(self.ends) == self.admitted and not living & set(self.ends)
        assert self.ledger.living == len(living)
        assert self.ledger.count(Stage.ROLLING, "code") == len(self.open)
        assert self.ledger.count(Stage.GRADING, "code") == len(self.complete)
        assert self.ledger.rolling().get("code", 0) == sum(len(running) for _, running in self.open.values())
        assert self.ledger.outstanding("code") == len(living)

    @invariant()
    def at_most_once(self) -> None:
        assert max(self.graded.values(), default=0) <= 1
        assert all(len(found) == 1 for found in self.ends.values())
        assert max(self.sampled.values(), default=0) <= 1, "no finished rollout is sampled again"


Conservation.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestConservation = Conservation.TestCase
