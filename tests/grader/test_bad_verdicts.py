"""M1.10, M2.6: no malformed or lying verdict raises or moves an advantage; each is counted under its own reason."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from bad_verdicts import CORPUS, GROUP, TEXT, BadVerdict, bad_request
from grader_parts import grader_config

from configs.schema import AdvantageMode, AlgorithmConfig, RubricConfig
from grader.client import Completion, ScriptedModel
from grader.exchange import GradeReply, accept
from grader.verdict import UNANSWERED, FallbackReason, InvalidVerdict, parse_verdict, validate
from grader.worker import GraderWorker
from orchestrator.credit import credit

RUBRIC = RubricConfig()
OF_THE_VERDICT = set(FallbackReason) - UNANSWERED - {FallbackReason.PROMPT_TOO_LONG}
every_one = pytest.mark.parametrize("bad", CORPUS, ids=[bad.name for bad in CORPUS])


IN_A_CALL = [bad for bad in CORPUS if bad.text.startswith("{") and bad.text.endswith("}") and bad.text != "{}"]
"""Those that can be the arguments of an agent's `verdict` call."""
TAKEN_FROM_A_CALL = {
    "no hacks": None,  # a call may leave them out
    "no candidates": FallbackReason.MISSING_CANDIDATE,  # they may all have been judged before
    "candidates as null": FallbackReason.MISSING_CANDIDATE,
    "a candidate as null": FallbackReason.MISSING_CANDIDATE,
}
"""Where a call is read otherwise than a whole verdict: judgements filed before stand in for what it leaves out."""


async def reply_to(bad: BadVerdict, text: str | None = None, **changes: Any) -> GradeReply:
    """What a real worker replies when its model answers with this, every time."""
    request, transcripts = bad_request()
    said = bad.text if text is None else text
    model = ScriptedModel(
        lambda prompt, n: Completion(text=said, complete=bad.complete, prompt_tokens=1, completion_tokens=1)
    )
    worker = GraderWorker(grader_config(**{"mode": "single", "repair_rounds": 0, **changes}), RUBRIC, model=model)
    return accept(request, await worker.grade(request, *transcripts))


def assert_no_advantage_moved(reply: GradeReply) -> None:
    """Four of five passed, so A = 1/5 and -4/5 (M4.1), whatever the mode of the run."""
    request, _ = bad_request()
    for mode in AdvantageMode:
        given = credit(
            request.trajectories,
            AlgorithmConfig(mode=mode),
            grade=reply.grade,
            fallback_reason=reply.fallback_reason,
        )
        assert not given.graded
        assert given.fallback_reason == reply.fallback_reason
        for t in request.trajectories:
            assert abs(given.rows[t.trajectory_id].advantage - (0.2 if t.passed else -0.8)) <= 1e-12
            assert given.rows[t.trajectory_id].factor is None


def test_the_corpus_covers_every_fault_that_a_verdict_can_have() -> None:
    assert len(CORPUS) >= 70
    assert [name for name, n in Counter(bad.name for bad in CORPUS).items() if n > 1] == []
    assert {bad.reason for bad in CORPUS} == OF_THE_VERDICT


def test_what_the_corpus_changes_is_valid() -> None:
    assert len(validate(parse_verdict(TEXT), GROUP, RUBRIC).candidates) == 4


@every_one
def test_it_is_refused_for_its_own_reason(bad: BadVerdict) -> None:
    with pytest.raises(InvalidVerdict) as caught:
        validate(parse_verdict(bad.text, complete=bad.complete), GROUP, RUBRIC)
    assert caught.value.reason is bad.reason
    assert caught.value.detail.isprintable()
    assert caught.value.detail.isascii()
    assert len(caught.value.detail) <= 1000


@every_one
async def test_the_worker_falls_back_and_the_advantages_stay(bad: BadVerdict) -> None:
    reply = await reply_to(bad)
    assert reply.grade is None
    assert reply.fallback_reason is bad.reason
    assert reply.turns == 1
    assert json.dumps(reply.audit(), ensure_ascii=False).encode()
    assert_no_advantage_moved(reply)


async def test_a_model_that_insists_gets_nowhere() -> None:
    """The repair round ends as the first one did."""
    for bad in CORPUS:
        reply = await reply_to(bad, repair_rounds=1)
        assert (reply.grade, reply.fallback_reason, reply.turns) == (None, bad.reason, 2), bad.name


@pytest.mark.parametrize("repair_rounds", [0, 1])
async def test_an_agent_gets_no_further_with_them(repair_rounds: int) -> None:
    """The same in a call: the tools around it change nothing."""
    assert len(IN_A_CALL) > 140
    for bad in IN_A_CALL:
        text = f'{{"calls":[{{"tool":"verdict",{bad.text[1:]}]}}'
        reply = await reply_to(bad, text, mode="agent", repair_rounds=repair_rounds, budget={"turns": 2})
        reason = TAKEN_FROM_A_CALL.get(bad.name, bad.reason)
        assert (bad.name, reply.fallback_reason) == (bad.name, reason)
        assert (reply.grade is None) == (reason is not None)
        if reason is not None:
            assert_no_advantage_moved(reply)


async def test_the_same_worker_grades_what_is_valid() -> None:
    """Else the tests above would show nothing."""
    reply = await reply_to(BadVerdict(name="valid", text=TEXT, reason=FallbackReason.SCHEMA))
    assert reply.fallback_reason is None
    request, _ = bad_request()
    given = credit(request.trajectories, AlgorithmConfig(), grade=reply.grade, fallback_reason=None)
    assert given.graded
    assert given.rows["g1/2.0"].advantage < given.rows["g1/0.0"].advantage
