"""Which pool bounds a step, on spans whose answer is worked out by hand (method M7)."""

from __future__ import annotations

from typing import Any

import pytest

from infra.spans import Span
from orchestrator.bottleneck import CAUSES, critical, shares_of, shares_text, verdict


def span(name: str, start_s: float, end_s: float) -> Span:
    return Span(name=name, start_s=start_s, end_s=end_s)


def shares(spans: list[Span], rollout: int = 2, grader: int = 1, window: tuple[float, float] = (0.0, 10.0)) -> Any:
    found = critical(spans, window, {"rollout": rollout, "grader": grader})
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert set(found.shares) == set(CAUSES)
    return {cause: share for cause, share in found.shares.items() if share}, found


def test_graders_bound_a_step_while_groups_queue_for_them() -> None:
    """Ten seconds, one grader slot: full with a queue from 3 to 6.1 while the learner waits; it learns from 7 to 9."""
    spans = [
        span("rollout", 0, 3),
        span("rollout", 0, 3),
        span("grade", 2, 7),
        span("grade_queue", 2.5, 6.1),  # beside full rollouts until 3: the queue says that the graders are behind
        span("grade_queue", 4.1, 6.1),
        span("learn", 7, 9),
        span("publish", 9, 9.5),
    ]
    found, facts = shares(spans)
    assert found == {
        "rollout": pytest.approx(0.25),
        "grader": pytest.approx(0.36),
        "grader_tail": pytest.approx(0.09),
        "learner": pytest.approx(0.2),
        "publish": pytest.approx(0.05),
        "idle": pytest.approx(0.05),
    }
    assert facts.queued_groups == pytest.approx((3.6 + 2.0) / 3.6)


def test_a_full_rollout_pool_bounds_and_one_with_free_slots_does_not() -> None:
    """Four slots: four rollouts until 4, one until 8; nobody waits for a slot in the tail, three are free."""
    spans = [*(span("rollout", 0, 4) for _ in range(3)), span("rollout", 0, 8), span("learn", 8, 10)]
    found, facts = shares(spans, rollout=4)
    assert found == {
        "rollout": pytest.approx(0.4),
        "rollout_tail": pytest.approx(0.4),
        "learner": pytest.approx(0.2),
    }
    assert facts.free_slots == pytest.approx(3.0)


def test_what_runs_beside_the_learner_is_not_critical() -> None:
    """Overlap: full pools beside a stepping learner bound nothing."""
    spans = [span("rollout", 0, 10), span("rollout", 0, 10), span("grade", 0, 10), span("grade_queue", 0, 10)]
    assert shares([*spans, span("learn", 0, 9), span("checkpoint", 9, 10)])[0] == {"learner": 0.9, "checkpoint": 0.1}


def test_a_queue_before_a_grader_with_room_is_not_for_want_of_graders() -> None:
    """Two slots, one busy: another grader would not have been used."""
    assert shares([span("grade", 0, 10), span("grade_queue", 0, 10)], grader=2)[0] == {"grader_tail": 1.0}


def test_canaries_fill_graders_too() -> None:
    spans = [span("canary", 0, 10), span("grade_queue", 0, 5), span("rollout", 5, 10)]
    assert shares(spans)[0] == {"grader": 0.5, "rollout_tail": 0.5}


def test_only_the_window_counts_and_an_empty_one_has_no_shares() -> None:
    spans = [span("rollout", -5, 2), span("rollout", -3, 40), span("learn", 40, 50)]
    assert shares(spans, window=(0.0, 4.0))[0] == {"rollout": 0.5, "rollout_tail": 0.5}
    assert set(critical(spans, (3.0, 3.0), {"rollout": 1}).shares.values()) == {0.0}


def test_a_run_without_graders_needs_none() -> None:
    assert critical([span("rollout", 0, 1)], (0.0, 2.0), {"rollout": 1}).shares["rollout"] == 0.5


def row(step_s: float, queued: float = 0.0, **causes: float) -> dict[str, Any]:
    full = {f"bottleneck/{cause}": causes.get(cause, 0.0) for cause in CAUSES}
    return {"step": 1, "time/step_s": step_s, **full, "bottleneck/queued_groups": queued}


def test_steps_count_by_their_length_and_the_sentence_says_what_to_do() -> None:
    """30 s with the graders critical for half of it and 70 s with a fifth: 29 of 100 s; queues 4 and 2 -> 43/14.5/2."""
    metrics = [row(30, 4.0, grader=0.5, learner=0.5), row(70, 2.0, grader=0.2, rollout=0.25, learner=0.2, idle=0.35)]
    assert shares_of(metrics) == pytest.approx(
        {
            "grader": 0.29,
            "learner": 0.29,
            "idle": 0.245,
            "rollout": 0.175,
            "publish": 0,
            "checkpoint": 0,
            "rollout_tail": 0,
            "grader_tail": 0,
        }
    )
    only = verdict([row(100, 3.2, grader=0.31, learner=0.3, rollout=0.29, idle=0.1)])
    assert only is not None
    assert only.sentence == "add graders: they bound 31 % of the step"
    assert "3.2 groups queued" in only.evidence
    assert shares_text(shares_of([row(1, grader=0.996, idle=0.004)])) == "grader 100 %"


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_words(cause: str) -> None:
    found = verdict([row(10, **{cause: 1.0})])
    assert found is not None and found.cause == cause
    assert "100 % of the step" in found.sentence or "for 100 %" in found.sentence
    assert "{" not in found.sentence + found.evidence


def test_steps_from_before_there_was_an_analysis_say_nothing() -> None:
    assert verdict([]) is None
    assert verdict([{"step": 1, "time/step_s": 3.0}]) is None
