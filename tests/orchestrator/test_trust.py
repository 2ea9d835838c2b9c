"""Figures about a grader, worked out by hand."""

from __future__ import annotations

import pytest
from gradings import grade, reply, result

from configs.schema import RubricConfig
from grader.verdict import FallbackReason
from orchestrator.trust import Grading, Share, TrustFigures, trust_figures, trust_rows

RUBRIC = RubricConfig()


def figures(*results: object) -> TrustFigures:
    return trust_figures(results, RUBRIC)  # type: ignore[arg-type]


def test_validity_and_fallbacks_are_shares_of_all_gradings() -> None:
    """M1.10, M2.6."""
    ok = grade({"a": "T1"})
    found = figures(result(ok, FallbackReason.TIMEOUT), result(FallbackReason.NOT_JSON, FallbackReason.NOT_JSON))
    assert found.groups == 2
    assert found.valid == Share(part=1, whole=4) and found.valid.value == 0.25
    assert found.fallbacks == {"timeout": 1, "not_json": 2}


def test_agreement_counts_labelled_candidates_of_valid_verdicts() -> None:
    known = {"a": "T1", "b": "T2"}
    right, half = grade({"a": "T1", "b": "T2"}), grade({"a": "T1", "b": "T1"})
    found = figures(result(right, half, FallbackReason.SCHEMA, known=known), result(half))
    assert found.tier_agreement == Share(part=3, whole=4)
    # T2 has one score of 3, T1 all of 5: one of ten scores differs in the second grading.
    assert found.score_agreement == Share(part=19, whole=20)
    # Known: a above b. The first says so (1), the second ties everything (0).
    assert found.tau_b == pytest.approx(0.5) and found.tau_gradings == 2
    assert found.confusion == {("T1", "T1"): 2, ("T2", "T2"): 1, ("T2", "T1"): 1}


def test_a_reversed_ranking_has_tau_minus_one() -> None:
    found = figures(result(grade({"a": "T2", "b": "T1"}), known={"a": "T1", "b": "T2"}))
    assert found.tau_b == pytest.approx(-1.0)
    assert found.tier_agreement.part == 0


def test_a_hack_is_no_tier() -> None:
    """M1.5: a candidate called a hack leaves the tiers."""
    found = figures(result(grade({"a": "T1"}, hacks=("b",)), known={"a": "T1", "b": "T3"}))
    assert found.tier_agreement == Share(part=1, whole=2)
    assert found.confusion == {("T1", "T1"): 1, ("T3", "hack"): 1}
    assert found.tiers == {"T1": 1, "hack": 1}
    assert found.dropped_citations == 1


def test_self_agreement_is_over_all_pairs_of_repeats() -> None:
    one, two = grade({"a": "T1", "b": "T2"}), grade({"a": "T1", "b": "T3"})
    found = figures(result(one, one, two), result(one, FallbackReason.TIMEOUT))
    # Pairs (1,2), (1,3), (2,3): a agrees in all three, b in the first.
    assert found.self_agreement == Share(part=4, whole=6)
    assert found.self_tau_b == pytest.approx(1.0), "a stands above b in all of them"
    assert found.permuted_changes == Share(part=0, whole=0)


def test_a_tied_ranking_says_nothing_of_order() -> None:
    tied = grade({"a": "T1", "b": "T1"})
    found = figures(result(tied, tied))
    assert found.self_agreement == Share(part=2, whole=2)
    assert found.self_tau_b is None


def test_ties_inside_a_tier_rank() -> None:
    """M3.3."""
    first = grade({"a": "T1", "b": "T1"}, ties={"b": 1})
    second = grade({"a": "T1", "b": "T1"}, ties={"a": 1})
    assert figures(result(first, second)).self_tau_b == pytest.approx(-1.0)


def test_changes_under_another_order_are_held_against_each_usual_grading() -> None:
    """M2.5: the order should not matter."""
    usual, other = grade({"a": "T1", "b": "T2"}), grade({"a": "T1", "b": "T1"})
    found = figures(result(usual, usual, permuted=(other,)))
    assert found.permuted_changes == Share(part=2, whole=4)
    assert found.self_agreement == Share(part=2 * 1, whole=2)


def test_latency_tokens_and_cost() -> None:
    ok = grade({"a": "T1"})
    gradings = tuple(
        Grading(permuted=False, reply=reply(ok, run_s=float(s), prompt_tokens=s * 100, cost_usd=0.5))
        for s in range(1, 6)
    )
    found = figures(result(gradings=gradings))
    assert found.run_s == (3.0, pytest.approx(4.8))
    assert found.prompt_tokens_mean == 300 and found.completion_tokens_mean == 100 and found.turns_mean == 3
    assert found.cost_usd == pytest.approx(2.5)
    rows = dict(trust_rows(found))
    assert rows["cost"] == "2.5000 USD, 0.50000 USD a grading"
    assert rows["time of a grading, p50 / p95"] == "3.0 s / 4.8 s"


def test_what_was_not_measured_has_no_row() -> None:
    names = [name for name, _ in trust_rows(figures(result(grade({"a": "T1"}))))]
    assert names == ["groups", "valid verdicts", "tiers given", "time of a grading, p50 / p95", "tokens of a grading"]
    assert dict(trust_rows(figures())) == {"groups": "0", "valid verdicts": "-"}


def test_every_figure_has_a_row() -> None:
    one = grade({"a": "T1", "b": "T2"})
    rows = dict(
        trust_rows(figures(result(one, one, FallbackReason.TIMEOUT, permuted=(one,), known={"a": "T1", "b": "T2"})))
    )
    assert rows["valid verdicts"] == "75.0% (3 of 4 gradings)"
    assert rows["  fallback: timeout"] == "1"
    assert rows["tier as known"] == "100.0% (6 of 6 candidates)"
    assert rows["  known T2 was given"] == "T2 3"
    assert rows["ranking against known, tau-b"] == "+1.000 (mean of 3 gradings)"
    assert rows["same tier when asked again"] == "100.0% (2 of 2 candidates)"
    assert rows["other tier in another order"] == "0.0% (0 of 4 candidates)"
