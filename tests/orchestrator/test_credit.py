"""Credit: the order of M1.5-M1.8, by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from scripted import ScriptedSource, trajectory

from configs.schema import AdvantageMode, AlgorithmConfig, LengthPenaltyConfig
from envs.task import Split, TaskKind
from grader.rubric import Flags, Scores, Tier
from grader.verdict import CandidateGrade, Grade
from orchestrator.credit import GroupOutcome, classify, credit
from rollout.trajectory import Status, Trajectory

TASK = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, 0)


def make(slot: int, *, passed: bool = True, status: Status = Status.SUBMITTED, tokens: int = 10) -> Trajectory:
    return trajectory(
        f"code-0/{slot}.0", task=TASK, passed=passed, status=status, response_tokens=tokens, total_tokens=tokens + 20
    )


def mark(tier: Tier, tie: int, factor: float) -> CandidateGrade:
    return CandidateGrade(
        scores=Scores(5, 5, 5, 5, 5),
        flags=Flags(),
        reasons=("as good as it gets",) * 5,
        weighted=5.0,
        tier=tier,
        tie=tie,
        factor=factor,
        evidence=(),
    )


def grade(hacks: tuple[int, ...] = (), **factors: float) -> Grade:
    marks = {f"code-0/{slot[1:]}.0": mark(Tier.T1, i, f) for i, (slot, f) in enumerate(factors.items())}
    return Grade(candidates=marks, hacks={f"code-0/{slot}.0": () for slot in hacks})


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        ((True, True), GroupOutcome.SKIPPED_ALL_PASS),
        ((False, False), GroupOutcome.SKIPPED_ALL_FAIL),
        ((True, False), None),
    ],
)
def test_only_mixed_groups_are_eligible(passed: tuple[bool, bool], expected: GroupOutcome | None) -> None:
    assert classify([make(i, passed=p) for i, p in enumerate(passed)], 2) is expected


def test_masked_trajectories_do_not_count_for_eligibility() -> None:
    lost = make(2, status=Status.INFRA_ENGINE)
    assert classify([make(0), make(1), lost], 2) is GroupOutcome.SKIPPED_ALL_PASS
    assert classify([make(0), lost, lost], 2) is GroupOutcome.SKIPPED_TOO_FEW_VALID
    broken = make(0, status=Status.INFRA_VERIFIER)
    assert classify([broken, broken], 2) is GroupOutcome.SKIPPED_BROKEN_TASK
    assert classify([broken, make(1, status=Status.INFRA_SETUP)], 2) is GroupOutcome.SKIPPED_BROKEN_TASK
    assert classify([broken, lost], 2) is GroupOutcome.SKIPPED_TOO_FEW_VALID


def test_ungraded_group_keeps_outcome_advantages() -> None:
    given = credit([make(0), make(1, passed=False)], AlgorithmConfig(), grade=None, fallback_reason="timeout")
    assert [r.advantage for r in given.rows.values()] == pytest.approx([0.5, -0.5])
    assert given.mode is AdvantageMode.OUTCOME and not given.graded and given.fallback_reason == "timeout"
    assert given.lam is None and not given.capped


def test_grades_attach_by_id_and_move_credit() -> None:
    trajectories = [make(0), make(1, passed=False), make(2), make(3, passed=False)]
    given = credit(trajectories, AlgorithmConfig(), grade=grade(s2=1.0, s0=0.5), fallback_reason=None)
    # mean f = 3/4, lambda = 4/3: (1 - p) f / mean f = 1/2 * f * 4/3.
    by_slot = {name.split("/")[1]: row.advantage for name, row in given.rows.items()}
    assert by_slot == pytest.approx({"0.0": 1 / 3, "1.0": -0.5, "2.0": 2 / 3, "3.0": -0.5})
    assert given.lam == pytest.approx(4 / 3) and given.graded and not given.capped


def test_a_confirmed_hack_fails_before_the_statistics() -> None:
    trajectories = [make(0), make(1), make(2, passed=False), make(3, passed=False)]
    given = credit(trajectories, AlgorithmConfig(), grade=grade(hacks=(1,), s0=1.0), fallback_reason=None)
    hacked = given.rows["code-0/1.0"]
    assert (hacked.hack, hacked.passed, hacked.outcome_reward, hacked.reward) == (True, False, 1.0, 0.0)
    assert [r.advantage for r in given.rows.values()] == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_a_group_whose_only_pass_was_a_hack_is_skipped() -> None:
    given = credit([make(0), make(1, passed=False)], AlgorithmConfig(), grade=grade(hacks=(0,)), fallback_reason=None)
    assert given.skip is GroupOutcome.SKIPPED_ALL_FAIL and not given.graded
    assert [r.advantage for r in given.rows.values()] == [0.0, 0.0]


def test_masked_trajectories_get_no_row_and_change_nothing() -> None:
    rest = [make(0), make(1, passed=False), make(2, passed=False)]
    without = credit(rest, AlgorithmConfig(), grade=grade(s0=0.2), fallback_reason=None)
    given = credit(
        [*rest, make(3, status=Status.INFRA_WALL)], AlgorithmConfig(), grade=grade(s0=0.2), fallback_reason=None
    )
    assert given == without and "code-0/3.0" not in given.rows


def test_the_length_penalty_comes_before_the_advantages() -> None:
    algorithm = AlgorithmConfig(
        mode=AdvantageMode.REDISTRIBUTE_EXACT,
        length_penalty=LengthPenaltyConfig(max_penalty=0.2, percentile=0.0, exponent=1.0, min_pass_rate=0.5),
    )
    trajectories = [make(0, tokens=10), make(1, tokens=20), make(2, passed=False)]
    given = credit(trajectories, algorithm, grade=grade(s0=1.0, s1=1.0), fallback_reason=None)
    rewards = [r.reward for r in given.rows.values()]
    assert rewards == pytest.approx([1.0, 0.8, 0.0]), "twice the shortest passing length costs the whole penalty"
    mean = Fraction(9, 5) / 3
    assert [r.advantage for r in given.rows.values()] == pytest.approx(
        [float(x - mean) for x in (1, Fraction(4, 5), 0)]
    )
    assert [r.outcome_reward for r in given.rows.values()] == [1.0, 1.0, 0.0]
