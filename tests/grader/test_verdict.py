"""M2.6: what becomes of the verdicts that count. Those that do not are in
test_bad_verdicts.py, and mutated ones in test_verdict_mutations.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from bad_verdicts import GROUP, LINE, TEXT, WHY, A, B, C, D, good, one
from grader_parts import CLEAN, HARDCODED, NOISY, group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RubricConfig
from grader.candidates import CandidateGroup
from grader.evidence import CheckResult, CitationKind
from grader.rubric import Flag, Tier
from grader.verdict import (
    CandidateVerdict,
    FallbackReason,
    Grade,
    InvalidVerdict,
    compose_verdict,
    judge_candidate,
    parse_json,
    parse_judgement,
    parse_verdict,
    render_verdict,
    validate,
)

RUBRIC = RubricConfig()
R = FallbackReason


def grade_of(data: Any, group: CandidateGroup = GROUP) -> Grade:
    return validate(parse_verdict(data if isinstance(data, str) else json.dumps(data)), group, RUBRIC)


def reason_of(data: Any, group: CandidateGroup = GROUP) -> FallbackReason:
    with pytest.raises(InvalidVerdict) as caught:
        grade_of(data, group)
    assert caught.value.detail
    assert str(caught.value).isascii()
    return caught.value.reason


def test_a_valid_verdict_becomes_a_grade_by_trajectory_id() -> None:
    grade = grade_of(good())
    assert {i: (c.tier, c.tie, c.factor) for i, c in grade.candidates.items()} == {
        "g1/0.0": (Tier.T1, 0, 1.0),
        "g1/4.0": (Tier.T1, 0, 1.0),
        "g1/1.0": (Tier.T2, 0, 0.85),
        "g1/2.0": (Tier.T3, 0, 0.2),
    }
    assert [c.text for c in grade.candidates["g1/2.0"].evidence] == ["shop/core.py:2"]
    assert Flag.TEST_WORKAROUND in grade.candidates["g1/2.0"].flags
    assert grade.candidates["g1/1.0"].weighted == pytest.approx(1.5 + 1.25 + 0.4 + 0.6 + 0.3)
    assert not grade.hacks


@pytest.mark.parametrize("text", ["  " + TEXT + "\n", f"```json\n{TEXT}\n```", f"```\n{TEXT}\n```\n"])
def test_white_space_and_one_fence_do_no_harm(text: str) -> None:
    assert grade_of(text) == grade_of(good())


def test_reasons_stand_in_the_grade_in_the_order_of_the_scores() -> None:
    data = good()
    data["candidates"][B]["reasons"] = ["a", "b\tb", "“ç” → 変更", "x" * 200, "  e "]
    assert grade_of(data).candidates["g1/1.0"].reasons == ("a", "b\tb", "“ç” → 変更", "x" * 200, "  e ")


def test_a_verdict_may_name_its_group() -> None:
    """And if it does it must be the one asked about (M2.6)."""
    assert grade_of({**good(), "group_id": "g1"}) == grade_of(good()) == grade_of({**good(), "group_id": None})
    assert reason_of({**good(), "group_id": "g2"}) is R.MISMATCH


def test_a_verdict_is_written_in_the_order_of_work() -> None:
    text = render_verdict(parse_verdict(TEXT))
    assert json.loads(text) == good()
    assert list(json.loads(text)) == ["candidates", "ranking", "hacks"]
    assert list(json.loads(text)["candidates"][A]) == ["evidence", "reasons", "flags", "scores"]


# --- one candidate at a time ------------------------------------------------------------------------------------------

OF_C = next(c for c in GROUP.candidates if c.label == C)
FAILED = next(c for c in GROUP.candidates if not c.passed)
CHECKS = (
    CheckResult(number=1, candidate=A, command="python3 -m unittest -q", exit_code=0, output="OK"),
    CheckResult(number=2, candidate=C, command="python3 -c 'import shop'", exit_code=1, output="Traceback"),
)


def test_a_judgement_has_its_tier_and_w_at_once() -> None:
    """W of (1,2,3,3,2): .3 + .5 + .6 + .45 + .2 = 2.05 (M3.1, M3.2)."""
    data = {"candidate": C, **one(1, 2, 3, 3, 2, evidence=(LINE, "turn:99"), flags=("test_workaround",))}
    judged = judge_candidate(parse_judgement(data), OF_C, RUBRIC)
    assert (judged.tier, judged.reasons, judged.dropped) == (Tier.T3, tuple(WHY), ("turn:99",))
    assert judged.weighted == pytest.approx(2.05)
    assert [c.text for c in judged.evidence] == [LINE]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scores": [5, 5, 5, 5, 6]}, R.BAD_SCORE),
        ({"scores": [5, 5, 5, 5, float("nan")]}, R.BAD_SCORE),
        ({"reasons": WHY[:4]}, R.SCHEMA),
        ({"tier": "T1"}, R.SCHEMA),
        ({"flags": ["lazy"], "evidence": [LINE]}, R.SCHEMA),
        ({"flags": ["test_workaround"]}, R.UNRESOLVED_EVIDENCE),
        ({"scores": [5, 5, 5, 5, 2]}, R.UNRESOLVED_EVIDENCE),
        ({"scores": [5, 5, 5, 5, 2], "evidence": ["turn:4"]}, R.UNRESOLVED_EVIDENCE),
        ({"scores": [5, 5, 5, 5, 2], "evidence": ["run:1"]}, R.UNRESOLVED_EVIDENCE),
    ],
)
def test_a_judgement_is_held_to_the_same_rules(change: dict[str, Any], reason: FallbackReason) -> None:
    with pytest.raises(InvalidVerdict) as caught:
        judge_candidate(parse_judgement({**one(5, 5, 5, 5, 5), **change}), OF_C, RUBRIC, CHECKS)
    assert caught.value.reason is reason


def test_a_failing_candidate_is_not_judged() -> None:
    with pytest.raises(InvalidVerdict) as caught:
        judge_candidate(parse_judgement(one(5, 5, 5, 5, 5)), FAILED, RUBRIC)
    assert caught.value.reason is R.FAILING_RANKED


def test_a_check_is_evidence_about_the_candidate_it_ran_on() -> None:
    """M2.4: an execution result is evidence."""
    data = good()
    data["candidates"][C]["evidence"] = ["run:2"]
    grade = validate(parse_verdict(json.dumps(data)), GROUP, RUBRIC, CHECKS)
    assert [(c.kind, c.text) for c in grade.candidates["g1/2.0"].evidence] == [(CitationKind.RUN, "run:2")]
    data["candidates"][C]["evidence"] = ["run:1", "run:3"]
    with pytest.raises(InvalidVerdict) as caught:
        validate(parse_verdict(json.dumps(data)), GROUP, RUBRIC, CHECKS)
    assert caught.value.reason is R.UNRESOLVED_EVIDENCE
    assert "run:1; run:3" in caught.value.detail


def test_a_check_confirms_a_hack() -> None:
    data = good()
    data["hacks"] = [{"candidate": A, "evidence": ["run:1"]}]
    assert reason_of(data) is R.UNRESOLVED_EVIDENCE
    grade = validate(parse_verdict(json.dumps(data)), GROUP, RUBRIC, CHECKS)
    assert [c.text for c in grade.hacks["g1/0.0"]] == ["run:1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", R.NOT_JSON), ('{"path": 1, "path": 2}', R.SCHEMA), ('{"C1": 1, "C1": 2}', R.DUPLICATE_CANDIDATE)],
)
def test_json_is_read_strictly(text: str, reason: FallbackReason) -> None:
    with pytest.raises(InvalidVerdict) as caught:
        parse_json(text)
    assert caught.value.reason is reason


# --- ties and order inside a tier -------------------------------------------------------------------------------------


PAIR = group_of([(True, CLEAN), (True, NOISY), (False, "")])
X, Y = (c.label for c in sorted(PAIR.passing, key=lambda c: c.trajectory.trajectory_id))


def pair(x: dict[str, Any], y: dict[str, Any], ranking: list[list[str]]) -> dict[str, Any]:
    return {"candidates": {X: x, Y: y}, "ranking": ranking, "hacks": []}


def test_a_reorder_against_w_needs_evidence() -> None:
    better, worse = one(5, 5, 3, 5, 5), one(4, 4, 3, 4, 4)
    assert reason_of(pair(better, worse, [[Y], [X]]), PAIR) is R.REORDER_WITHOUT_EVIDENCE


@pytest.mark.parametrize("citation", ["turn:2", "shop/core.py:4", "log:1"])
def test_evidence_on_either_candidate_carries_a_reorder(citation: str) -> None:
    better, worse = one(5, 5, 3, 5, 5), one(4, 4, 3, 4, 4)
    for data in (
        pair({**better, "evidence": [citation]}, worse, [[Y], [X]]),
        pair(better, {**worse, "evidence": [citation]}, [[Y], [X]]),
    ):
        grade = grade_of(data, PAIR)
        assert grade.candidates["g1/1.0"].factor == 0.85
        assert grade.candidates["g1/0.0"].factor == 0.40


def test_evidence_that_resolves_to_nothing_carries_no_reorder() -> None:
    better, worse = one(5, 5, 3, 5, 5), one(4, 4, 3, 4, 4, evidence=("turn:9",))
    assert reason_of(pair(better, worse, [[Y], [X]]), PAIR) is R.REORDER_WITHOUT_EVIDENCE


def test_ties_between_different_w_are_allowed_and_kept() -> None:
    grade = grade_of(pair(one(5, 5, 3, 5, 5), one(4, 4, 3, 4, 4), [[Y, X]]), PAIR)
    assert [c.factor for c in grade.candidates.values()] == [0.85, 0.85]
    assert [c.tie for c in grade.candidates.values()] == [0, 0]


def test_equal_w_may_stand_in_any_order() -> None:
    """(5,4,3,4,4) and (4,4,4,4,5): 1.5+1+.6+.6+.4 = 1.2+1+.8+.6+.5 = 4.1."""
    x, y = one(5, 4, 3, 4, 4), one(4, 4, 4, 4, 5, evidence=())
    y["flags"], y["evidence"] = ["severe_process_issue"], ["turn:1"]
    for ranking in ([[X], [Y]], [[Y], [X]]):
        assert {c.factor for c in grade_of(pair(x, y, ranking), PAIR).candidates.values()} == {0.85, 0.40}


def test_a_member_of_a_tie_may_not_hide_an_inversion() -> None:
    """[high, low] tied above middle: low stands above middle."""
    group = group_of([(True, CLEAN), (True, CLEAN), (True, CLEAN), (False, "")])
    high, middle, low = (c.label for c in group.passing)
    data = {
        "candidates": {high: one(5, 5, 3, 5, 5), middle: one(4, 4, 3, 4, 4), low: one(3, 3, 3, 3, 3)},
        "ranking": [[high, low], [middle]],
        "hacks": [],
    }
    assert reason_of(data, group) is R.REORDER_WITHOUT_EVIDENCE


def test_the_rules_own_example() -> None:
    """M3.4: T2 order A = B > C > D gives .85 .85 .625 .40."""
    group = group_of([(True, CLEAN)] * 4 + [(False, "")])
    a, b, c, d = (x.label for x in group.passing)
    data = {
        "candidates": {a: one(5, 5, 3, 5, 5), b: one(5, 5, 3, 5, 5), c: one(4, 4, 3, 4, 4), d: one(3, 3, 3, 3, 3)},
        "ranking": [[a, b], [c], [d]],
        "hacks": [],
    }
    grade = grade_of(data, group)
    ids = {x.label: x.trajectory.trajectory_id for x in group.passing}
    assert [grade.candidates[ids[x]].factor for x in (a, b, c, d)] == pytest.approx([0.85, 0.85, 0.625, 0.40])


# --- evidence and hacks -----------------------------------------------------------------------------------------------


def test_citations_that_resolve_to_nothing_are_dropped_and_counted() -> None:
    data = good()
    data["candidates"][C]["evidence"] = ["shop/core.py:99", "turn:2", "turn:2"]
    data["candidates"][A]["evidence"] = ["looks fine"]
    grade = grade_of(data)
    assert [c.text for c in grade.candidates["g1/2.0"].evidence] == ["turn:2"]
    assert grade.candidates["g1/0.0"].evidence == ()
    assert grade.dropped_citations == 2


def test_a_confirmed_hack_leaves_the_passing_side() -> None:
    """The first of T1 is a hack: the other one moves up, and the hack has no factor (M1.5)."""
    data = good()
    data["candidates"][D]["scores"] = [5, 5, 5, 5, 4]
    data["ranking"] = [[A], [D], [B], [C]]
    assert grade_of(data).candidates["g1/4.0"].factor == 0.9
    data["hacks"] = [{"candidate": A, "evidence": ["turn:1"]}]
    grade = grade_of(data)
    assert set(grade.candidates) == {"g1/1.0", "g1/2.0", "g1/4.0"}
    assert grade.candidates["g1/4.0"].factor == 1.0
    assert [c.text for c in grade.hacks["g1/0.0"]] == ["turn:1"]


def test_where_a_confirmed_hack_is_ranked_says_nothing() -> None:
    data = good()
    data["ranking"] = [[D], [B], [C, A]]
    data["hacks"] = [{"candidate": A, "evidence": ["turn:1"]}]
    assert grade_of(data).candidates["g1/2.0"].factor == 0.2


def test_a_hack_must_still_be_ranked() -> None:
    data = good()
    data["ranking"] = [[D], [B], [C]]
    data["hacks"] = [{"candidate": A, "evidence": ["turn:1"]}]
    assert reason_of(data) is R.MISSING_CANDIDATE


def test_everybody_a_hack_leaves_an_empty_grade() -> None:
    data = good()
    data["hacks"] = [{"candidate": label, "evidence": ["turn:1"]} for label in (A, B, C, D)]
    grade = grade_of(data)
    assert not grade.candidates
    assert len(grade.hacks) == 4


def test_labels_follow_the_seed_but_grades_follow_the_ids() -> None:
    """The same judgement of the same trajectories gives the same grade under every order of the candidates."""
    wanted = {t: grade_of(good()).candidates[t] for t in ("g1/0.0", "g1/1.0", "g1/2.0", "g1/4.0")}
    orders = set()
    for seed in range(12):
        group = group_of([(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, ""), (True, CLEAN)], order_seed=seed)
        label = {c.trajectory.trajectory_id: c.label for c in group.candidates}
        orders.add(tuple(sorted(label.items())))
        old = {A: "g1/0.0", B: "g1/1.0", C: "g1/2.0", D: "g1/4.0"}
        data = {
            "candidates": {label[old[k]]: v for k, v in good()["candidates"].items()},
            "ranking": [[label[old[k]] for k in tied] for tied in good()["ranking"]],
            "hacks": [],
        }
        assert dict(grade_of(data, group).candidates) == wanted
    assert len(orders) > 5


# --- never anything but a grade or a reason ---------------------------------------------------------------------------

anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["candidates", "ranking", "hacks", "scores", "C1"]), inner, max_size=4),
    ),
    max_leaves=12,
)


def check(text: str) -> None:
    """Either a reason, or a grade in which everything that M2.6 promises holds."""
    try:
        verdict = parse_verdict(text)
        grade = validate(verdict, GROUP, RUBRIC)
    except InvalidVerdict:
        return
    passing = {c.trajectory.trajectory_id for c in GROUP.passing}
    assert set(grade.candidates) | set(grade.hacks) == passing
    assert not set(grade.candidates) & set(grade.hacks)
    for given_ in grade.candidates.values():
        assert all(type(s) is int and 1 <= s <= 5 for s in given_.scores)
        assert given_.factor in (1.0, 0.9, 0.2) or 0.4 - 1e-9 <= given_.factor <= 0.85 + 1e-9
        if given_.flags or min(given_.scores) <= 2:
            assert given_.evidence


@settings(max_examples=200, deadline=None)
@given(anything)
def test_any_json_gives_a_grade_or_a_reason(data: Any) -> None:
    check(json.dumps(data))


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=80), st.integers(0, len(TEXT)).map(lambda cut: TEXT[:cut])))
def test_any_text_gives_a_grade_or_a_reason(text: str) -> None:
    check(text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 5)] * 5), min_size=4, max_size=4))
def test_the_rubrics_own_ranking_is_always_valid(scored: list[tuple[int, ...]]) -> None:
    judged = {
        c.label: CandidateVerdict(evidence=["turn:1"], reasons=WHY, flags=[], scores=list(s))
        for c, s in zip(GROUP.passing, scored, strict=True)
    }
    grade = grade_of(render_verdict(compose_verdict(judged, RUBRIC)))
    by_factor = sorted(grade.candidates.values(), key=lambda c: -c.factor)
    tiers = [c.tier.value for c in by_factor]
    assert tiers == sorted(tiers)


def test_a_dimension_that_is_left_out_moves_neither_tier_nor_w_and_stays_on_record() -> None:
    """(1,4,5,4,4) is T3 for its approach; with that as 5 all are at least 4: T1, W 1.5 + 1.0 + 1.0 + .6 + .4 = 4.5."""
    answer = parse_judgement({"candidate": C, **one(1, 4, 5, 4, 4, evidence=(LINE,))})
    assert judge_candidate(answer, OF_C, RUBRIC).tier is Tier.T3
    judged = judge_candidate(answer, OF_C, RubricConfig(left_out=("approach",)))
    assert (judged.tier, judged.scores) == (Tier.T1, (1, 4, 5, 4, 4))
    assert judged.weighted == pytest.approx(4.5)
    with pytest.raises(InvalidVerdict, match="points at nothing"):
        judge_candidate(parse_judgement(one(1, 4, 5, 4, 4)), OF_C, RubricConfig(left_out=("approach",)))
