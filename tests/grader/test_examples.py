"""Groups with known labels, and the conversations made of them: right by construction, through the code of a run."""

from __future__ import annotations

from collections import Counter
from functools import cache

import jsonschema
import pytest
from grader_parts import grader_config

from configs.schema import GraderConfig, MinirepoSource, RubricConfig
from envs.source import make_source
from envs.task import ExpertSource, Split
from grader.agent import AgentBudget, run_agent
from grader.client import ScriptedModel
from grader.demonstration import Way, answers, demonstrate
from grader.examples import GraderExample, grader_example, grader_examples
from grader.exchange import GradeRequest, base_state_of
from grader.prompt import opening
from grader.rubric import Tier, weighted_score
from grader.tools import Desk
from grader.verdict import parse_json, render_verdict, validate
from grader.worker import GraderWorker
from grader.workspace import Workspace

RUBRIC = RubricConfig()
COUNT = 60


def source(seed: int = 3) -> ExpertSource:
    return make_source("minirepo", MinirepoSource(type="minirepo", groups_per_step=1, seed=seed))


@cache
def examples(split: Split = Split.TRAIN) -> tuple[GraderExample, ...]:
    return tuple(grader_examples(source(), split, COUNT, 11, RUBRIC))


def test_every_verdict_is_valid_and_gives_the_labelled_tiers() -> None:
    for example in examples():
        grade = validate(example.verdict, example.group, RUBRIC)
        by_label = {c.label: grade.candidates[c.trajectory.trajectory_id] for c in example.group.passing}
        assert {name: c.tier for name, c in by_label.items()} == {n: lab.tier for n, lab in example.labels.items()}
        assert grade.dropped_citations == 0


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


def test_groups_can_be_asked_to_be_varied() -> None:
    for number in range(10):
        example = grader_example(source(), Split.HELDOUT, number, 5, group_size=(5, 8), passing=3, ranks=3)
        passing = len(example.group.passing)
        assert 3 <= passing < len(example.group.candidates) <= 8
        assert len({label.scores for label in example.labels.values()}) >= 3


def test_a_script_that_arrives_at_the_clean_patch_is_judged_as_clean() -> None:
    """A rewrite of a module that holds nothing else changes the one line that had to change, and nothing more."""
    twice = 0
    for example in examples():
        clean = {label.scores for label in example.labels.values() if label.strategy.startswith("clean")}
        patches = {c.transcript.patch: example.labels[c.label] for c in example.group.passing}
        for candidate in example.group.passing:
            label = example.labels[candidate.label]
            if label.strategy == "clean":
                twice += "printf" in candidate.transcript.turns[1].action
                assert patches[candidate.transcript.patch].scores in clean
                assert label.tier is Tier.T1
    assert twice > 0


def test_a_citation_names_a_change_that_was_not_needed() -> None:
    cited = 0
    for example in examples():
        clean = next((c.patch for c in example.group.passing if example.labels[c.label].strategy == "clean"), None)
        for candidate in example.group.passing:
            label = example.labels[candidate.label]
            lines = {line.reference: line for line in candidate.patch.changed}
            for reference in label.evidence:
                cited += 1
                assert reference in lines
                if clean is not None:
                    assert (lines[reference].sign, lines[reference].text) not in {
                        (line.sign, line.text) for line in clean.changed if line.path == lines[reference].path
                    }
    assert cited > COUNT


def test_examples_repeat_and_differ_with_the_seed() -> None:
    again = list(grader_examples(source(), Split.TRAIN, 3, 11))
    assert [e.verdict for e in again] == [e.verdict for e in examples()[:3]]
    assert [e.group for e in again] == [e.group for e in examples()[:3]]
    other = list(grader_examples(source(), Split.TRAIN, 3, 12))
    assert [e.group for e in other] != [e.group for e in again]


def test_held_out_examples_come_from_held_out_tasks() -> None:
    held_out = examples(Split.HELDOUT)
    assert {e.group.task.split for e in held_out} == {Split.HELDOUT}
    assert not {e.group.task.statement for e in held_out} & {e.group.task.statement for e in examples()}


# --- conversations ----------------------------------------------------------------------------------------------------


def config(way: Way) -> GraderConfig:
    mode = "single" if way == "single" else "agent"
    return grader_config(mode=mode, scope="candidate" if way == "candidate" else "group")


@pytest.mark.parametrize("way", ["agent", "single"])
async def test_a_conversation_is_what_a_run_would_send(way: Way) -> None:
    """The worker, given the example's trajectories in another order and its answers, has exactly its conversation."""
    for example in examples()[:8]:
        group = example.group
        messages = await _demonstrated(example, way)
        said = [text for role, text in messages if role == "assistant"]
        request = GradeRequest(
            group_id=group.group_id,
            task=group.task,
            base_state=base_state_of(group.task),
            trajectories=tuple(sorted((c.trajectory for c in group.candidates), key=lambda t: t.trajectory_id)),
            order_seed=example.order_seed,
        )
        model = ScriptedModel(lambda told, number, said=said: said[number])  # type: ignore[misc]
        worker = GraderWorker(config(way), RUBRIC, model=model)
        reply = await worker.grade(request, *(c.transcript for c in group.candidates))
        assert model.dialogues[0].messages == messages
        assert reply.grade is not None, reply.detail
        assert reply.verdict == render_verdict(example.verdict)


async def _demonstrated(example: GraderExample, way: Way) -> list[tuple[str, str]]:
    """`demonstrate` starts a loop of its own, so it runs in a thread here."""
    import asyncio

    return await asyncio.to_thread(demonstrate, example, way, config(way), RUBRIC)


def test_one_candidate_is_graded_without_the_others() -> None:
    for example in examples()[:8]:
        messages = demonstrate(example, "candidate", config("candidate"), RUBRIC)
        label = example.group.passing[0].label
        assert messages[0][1].endswith(f"## grade {label}")
        assert parse_json(messages[-1][1]) == {"calls": [{"tool": "verdict", "ranking": [[label]], "hacks": []}]}
        others = {c.label for c in example.group.candidates} - {label}
        assert not any(f"{other} pass" in text or f"{other} fail" in text for other in others for _, text in messages)


def test_the_work_goes_from_the_repository_over_the_patches_to_the_ranking() -> None:
    """M2.2: every patch is read before it is judged, and the order comes last."""
    for example in examples():
        done: list[tuple[str, str]] = []
        for text in answers(example):
            for call in parse_json(text)["calls"]:
                done.append((call["tool"], call.get("path") or call.get("candidate") or ""))
        assert done[0][1].startswith("repo/")
        assert done[-1][0] == "verdict"
        for label in example.labels:
            assert done.index(("read", f"{label}/patch")) < done.index(("judge", label))


async def test_the_grammar_of_structured_outputs_takes_every_answer() -> None:
    """Compiled as vLLM compiles it, without white space; and the calls are valid for the schema that is offered."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    for example in examples()[:10]:
        said = answers(example)
        model = ScriptedModel(lambda told, number, said=said: said[number])  # type: ignore[misc]
        workspace = Workspace.build(example.group, reference_patch=False)
        desk = Desk(workspace, RUBRIC, style="compact", output_chars=4000, checker=None)
        first = opening(workspace, style="compact", prompt_chars=6000)
        dialogue = model.open(system=None, user=first.user, request_id="g/1")
        budget = AgentBudget(turns=len(said) + 1, tokens=10**9, seconds=100.0, answer_tokens=1)
        await run_agent(dialogue, desk, budget, lambda _: None)
        for offer, text in zip(dialogue.offers, said, strict=True):
            grammar = xgrammar.Grammar.from_json_schema(offer.schema, any_whitespace=False, separators=(",", ":"))
            assert _is_grammar_accept_string(grammar, text)
            assert not _is_grammar_accept_string(grammar, text.replace(":", ": ", 1))
            jsonschema.validate(parse_json(text), parse_json(offer.schema))
