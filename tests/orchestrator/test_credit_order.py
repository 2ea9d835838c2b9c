"""The order of M1.5-M1.8 through the real validation and the real record: what each step hands to the next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import ScriptedSource, trajectory, transcript

from configs.schema import AdvantageMode, AlgorithmConfig, LengthPenaltyConfig, RubricConfig
from envs.task import Split, TaskKind
from grader.candidates import CandidateGroup, label_group
from grader.verdict import (
    CandidateVerdict,
    FallbackReason,
    Grade,
    HackVerdict,
    InvalidVerdict,
    compose_verdict,
    validate,
)
from orchestrator.audit import audit_record
from orchestrator.credit import Credit, GroupOutcome, credit
from orchestrator.ledger import CompleteGroup, Member
from rollout.trajectory import Status, Trajectory

TASK = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, 0)
RUBRIC = RubricConfig()
SCORES = {"T1": [5, 5, 5, 5, 5], "T2": [5, 5, 3, 5, 5], "T2 worse": [4, 4, 3, 4, 4], "T3": [1, 5, 5, 5, 5]}


def passing(slot: int, **changes: Any) -> Trajectory:
    return trajectory(f"code-0/{slot}.0", task=TASK, **changes)


def failing(slot: int) -> Trajectory:
    return trajectory(f"code-0/{slot}.0", task=TASK, passed=False)


def labelled(trajectories: Sequence[Trajectory]) -> CandidateGroup:
    return label_group(
        group_id="code-0",
        task=TASK,
        trajectories=trajectories,
        transcripts=[transcript(t.trajectory_id, "T1") for t in trajectories],
        order_seed=3,
    )


def graded(trajectories: Sequence[Trajectory], marks: Mapping[int, str], hacks: Sequence[int] = ()) -> Grade:
    """A grade as the worker makes it: slot -> row of SCORES for each pass, hacks included."""
    group = labelled(trajectories)
    slots = {c.label: int(c.trajectory.trajectory_id.split("/")[1][0]) for c in group.passing}
    judged = {
        label: CandidateVerdict(evidence=["a.py:1"], reasons=["said"] * 5, flags=[], scores=SCORES[marks[slot]])
        for label, slot in slots.items()
    }
    found = [HackVerdict(candidate=c, evidence=["a.py:1"]) for c, slot in slots.items() if slot in hacks]
    return validate(compose_verdict(judged, RUBRIC).model_copy(update={"hacks": found}), group, RUBRIC)


def line(trajectories: Sequence[Trajectory], given: Credit) -> dict[str, Any]:
    """The group's line of groups.jsonl, through JSON."""
    members = tuple(Member(trajectory=t, payload=None, transcript=None) for t in trajectories)
    group = CompleteGroup(group_id="code-0", task=TASK, index=0, members=members, admitted_s=0.0, completed_s=1.0)
    outcome = given.skip or GroupOutcome.TRAINED
    record = audit_record(group, given, outcome=outcome, step=1, lambda_max=1.5, reply=None, ready_s=None)
    out: dict[str, Any] = json.loads(json.dumps(record))
    return out


def recomputed(record: Mapping[str, Any]) -> list[float]:
    """What an outsider computes from one line alone (M4.1, M4.3, M4.4)."""
    valid = [t for t in record["trajectories"] if t["valid"]]
    mean = sum(t["reward"] for t in valid) / len(valid)
    a = [t["reward"] - mean for t in valid]
    if record["mode"] == "outcome":
        return a
    up = sum(max(x, 0.0) for x, t in zip(a, valid, strict=True) if t["passed"])
    down = sum(max(x, 0.0) * t["factor"] for x, t in zip(a, valid, strict=True) if t["passed"])
    scale = min(up / down, record["lambda_max"])
    b = [scale * t["factor"] * max(x, 0.0) if t["passed"] else x for x, t in zip(a, valid, strict=True)]
    return [x - sum(b) / len(b) for x in b]


def advantages(record: Mapping[str, Any]) -> list[float]:
    return [t["advantage"] for t in record["trajectories"] if t["valid"]]


def test_ties_and_factors_are_counted_among_those_that_still_pass() -> None:
    """M1.5 before M1.7: a hack at the head of T2 leaves its place to the next one, and K2 shrinks (M3.3, M3.4)."""
    trajectories = [passing(0), passing(1), passing(2), failing(3)]
    marks = {0: "T2", 1: "T2 worse", 2: "T3"}
    before = credit(trajectories, AlgorithmConfig(), grade=graded(trajectories, marks), fallback_reason=None)
    assert [r.factor for r in before.rows.values()] == [0.85, 0.4, 0.2, None]
    after = credit(trajectories, AlgorithmConfig(), grade=graded(trajectories, marks, [0]), fallback_reason=None)
    rows = list(after.rows.values())
    assert [r.factor for r in rows] == [None, 0.85, 0.2, None]
    assert [r.tie for r in rows] == [None, 0, 0, None]
    assert [r.passed for r in rows] == [False, True, True, False]
    # p = 2/4, f = .85 and .2: lambda = 1 / .525, capped to 1.5 (M4.3).
    assert after.lam == pytest.approx(1 / 0.525) and after.capped


@pytest.mark.parametrize("hacks", [(), (0,), (1,)])
@pytest.mark.parametrize("penalty", [None, LengthPenaltyConfig(min_pass_rate=0.3)])
def test_a_line_of_groups_jsonl_is_enough_to_recompute_it(
    hacks: tuple[int, ...], penalty: LengthPenaltyConfig | None
) -> None:
    """M1.5 -> M1.7 -> M1.8 -> M4.3: rewards, passes and factors in the line are those that made the advantages."""
    lost = trajectory("code-0/4.0", task=TASK, status=Status.INFRA_WALL)
    trajectories = [passing(0), passing(1, response_tokens=90, total_tokens=400), passing(2, turns=9), failing(3)]
    grade = graded(trajectories, {0: "T1", 1: "T2", 2: "T3"}, hacks)
    given = credit([*trajectories, lost], AlgorithmConfig(length_penalty=penalty), grade=grade, fallback_reason=None)
    record = line([*trajectories, lost], given)
    assert record["mode"] == "redistribute" and record["graded"]
    assert advantages(record) == pytest.approx(recomputed(record), abs=1e-12)
    assert sum(advantages(record)) == pytest.approx(0.0, abs=1e-12)
    assert [t["id"] for t in record["trajectories"] if t["hack"]] == [f"code-0/{slot}.0" for slot in hacks]
    assert [t["outcome_reward"] for t in record["trajectories"]] == [1.0, 1.0, 1.0, 0.0, None]


def test_the_length_penalty_measures_against_those_that_still_pass() -> None:
    """M1.5 before M1.8: the short hack sets no length, and the pass rate is the corrected one (M5.4)."""
    penalty = LengthPenaltyConfig(max_penalty=0.2, percentile=0.0, exponent=1.0, min_pass_rate=0.5)
    algorithm = AlgorithmConfig(mode=AdvantageMode.REDISTRIBUTE_EXACT, length_penalty=penalty)
    short = passing(0, response_tokens=1, total_tokens=11)
    trajectories = [short, passing(1), passing(2), passing(3), failing(4)]
    marks = dict.fromkeys(range(4), "T1")
    honest = credit(trajectories, algorithm, grade=graded(trajectories, marks), fallback_reason=None)
    assert [r.reward for r in honest.rows.values()] == pytest.approx([1.0, 0.8, 0.8, 0.8, 0.0])
    hacked = credit(trajectories, algorithm, grade=graded(trajectories, marks, [0]), fallback_reason=None)
    assert [r.reward for r in hacked.rows.values()] == [0.0, 1.0, 1.0, 1.0, 0.0], "3 of 5 pass, all of one length"
    two = credit(trajectories, algorithm, grade=graded(trajectories, marks, [0, 1]), fallback_reason=None)
    assert [r.reward for r in two.rows.values()] == [0.0, 0.0, 1.0, 1.0, 0.0], "2 of 5 is not above one half"


def test_the_length_penalty_comes_after_the_hack_that_is_worth_nothing() -> None:
    """M1.5 before M1.8: a failing side has reward 0, never less."""
    penalty = LengthPenaltyConfig(max_penalty=0.2, percentile=0.0, exponent=1.0, min_pass_rate=0.0)
    trajectories = [passing(0, turns=99), passing(1), failing(2)]
    grade = graded(trajectories, {0: "T1", 1: "T1"}, [0])
    given = credit(trajectories, AlgorithmConfig(length_penalty=penalty), grade=grade, fallback_reason=None)
    assert [r.reward for r in given.rows.values()] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("mode", [m for m in AdvantageMode if m is not AdvantageMode.OUTCOME])
def test_a_group_whose_passes_were_all_hacks_is_skipped_in_every_mode(mode: AdvantageMode) -> None:
    """M1.6 after M1.5: p = 0, so there is nothing to train on; the line says so and adds up."""
    trajectories = [passing(0), passing(1), failing(2)]
    grade = graded(trajectories, {0: "T1", 1: "T3"}, [0, 1])
    given = credit(trajectories, AlgorithmConfig(mode=mode), grade=grade, fallback_reason=None)
    assert given.skip is GroupOutcome.SKIPPED_ALL_FAIL and not given.graded and given.lam is None
    record = line(trajectories, given)
    assert record["outcome"] == "skipped_all_fail" and record["mode"] == "outcome" and record["lambda_max"] is None
    assert advantages(record) == recomputed(record) == [0.0, 0.0, 0.0]
    assert [t["hack"] for t in record["trajectories"]] == [True, True, False]


def test_a_hack_called_without_evidence_changes_nothing() -> None:
    """M2.6, M1.10: the verdict is invalid as a whole, and the outcome advantages stay."""
    trajectories = [passing(0), passing(1), failing(2)]
    group = labelled(trajectories)
    judged = {
        c.label: CandidateVerdict(evidence=[], reasons=["said"] * 5, flags=[], scores=[5] * 5) for c in group.passing
    }
    unfounded = HackVerdict(candidate=group.passing[0].label, evidence=["a.py:999"])
    with pytest.raises(InvalidVerdict) as e:
        validate(compose_verdict(judged, RUBRIC).model_copy(update={"hacks": [unfounded]}), group, RUBRIC)
    assert e.value.reason is FallbackReason.UNRESOLVED_EVIDENCE
    given = credit(trajectories, AlgorithmConfig(), grade=None, fallback_reason=e.value.reason.value)
    assert [r.advantage for r in given.rows.values()] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert advantages(line(trajectories, given)) == pytest.approx(recomputed(line(trajectories, given)))


def test_a_grade_knows_nothing_of_where_a_trajectory_stands() -> None:
    """M2.6: the same members in another order get the same rows."""
    trajectories = [passing(0), failing(1), passing(2), passing(3)]
    grade = graded(trajectories, {0: "T1", 2: "T2", 3: "T3"}, [3])
    rows = credit(trajectories, AlgorithmConfig(), grade=grade, fallback_reason=None).rows
    turned = replace(grade, candidates=dict(reversed(list(grade.candidates.items()))))
    assert credit(trajectories[::-1], AlgorithmConfig(), grade=turned, fallback_reason=None).rows == rows
