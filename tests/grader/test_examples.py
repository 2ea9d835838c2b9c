"""Supervised examples: right by construction, and made by the code that grades in a run."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import jsonschema
import pytest
from grader_parts import grader_config

from configs.schema import MinirepoSource, RubricConfig
from envs.source import make_source
from envs.task import ExpertSource, Split
from grader.client import ScriptedModel
from grader.examples import GraderExample, evaluate_grader, grader_examples, kendall_tau_b
from grader.exchange import GradeRequest, base_state_of
from grader.prompt import Style
from grader.rubric import Tier, weighted_score
from grader.verdict import parse_verdict, validate
from grader.worker import GraderWorker

RUBRIC = RubricConfig()
COUNT = 60


def source(seed: int = 3) -> ExpertSource:
    return make_source("minirepo", MinirepoSource(type="minirepo", groups_per_step=1, seed=seed))


@cache
def examples(style: Style = "compact", split: Split = Split.TRAIN) -> tuple[GraderExample, ...]:
    return tuple(grader_examples(source(), split, COUNT, 11, grader_config(style=style), RUBRIC))


@pytest.mark.parametrize("style", ["compact", "full"])
def test_every_target_is_valid_and_gives_the_labelled_tiers(style: Style) -> None:
    for example in examples(style):
        grade = validate(parse_verdict(example.target), example.group, RUBRIC)
        by_label = {c.label: grade.candidates[c.trajectory.trajectory_id] for c in example.group.passing}
        assert {name: c.tier for name, c in by_label.items()} == {n: lab.tier for n, lab in example.labels.items()}
        assert grade.dropped_citations == 0
        jsonschema.validate(json.loads(example.target), json.loads(example.prompt.schema))


def test_the_ranking_is_by_tier_then_w_with_ties_for_equals() -> None:
    for example in examples():
        key_of = {n: (x.tier.value, -round(weighted_score(x.scores, RUBRIC), 6)) for n, x in example.labels.items()}
        keys = [{key_of[name] for name in tied} for tied in example.ranking]
        assert all(len(key) == 1 for key in keys)
        flat = [next(iter(key)) for key in keys]
        assert flat == sorted(set(flat))


def test_groups_are_mixed_and_of_every_quality() -> None:
    sizes, tiers = Counter[int](), Counter[Tier]()
    for example in examples():
        passing = len(example.group.passing)
        assert 1 <= passing < len(example.group.candidates)
        sizes[len(example.group.candidates)] += 1
        tiers.update(label.tier for label in example.labels.values())
    assert set(sizes) == {4, 5, 6, 7, 8}
    assert all(tiers[tier] > 0.15 * tiers.total() for tier in Tier)


def test_identical_patches_get_identical_scores_and_tie() -> None:
    pairs = 0
    for example in examples():
        place = {name: i for i, tied in enumerate(example.ranking) for name in tied}
        for a in example.group.passing:
            for b in example.group.passing:
                if a.label < b.label and a.transcript.patch == b.transcript.patch:
                    pairs += 1
                    assert example.labels[a.label].scores == example.labels[b.label].scores
                    assert place[a.label] == place[b.label]
    assert pairs > 10


def test_every_citation_of_a_target_is_a_line_the_reader_sees() -> None:
    cited = 0
    for example in examples():
        for label in example.labels.values():
            for reference in label.evidence:
                cited += 1
                assert f"\n{reference} " in example.prompt.user
    assert cited > COUNT


def test_examples_repeat_and_differ_with_the_seed() -> None:
    config = grader_config()
    again = list(grader_examples(source(), Split.TRAIN, 3, 11, config))
    assert [e.target for e in again] == [e.target for e in examples()[:3]]
    assert [e.prompt for e in again] == [e.prompt for e in examples()[:3]]
    other = list(grader_examples(source(), Split.TRAIN, 3, 12, config))
    assert [e.prompt.user for e in other] != [e.prompt.user for e in again]


def test_held_out_examples_come_from_held_out_tasks() -> None:
    held_out = examples("compact", Split.HELDOUT)
    assert {e.group.task.split for e in held_out} == {Split.HELDOUT}
    assert not {e.group.task.statement for e in held_out} & {e.group.task.statement for e in examples()}


async def test_the_prompt_is_the_one_a_run_would_send() -> None:
    """The worker, given the example's trajectories in another order, asks for exactly the example's prompt."""
    example = examples()[0]
    group, seen = example.group, []

    def respond(prompt: str, n: int) -> str:
        seen.append(prompt)
        return example.target

    request = GradeRequest(
        group_id=group.group_id,
        task=group.task,
        base_state=base_state_of(group.task),
        trajectories=tuple(sorted((c.trajectory for c in group.candidates), key=lambda t: t.trajectory_id)),
        order_seed=int(group.group_id.split("-")[1]),
    )
    model = ScriptedModel(respond)
    reply = await GraderWorker(grader_config(), RUBRIC, model=model).grade(
        request, *(c.transcript for c in group.candidates)
    )
    assert seen == [example.prompt.user]
    assert model.schemas == [example.prompt.schema]
    assert reply.grade is not None, reply.detail


def test_messages_are_a_conversation() -> None:
    assert [m["role"] for m in examples()[0].messages] == ["user", "assistant"]
    assert [m["role"] for m in examples("full")[0].messages] == ["system", "user", "assistant"]


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_right_answers_score_full_marks() -> None:
    metrics = evaluate_grader([(e, e.target) for e in examples()])
    assert metrics.groups == COUNT
    assert metrics.validity_rate == 1.0
    assert metrics.tier_agreement == metrics.score_agreement == 1.0
    assert metrics.kendall_tau_b == pytest.approx(1.0)


def test_invalid_answers_are_counted_by_reason() -> None:
    first, second, third, fourth = examples()[:4]
    metrics = evaluate_grader([(first, first.target), (second, "{"), (third, "{}"), (fourth, "[]")])
    assert metrics.validity_rate == 0.25
    assert metrics.invalid == {"not_json": 1, "schema": 2}
    assert metrics.tier_agreement == 1.0


def test_one_grade_for_everybody_agrees_with_no_order() -> None:
    def flat(example: GraderExample) -> str:
        names = list(example.labels)
        one = {"evidence": [], "flags": [], "scores": [4, 4, 4, 4, 4]}
        return json.dumps({"candidates": dict.fromkeys(names, one), "ranking": [names], "hacks": []})

    metrics = evaluate_grader([(e, flat(e)) for e in examples()])
    assert metrics.validity_rate == 1.0
    assert metrics.kendall_tau_b == 0.0
    labels = [label for e in examples() for label in e.labels.values()]
    assert metrics.tier_agreement == pytest.approx(sum(x.tier is Tier.T1 for x in labels) / len(labels))


def test_no_answers_at_all() -> None:
    metrics = evaluate_grader([])
    assert metrics.validity_rate == 0.0
    assert metrics.tier_agreement is None


@pytest.mark.parametrize(
    ("a", "b", "tau"),
    [
        ([0, 1, 2], [0, 1, 2], 1.0),
        ([0, 1, 2], [2, 1, 0], -1.0),
        ([0, 1, 2], [0, 2, 1], 1 / 3),  # two of three pairs agree
        ([0, 0, 1], [0, 0, 1], 1.0),
        ([0, 0, 1], [0, 1, 2], 2 / (2 * 3) ** 0.5),  # two agree, one tied on one side: 2 / sqrt(2 x 3)
        ([0, 0, 0], [0, 1, 2], 0.0),
        ([0], [0], 0.0),
    ],
)
def test_kendall_tau_b(a: list[int], b: list[int], tau: float) -> None:
    assert kendall_tau_b(a, b) == pytest.approx(tau)


# --- the grammar of the engine ----------------------------------------------------------------------------------------


def test_the_grammar_of_structured_outputs_takes_every_target() -> None:
    """Compiled as vLLM compiles it, without white space."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    for example in examples()[:12]:
        grammar = xgrammar.Grammar.from_json_schema(example.prompt.schema, any_whitespace=False, separators=(",", ":"))
        assert _is_grammar_accept_string(grammar, example.target)
        assert not _is_grammar_accept_string(grammar, example.target.replace('"scores":[', '"scores":[9,', 1))
        assert not _is_grammar_accept_string(grammar, example.target.replace(":", ": ", 1))
        assert not _is_grammar_accept_string(grammar, example.target.replace(",", ", ", 1))
