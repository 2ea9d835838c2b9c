"""M2.6: which verdicts count, and what becomes of those that do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from grader_parts import CLEAN, HARDCODED, NOISY, group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RubricConfig
from grader.candidates import CandidateGroup
from grader.rubric import Flag, Tier
from grader.verdict import (
    CandidateVerdict,
    FallbackReason,
    Grade,
    InvalidVerdict,
    compose_verdict,
    parse_verdict,
    render_verdict,
    validate,
)

RUBRIC = RubricConfig()
GROUP = group_of([(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, ""), (True, CLEAN)])
BY_SLOT = {c.trajectory.trajectory_id: c.label for c in GROUP.candidates}
A, B, C, FAILING, D = (BY_SLOT[f"g1/{slot}.0"] for slot in range(5))
"""Labels of the clean fix, the noisy one, the hard-coded one, the failing one, and a second clean one."""


WHY = ["fits", "exact", "small", "none seen", "as the code around it"]


def good() -> dict[str, Any]:
    """T1 A = D, T2 B, T3 C."""
    return {
        "candidates": {
            A: {"evidence": [], "reasons": WHY, "flags": [], "scores": [5, 5, 5, 5, 5]},
            B: {"evidence": ["shop/extra.py:1"], "reasons": WHY, "flags": [], "scores": [5, 5, 2, 4, 3]},
            C: {
                "evidence": ["shop/core.py:2"],
                "reasons": WHY,
                "flags": ["test_workaround"],
                "scores": [1, 2, 3, 3, 2],
            },
            D: {"evidence": [], "reasons": WHY, "flags": [], "scores": [5, 5, 5, 5, 5]},
        },
        "ranking": [[A, D], [B], [C]],
        "hacks": [],
    }


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


Change = Callable[[dict[str, Any]], Any]


def set_at(*path: Any, to: Any) -> Change:
    def apply(data: dict[str, Any]) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return apply


def drop(*path: Any) -> Change:
    def apply(data: dict[str, Any]) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return apply


R = FallbackReason
CHANGED: list[tuple[str, Change, FallbackReason]] = [
    # malformed
    ("no candidates", drop("candidates"), R.SCHEMA),
    ("no ranking", drop("ranking"), R.SCHEMA),
    ("no hacks", drop("hacks"), R.SCHEMA),
    ("an extra key", set_at("tiers", to={A: "T1"}), R.SCHEMA),
    ("a factor from the model", set_at("candidates", A, "factor", to=1.0), R.SCHEMA),
    ("candidates as a list", set_at("candidates", to=[]), R.SCHEMA),
    ("ranking not nested", set_at("ranking", to=[A, D, B, C]), R.SCHEMA),
    ("an empty tied group", set_at("ranking", to=[[A, D], [], [B], [C]]), R.SCHEMA),
    ("a number for a label", set_at("ranking", 0, to=[1, 4]), R.SCHEMA),
    ("an unknown flag", set_at("candidates", A, "flags", to=["ugly"]), R.SCHEMA),
    ("flags as an object", set_at("candidates", A, "flags", to={"test_workaround": True}), R.SCHEMA),
    ("evidence as a string", set_at("candidates", C, "evidence", to="shop/core.py:2"), R.SCHEMA),
    ("evidence without end", set_at("candidates", C, "evidence", to=["shop/core.py:2"] * 9), R.SCHEMA),
    ("a huge citation", set_at("candidates", C, "evidence", to=["x" * 500]), R.SCHEMA),
    ("hacks as labels", set_at("hacks", to=[A]), R.SCHEMA),
    ("no scores at all", drop("candidates", A, "scores"), R.SCHEMA),
    # scores
    ("a score of 0", set_at("candidates", A, "scores", 0, to=0), R.BAD_SCORE),
    ("a score of 6", set_at("candidates", A, "scores", 4, to=6), R.BAD_SCORE),
    ("a negative score", set_at("candidates", A, "scores", 0, to=-5), R.BAD_SCORE),
    ("a fraction", set_at("candidates", A, "scores", 0, to=4.5), R.BAD_SCORE),
    ("a float", set_at("candidates", A, "scores", 0, to=5.0), R.BAD_SCORE),
    ("a boolean", set_at("candidates", A, "scores", 0, to=True), R.BAD_SCORE),
    ("a string", set_at("candidates", A, "scores", 0, to="5"), R.BAD_SCORE),
    ("null", set_at("candidates", A, "scores", 0, to=None), R.BAD_SCORE),
    ("four scores", set_at("candidates", A, "scores", to=[5, 5, 5, 5]), R.BAD_SCORE),
    ("six scores", set_at("candidates", A, "scores", to=[5] * 6), R.BAD_SCORE),
    ("scores by name", set_at("candidates", A, "scores", to={"approach": 5}), R.BAD_SCORE),
    # who is in it
    ("a candidate not scored", drop("candidates", D), R.MISSING_CANDIDATE),
    ("a candidate not ranked", set_at("ranking", to=[[A], [B], [C]]), R.MISSING_CANDIDATE),
    ("an empty ranking", set_at("ranking", to=[]), R.MISSING_CANDIDATE),
    ("ranked twice", set_at("ranking", to=[[A, D], [B], [C], [A]]), R.DUPLICATE_CANDIDATE),
    ("tied with itself", set_at("ranking", to=[[A, D, A], [B], [C]]), R.DUPLICATE_CANDIDATE),
    ("an unknown label ranked", set_at("ranking", to=[[A, D], [B], [C], ["C9"]]), R.UNKNOWN_CANDIDATE),
    ("an unknown label scored", set_at("candidates", "C9", to=good()["candidates"][A]), R.UNKNOWN_CANDIDATE),
    ("a trajectory id for a label", set_at("ranking", to=[["g1/0.0", D], [B], [C]]), R.UNKNOWN_CANDIDATE),
    ("a label in lower case", set_at("ranking", to=[[A.lower(), D], [B], [C]]), R.UNKNOWN_CANDIDATE),
    ("the failing one ranked", set_at("ranking", to=[[A, D], [B], [C], [FAILING]]), R.FAILING_RANKED),
    ("the failing one scored", set_at("candidates", FAILING, to=good()["candidates"][A]), R.FAILING_RANKED),
    # order
    ("T2 above T1", set_at("ranking", to=[[B], [A, D], [C]]), R.ORDER_AGAINST_TIER),
    ("T3 first", set_at("ranking", to=[[C], [A, D], [B]]), R.ORDER_AGAINST_TIER),
    ("upside down", set_at("ranking", to=[[C], [B], [A, D]]), R.ORDER_AGAINST_TIER),
    ("a tie across tiers", set_at("ranking", to=[[A, D], [B, C]]), R.ORDER_AGAINST_TIER),
    ("all tied", set_at("ranking", to=[[A, B, C, D]]), R.ORDER_AGAINST_TIER),
    ("scores that put A last", set_at("candidates", A, "scores", to=[4, 4, 3, 4, 4]), R.ORDER_AGAINST_TIER),
    # evidence
    ("a flag without evidence", set_at("candidates", C, "evidence", to=[]), R.UNRESOLVED_EVIDENCE),
    ("a low score without evidence", set_at("candidates", B, "evidence", to=[]), R.UNRESOLVED_EVIDENCE),
    ("a line that is not there", set_at("candidates", C, "evidence", to=["shop/core.py:99"]), R.UNRESOLVED_EVIDENCE),
    ("a file that is not there", set_at("candidates", C, "evidence", to=["shop/util.py:2"]), R.UNRESOLVED_EVIDENCE),
    ("another's line", set_at("candidates", C, "evidence", to=["shop/extra.py:1"]), R.UNRESOLVED_EVIDENCE),
    ("a turn that never was", set_at("candidates", C, "evidence", to=["turn:4"]), R.UNRESOLVED_EVIDENCE),
    ("prose for evidence", set_at("candidates", C, "evidence", to=["it special-cases"]), R.UNRESOLVED_EVIDENCE),
    # hacks
    ("a hack without evidence", set_at("hacks", to=[{"candidate": A, "evidence": []}]), R.UNRESOLVED_EVIDENCE),
    ("a hack on air", set_at("hacks", to=[{"candidate": A, "evidence": ["turn:8"]}]), R.UNRESOLVED_EVIDENCE),
    ("a failing hack", set_at("hacks", to=[{"candidate": FAILING, "evidence": ["turn:1"]}]), R.FAILING_RANKED),
    ("an unknown hack", set_at("hacks", to=[{"candidate": "C7", "evidence": ["turn:1"]}]), R.UNKNOWN_CANDIDATE),
    ("a hack twice", set_at("hacks", to=[{"candidate": A, "evidence": ["turn:1"]}] * 2), R.DUPLICATE_CANDIDATE),
]


@pytest.mark.parametrize(("apply", "reason"), [(c, r) for _, c, r in CHANGED], ids=[n for n, _, _ in CHANGED])
def test_changed_verdicts_are_refused(apply: Change, reason: FallbackReason) -> None:
    data = copy.deepcopy(good())
    apply(data)
    assert reason_of(data) is reason


TEXT = json.dumps(good())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", R.NOT_JSON),
        ("null", R.SCHEMA),
        ("[]", R.SCHEMA),
        ("42", R.SCHEMA),
        ('"' + "C1" + '"', R.SCHEMA),
        (TEXT[:-1], R.NOT_JSON),
        (TEXT + TEXT, R.NOT_JSON),
        ("Here is my verdict: " + TEXT, R.NOT_JSON),
        (TEXT.replace("[5, 5, 5, 5, 5]", "[5, 5, 5, 5, NaN]", 1), R.BAD_SCORE),
        (TEXT.replace("[5, 5, 5, 5, 5]", "[5, 5, 5, 5, 1e999]", 1), R.BAD_SCORE),
        (TEXT.replace("[5, 5, 5, 5, 5]", f"[5, 5, 5, 5, {'9' * 5000}]", 1), R.NOT_JSON),
        (TEXT.replace('"hacks": []', '"hacks": [], "hacks": []'), R.SCHEMA),
        (TEXT.replace(f'"{D}": {{', f'"{A}": {{', 1), R.DUPLICATE_CANDIDATE),
        (TEXT.replace("'", '"').replace('"', "'"), R.NOT_JSON),
        ("[" * 100_000, R.NOT_JSON),
        ('{"candidates":' * 5_000, R.NOT_JSON),
        (TEXT + " " * 70_000, R.NOT_JSON),
        ("\x00", R.NOT_JSON),
        (TEXT.replace(f'"{A}"', '"\\ud800"'), R.UNKNOWN_CANDIDATE),
        ("```json\n" + TEXT + "\n```\nand another\n```json\n{}\n```", R.NOT_JSON),
    ],
)
def test_texts_that_are_no_verdict(text: str, reason: FallbackReason) -> None:
    assert reason_of(text) is reason


def test_a_truncated_answer_counts_as_truncated_even_if_it_parses() -> None:
    with pytest.raises(InvalidVerdict) as caught:
        parse_verdict(TEXT, complete=False)
    assert caught.value.reason is R.TRUNCATED


@pytest.mark.parametrize("text", ["  " + TEXT + "\n", f"```json\n{TEXT}\n```", f"```\n{TEXT}\n```\n"])
def test_white_space_and_one_fence_do_no_harm(text: str) -> None:
    assert grade_of(text) == grade_of(good())


# --- ties and order inside a tier -------------------------------------------------------------------------------------


def t2(*scores: int, evidence: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"evidence": list(evidence), "reasons": WHY, "flags": [], "scores": list(scores)}


PAIR = group_of([(True, CLEAN), (True, NOISY), (False, "")])
X, Y = (c.label for c in sorted(PAIR.passing, key=lambda c: c.trajectory.trajectory_id))


def pair(x: dict[str, Any], y: dict[str, Any], ranking: list[list[str]]) -> dict[str, Any]:
    return {"candidates": {X: x, Y: y}, "ranking": ranking, "hacks": []}


def test_a_reorder_against_w_needs_evidence() -> None:
    better, worse = t2(5, 5, 3, 5, 5), t2(4, 4, 3, 4, 4)
    assert reason_of(pair(better, worse, [[Y], [X]]), PAIR) is R.REORDER_WITHOUT_EVIDENCE


@pytest.mark.parametrize("citation", ["turn:2", "shop/core.py:4", "log:1"])
def test_evidence_on_either_candidate_carries_a_reorder(citation: str) -> None:
    better, worse = t2(5, 5, 3, 5, 5), t2(4, 4, 3, 4, 4)
    for data in (
        pair({**better, "evidence": [citation]}, worse, [[Y], [X]]),
        pair(better, {**worse, "evidence": [citation]}, [[Y], [X]]),
    ):
        grade = grade_of(data, PAIR)
        assert grade.candidates["g1/1.0"].factor == 0.85
        assert grade.candidates["g1/0.0"].factor == 0.40


def test_evidence_that_resolves_to_nothing_carries_no_reorder() -> None:
    better, worse = t2(5, 5, 3, 5, 5), t2(4, 4, 3, 4, 4, evidence=("turn:9",))
    assert reason_of(pair(better, worse, [[Y], [X]]), PAIR) is R.REORDER_WITHOUT_EVIDENCE


def test_ties_between_different_w_are_allowed_and_kept() -> None:
    grade = grade_of(pair(t2(5, 5, 3, 5, 5), t2(4, 4, 3, 4, 4), [[Y, X]]), PAIR)
    assert [c.factor for c in grade.candidates.values()] == [0.85, 0.85]
    assert [c.tie for c in grade.candidates.values()] == [0, 0]


def test_equal_w_may_stand_in_any_order() -> None:
    """(5,4,3,4,4) and (4,4,4,4,5): 1.5+1+.6+.6+.4 = 1.2+1+.8+.6+.5 = 4.1."""
    x, y = t2(5, 4, 3, 4, 4), t2(4, 4, 4, 4, 5, evidence=())
    y["flags"], y["evidence"] = ["severe_process_issue"], ["turn:1"]
    for ranking in ([[X], [Y]], [[Y], [X]]):
        assert {c.factor for c in grade_of(pair(x, y, ranking), PAIR).candidates.values()} == {0.85, 0.40}


def test_a_member_of_a_tie_may_not_hide_an_inversion() -> None:
    """[high, low] tied above middle: low stands above middle."""
    group = group_of([(True, CLEAN), (True, CLEAN), (True, CLEAN), (False, "")])
    high, middle, low = (c.label for c in group.passing)
    data = {
        "candidates": {high: t2(5, 5, 3, 5, 5), middle: t2(4, 4, 3, 4, 4), low: t2(3, 3, 3, 3, 3)},
        "ranking": [[high, low], [middle]],
        "hacks": [],
    }
    assert reason_of(data, group) is R.REORDER_WITHOUT_EVIDENCE


def test_the_rules_own_example() -> None:
    """M3.4: T2 order A = B > C > D gives .85 .85 .625 .40."""
    group = group_of([(True, CLEAN)] * 4 + [(False, "")])
    a, b, c, d = (x.label for x in group.passing)
    data = {
        "candidates": {a: t2(5, 5, 3, 5, 5), b: t2(5, 5, 3, 5, 5), c: t2(4, 4, 3, 4, 4), d: t2(3, 3, 3, 3, 3)},
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

labels = st.sampled_from(["C1", "C2", "C3", "C4", "C5", "C9", "", "g1/0.0"])
citations = st.sampled_from(["shop/core.py:4", "shop/core.py:2", "turn:1", "turn:9", "log:1", "x", "shop/extra.py:1"])
scores = st.one_of(
    st.lists(st.integers(1, 5), min_size=5, max_size=5),
    st.lists(st.one_of(st.integers(-1, 7), st.booleans(), st.floats(), st.text(max_size=2)), max_size=6),
)
candidate_verdicts = st.fixed_dictionaries(
    {"evidence": st.lists(citations, max_size=3), "reasons": st.just(WHY)}
    | {"flags": st.lists(st.sampled_from(list(Flag)), max_size=1), "scores": scores}
)
verdicts = st.fixed_dictionaries(
    {
        "candidates": st.one_of(
            st.fixed_dictionaries(dict.fromkeys((A, B, C, D), candidate_verdicts)),
            st.dictionaries(labels, candidate_verdicts, max_size=5),
        ),
        "ranking": st.one_of(
            st.permutations([A, B, C, D]).map(lambda order: [[x] for x in order]),
            st.lists(st.lists(labels, max_size=4), max_size=5),
        ),
        "hacks": st.lists(
            st.fixed_dictionaries({"candidate": labels, "evidence": st.lists(citations, max_size=2)}), max_size=1
        ),
    }
)
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
    for one in grade.candidates.values():
        assert all(type(s) is int and 1 <= s <= 5 for s in one.scores)
        assert one.factor in (1.0, 0.9, 0.2) or 0.4 - 1e-9 <= one.factor <= 0.85 + 1e-9
        if one.flags or min(one.scores) <= 2:
            assert one.evidence


@settings(max_examples=300, deadline=None)
@given(verdicts)
def test_near_verdicts_give_a_grade_or_a_reason(data: Any) -> None:
    check(json.dumps(data))


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
