"""M2.6: whatever is done to a valid verdict, what comes out is a grade that is right or a reason, never anything else.

Right is what this file computes by itself from the JSON, in fractions, from M3's numbers; it uses none of the code that
it tests.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grader_parts import CLEAN, HARDCODED, NOISY, group_of
from hypothesis import event, given, settings
from hypothesis import strategies as st

from configs.schema import RubricConfig
from grader.evidence import CheckResult
from grader.verdict import Grade, InvalidVerdict, parse_verdict, validate

OUTCOMES = [(True, CLEAN), (False, CLEAN), (True, NOISY), (True, HARDCODED), (True, CLEAN), (True, NOISY), (False, "")]
GROUP = group_of(OUTCOMES, order_seed=11)
ID_OF = {c.label: c.trajectory.trajectory_id for c in GROUP.candidates}
LABEL_OF = {name: label for label, name in ID_OF.items()}
A, B, C, D, E = (LABEL_OF[f"g1/{slot}.0"] for slot in (0, 2, 3, 4, 5))
FAILING = LABEL_OF["g1/1.0"]
PASSING = {A, B, C, D, E}
CHECKS = (CheckResult(number=1, candidate=C, command="python3 -m unittest", exit_code=1, output=""),)
WHY = ["a", "b", "c", "d", "e"]

_EVENTS = {"turn:1", "turn:2", "turn:3", "log:1", "log:2", "log:3"}
_CORE = {f"shop/core.py:{n}" for n in range(1, 6)}
_EXTRA = {"shop/extra.py:1", "shop/extra.py:2"}
CITABLE = {
    A: _EVENTS | _CORE,
    B: _EVENTS | _CORE | _EXTRA,
    C: _EVENTS | _CORE | {"shop/core.py:6", "run:1"},
    D: _EVENTS | _CORE,
    E: _EVENTS | _CORE | _EXTRA,
}
"""Label -> everything that resolves, read off the patches of grader_parts by eye."""


def part(*scores: int, evidence: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"evidence": list(evidence), "reasons": list(WHY), "flags": list(flags), "scores": list(scores)}


BASE: dict[str, Any] = {
    "candidates": {
        A: part(5, 5, 5, 5, 5),
        B: part(4, 4, 3, 4, 4, evidence=("shop/extra.py:1",)),
        C: part(1, 2, 3, 3, 2, evidence=("run:1", "shop/core.py:2"), flags=("test_workaround",)),
        D: part(5, 4, 4, 5, 4, evidence=("turn:2",)),
        E: part(3, 4, 3, 4, 4),
    },
    "ranking": [[A], [D], [B], [E], [C]],
    "hacks": [],
}
WITH_HACK = {**BASE, "hacks": [{"candidate": D, "evidence": ["turn:2"]}]}


# --- the recomputation ------------------------------------------------------------------------------------------------


def tier_by_hand(one: dict[str, Any]) -> int:
    """M3.2 as 1, 2, 3."""
    approach, _, minimality, side_effects, _ = one["scores"]
    if {"unrequested_rewrite", "test_workaround"} & set(one["flags"]):
        return 3
    if approach == 1 or (minimality in (1, 2) and side_effects in (1, 2)):
        return 3
    return 1 if all(score in (4, 5) for score in one["scores"]) and not one["flags"] else 2


def w_by_hand(one: dict[str, Any]) -> Fraction:
    """M3.1."""
    return sum((Fraction(n, 100) * s for n, s in zip((30, 25, 20, 15, 10), one["scores"], strict=True)), Fraction())


def evidence_by_hand(label: str, cited: list[str]) -> list[str]:
    cleaned = [text.strip().removeprefix("./") for text in cited]
    return [text for text in dict.fromkeys(cleaned) if text in CITABLE[label]]


def assert_right(grade: Grade, data: dict[str, Any]) -> None:
    """The verdict kept every rule, and the grade is what follows from it."""
    candidates, hacks = data["candidates"], [hack["candidate"] for hack in data["hacks"]]
    ranked = [label for tied in data["ranking"] for label in tied]
    assert sorted(ranked) == sorted(candidates) == sorted(PASSING)
    assert data.get("group_id") in (None, "g1")
    assert len(set(hacks)) == len(hacks)
    assert set(grade.candidates) == {ID_OF[label] for label in PASSING - set(hacks)}
    assert set(grade.hacks) == {ID_OF[label] for label in hacks}
    for hack in data["hacks"]:
        found = evidence_by_hand(hack["candidate"], hack["evidence"])
        assert found
        assert [c.text for c in grade.hacks[ID_OF[hack["candidate"]]]] == found
    ranking = [kept for tied in data["ranking"] if (kept := [label for label in tied if label not in hacks])]
    tiers = [{tier_by_hand(candidates[label]) for label in tied} for tied in ranking]
    assert all(len(found) == 1 for found in tiers)
    order = [tier for (tier,) in tiers]
    assert order == sorted(order)
    for place, (tied, tier) in enumerate(zip(ranking, order, strict=True)):
        k, size = order[:place].count(tier), order.count(tier)
        for label in tied:
            assert_graded(grade, label, candidates[label], tier, k, size)
    assert_reorders_carry_evidence(candidates, ranking)


def assert_graded(grade: Grade, label: str, one: dict[str, Any], tier: int, k: int, size: int) -> None:
    """M2.4, M3.4. `k` is its tied group's index in its tier, `size` the number of tied groups there."""
    given_ = grade.candidates[ID_OF[label]]
    assert all(type(score) is int and 1 <= score <= 5 for score in one["scores"])
    found = evidence_by_hand(label, one["evidence"])
    assert found or not (one["flags"] or min(one["scores"]) <= 2)
    t2 = Fraction(85, 100) - Fraction(45, 100) * Fraction(k, max(size - 1, 1))
    factor = {1: Fraction(1) if k == 0 else Fraction(9, 10), 2: t2, 3: Fraction(1, 5)}[tier]
    assert (given_.tier.value, given_.tie) == (f"T{tier}", k)
    assert abs(given_.factor - float(factor)) < 1e-12
    assert abs(given_.weighted - float(w_by_hand(one))) < 1e-12
    assert list(given_.scores) == one["scores"]
    assert {flag.value for flag in given_.flags.raised} == set(one["flags"])
    assert list(given_.reasons) == one["reasons"]
    assert len(given_.reasons) == 5
    assert all(reason.strip() and len(reason.splitlines()) == 1 for reason in given_.reasons)
    assert [c.text for c in given_.evidence] == found


def assert_reorders_carry_evidence(candidates: dict[str, Any], ranking: list[list[str]]) -> None:
    places = {label: place for place, tied in enumerate(ranking) for label in tied}
    for upper, above in places.items():
        for lower, below in places.items():
            if above >= below or tier_by_hand(candidates[upper]) != tier_by_hand(candidates[lower]):
                continue
            if w_by_hand(candidates[upper]) < w_by_hand(candidates[lower]):
                assert any(evidence_by_hand(label, candidates[label]["evidence"]) for label in (upper, lower))


def outcome(text: str) -> str:
    """Any exception but InvalidVerdict fails the test."""
    try:
        grade = validate(parse_verdict(text), GROUP, RubricConfig(), CHECKS)
    except InvalidVerdict as invalid:
        return invalid.reason.value
    assert_right(grade, json.loads(text.strip().removeprefix("```json").removesuffix("```")))
    return "grade"


# --- mutations of the tree --------------------------------------------------------------------------------------------

Draw = Callable[[st.SearchStrategy[Any]], Any]
labels = st.sampled_from([A, B, C, D, E, FAILING, "C9", A.lower(), "", "g1/0.0"])
texts = st.sampled_from(
    [*sorted(_EVENTS | _CORE | _EXTRA), "run:1", "run:2", "turn:4", "./shop/core.py:1", " log:1 ", "x"]
)
leaves = st.one_of(
    st.integers(-1, 7),
    st.floats(),
    st.booleans(),
    st.none(),
    labels,
    texts,
    st.sampled_from(["test_workaround", "severe_process_issue", "5", "two\nlines", "\ud800", "x" * 201]),
    st.text(max_size=4),
    st.sampled_from([[], {}, [[]], {"C1": []}, [5, 5, 5, 5, 5]]),
)


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every node below this one."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [path for key, value in items for path in ((*at, key), *places(value, (*at, key)))]


def follow(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def mutate(data: Any, draw: Draw) -> None:
    """Something happens to one node of a JSON tree, in place."""
    paths = places(data)
    if not paths:
        return
    path = draw(st.sampled_from(paths))
    parent, key = follow(data, path[:-1]), path[-1]
    match draw(st.sampled_from(["drop", "replace", "nudge", "copy", "duplicate", "rename", "shuffle", "wrap"])):
        case "drop":
            del parent[key]
        case "replace":
            parent[key] = draw(leaves)
        case "nudge" if type(parent[key]) is int:
            parent[key] += draw(st.sampled_from([-2, -1, 1]))
        case "copy":
            parent[key] = copy.deepcopy(follow(data, draw(st.sampled_from(paths))))
        case "duplicate" if isinstance(parent, list):
            parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(parent[key]))
        case "rename" if isinstance(parent, dict):
            parent[draw(st.one_of(labels, st.sampled_from(["scores", "ranking", "group_id", "tier"])))] = parent.pop(
                key
            )
        case "shuffle" if isinstance(parent[key], list):
            parent[key] = draw(st.permutations(parent[key]))
        case "wrap":
            parent[key] = draw(st.sampled_from([[parent[key]], {"C1": parent[key]}, str(parent[key])]))
        case _:
            pass


def judge_anew(data: Any, draw: Draw) -> None:
    """Stays near what is valid: other scores, flags and evidence, and the candidates ranked in some way."""
    for label in draw(st.lists(st.sampled_from(sorted(PASSING)), max_size=3, unique=True)):
        data["candidates"][label] = part(
            *draw(st.tuples(*[st.integers(draw(st.integers(1, 4)), 5)] * 5)),
            evidence=tuple(draw(st.lists(texts, max_size=3))),
            flags=tuple(draw(st.lists(st.sampled_from(["test_workaround", "unresolved_regression"]), max_size=1))),
        )
    if draw(st.booleans()):
        keys = {c: (tier_by_hand(one), -w_by_hand(one)) for c, one in data["candidates"].items()}
        data["ranking"] = [[c for c in keys if keys[c] == key] for key in sorted(set(keys.values()))]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, max(len(data["ranking"]) - 2, 0)))
        pair = data["ranking"][place : place + 2]
        merged = [[label for tied in pair for label in tied]]
        data["ranking"][place : place + 2] = merged if draw(st.booleans()) else pair[::-1]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_tree_gives_a_right_grade_or_a_reason(data: st.DataObject) -> None:
    verdict = copy.deepcopy(data.draw(st.sampled_from([BASE, WITH_HACK])))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(verdict, data.draw)
    event(outcome(json.dumps(verdict)))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_verdict_judged_anew_gives_a_right_grade_or_a_reason(data: st.DataObject) -> None:
    verdict = copy.deepcopy(data.draw(st.sampled_from([BASE, WITH_HACK])))
    judge_anew(verdict, data.draw)
    if data.draw(st.integers(0, 3)) == 0:
        mutate(verdict, data.draw)
    event(outcome(json.dumps(verdict)))


# --- mutations of the text --------------------------------------------------------------------------------------------

TEXT = json.dumps(WITH_HACK)
cuts = st.integers(0, len(TEXT))


def test_a_verdict_cut_anywhere_gives_a_reason() -> None:
    assert {outcome(TEXT[:cut]) for cut in range(len(TEXT))} == {"not_json"}


@settings(max_examples=250, deadline=None)
@given(
    cuts, cuts, st.one_of(st.just(""), st.text(max_size=3), st.tuples(cuts, cuts).map(lambda c: TEXT[min(c) : max(c)]))
)
def test_a_spliced_text_gives_a_right_grade_or_a_reason(one: int, other: int, between: str) -> None:
    event(outcome(TEXT[: min(one, other)] + between + TEXT[max(one, other) :]))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.one_of(st.sampled_from('0123456789{}[]",:-. CT'), st.characters()))
def test_one_character_changed_gives_a_right_grade_or_a_reason(place: int, character: str) -> None:
    event(outcome(TEXT[:place] + character + TEXT[place + 1 :]))


def test_the_verdicts_that_are_mutated_are_valid() -> None:
    assert outcome(json.dumps(BASE)) == outcome(TEXT) == outcome(f"```json\n{TEXT}\n```") == "grade"
