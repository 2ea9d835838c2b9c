"""The worker: one group in, one grade or one reason out, whatever the model does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import time
from typing import Any

import pytest
from grader_parts import (
    CLEAN,
    HARDCODED,
    NOISY,
    call,
    grader_config,
    group_of,
    judge,
    ranking_of,
    request_of,
    say,
    work,
)

from configs.schema import JailSandbox, RubricConfig
from envs.jail import JailProvider
from envs.sandbox import CommandResult, ScriptedProvider, ScriptedSandbox
from grader.client import Completion, ScriptedModel
from grader.exchange import accept
from grader.scripted import ScriptedGrader, judge_by_size
from grader.verdict import FallbackReason
from grader.worker import GraderWorker
from infra.errors import EngineError, GraderError, SandboxError

OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)]
GROUP = group_of(OUTCOMES)
R = FallbackReason


def good_answer(order_seed: int = 5) -> str:
    """The whole verdict, as a model without tools writes it."""
    request, transcripts = request_of(OUTCOMES, order_seed=order_seed)
    return ScriptedGrader().reply(request, *transcripts).verdict or ""


def worker(model: Any, **changes: Any) -> GraderWorker:
    provider = changes.pop("provider", None)
    return GraderWorker(grader_config(**changes), RubricConfig(), model=model, provider=provider)


def saying(messages: list[str]) -> ScriptedModel:
    return ScriptedModel(lambda told, n: messages[n])


async def grade(grader: GraderWorker) -> Any:
    request, transcripts = request_of(OUTCOMES)
    reply = accept(request, await grader.grade(request, *transcripts))
    json.dumps(reply.audit())
    assert (reply.grade is None) == (reply.fallback_reason is not None)
    return reply


async def test_good_work_is_a_grade() -> None:
    request, transcripts = request_of(OUTCOMES, submitted_unix_s=time.time() - 2.5)
    model = saying(work(GROUP))
    reply = accept(request, await worker(model).grade(request, *transcripts[::-1]))
    assert reply.fallback_reason is None
    assert reply.grade is not None
    assert {i: c.factor for i, c in reply.grade.candidates.items()} == {"g1/0.0": 1.0, "g1/1.0": 0.85, "g1/2.0": 1.0}
    assert (reply.turns, reply.model, reply.order_seed) == (7, "scripted", 5)
    assert reply.verdict == good_answer()
    assert reply.prompt_tokens > 100
    assert reply.completion_tokens == sum(map(len, work(GROUP)))
    assert 2.5 <= reply.queue_s < 30
    assert 0 <= reply.run_s < 5
    assert reply.cost_usd == 0.0
    (dialogue,) = model.dialogues
    assert dialogue.request_id.startswith("g1/grade0-")
    assert dialogue.messages[0][1].startswith("## task\n")


def raising(error: Exception) -> Any:
    def respond(told: str, n: int) -> str:
        raise error

    return respond


def cut(told: str, n: int) -> Completion:
    return Completion(text='{"calls":[', complete=False, prompt_tokens=1, completion_tokens=1)


WRONG = {
    "bad score": (say(call("verdict", candidates={"C1": {"scores": [6]}}, ranking=[], hacks=[])), R.SCHEMA),
    "order": (say(call("verdict", ranking=ranking_of(GROUP)[::-1], hacks=[])), R.ORDER_AGAINST_TIER),
    "missing": (say(call("verdict", ranking=ranking_of(GROUP)[:1], hacks=[])), R.MISSING_CANDIDATE),
    "another group": (say(call("verdict", ranking=ranking_of(GROUP), hacks=[], group_id="g2")), R.MISMATCH),
    "no hack": (
        say(call("verdict", ranking=ranking_of(GROUP), hacks=[{"candidate": "C1", "evidence": ["turn:99"]}])),
        R.UNRESOLVED_EVIDENCE,
    ),
}


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (cut, R.TRUNCATED),
        (lambda told, n: "I would rather not.", R.NOT_JSON),
        (lambda told, n: "{}", R.SCHEMA),
        (raising(EngineError("the engine was lost")), R.ENGINE_ERROR),
        (raising(GraderError("HTTP 400")), R.ENDPOINT_ERROR),
        (raising(ZeroDivisionError("a fault of ours")), R.GRADER_ERROR),
        (raising(RecursionError()), R.GRADER_ERROR),
    ],
)
@pytest.mark.parametrize("mode", ["agent", "single"])
@pytest.mark.parametrize("scope", ["group", "candidate"])
async def test_faults_are_reasons(respond: Any, reason: FallbackReason, mode: str, scope: str) -> None:
    """M1.10."""
    reply = await grade(worker(ScriptedModel(respond), mode=mode, scope=scope))
    assert reply.fallback_reason is reason
    assert reply.detail


@pytest.mark.parametrize("wrong", list(WRONG))
async def test_an_invalid_verdict_is_told_once(wrong: str) -> None:
    """M2.6, and one repair round."""
    message, reason = WRONG[wrong]
    mended = await grade(worker(saying([*work(GROUP)[:-1], message, work(GROUP)[-1], work(GROUP)[-1]])))
    if reason is not R.SCHEMA:  # that one was answered as a bad call already
        assert mended.turns == 8
    assert mended.grade is not None
    assert mended.verdict == good_answer()
    still = await grade(worker(saying([*work(GROUP)[:-1], *[message] * 30])))
    assert still.fallback_reason is reason
    never = await grade(worker(saying([*work(GROUP)[:-1], *[message] * 30]), repair_rounds=0))
    assert never.fallback_reason is reason
    assert never.turns == still.turns - 1


async def test_the_repair_round_says_what_was_wrong() -> None:
    model = saying([*work(GROUP)[:-1], WRONG["order"][0], work(GROUP)[-1]])
    await grade(worker(model))
    (dialogue,) = model.dialogues
    assert "## error: that is not valid (order_against_tier: " in dialogue.messages[-2][1]
    assert dialogue.offers[-1].names == ("verdict",)


@pytest.mark.parametrize("mode", ["agent", "single"])
async def test_a_slow_model_is_a_timeout(mode: str) -> None:
    model = ScriptedModel(lambda told, n: good_answer(), delay_s=30.0)
    reply = await grade(worker(model, timeout_s=0.1, mode=mode))
    assert reply.fallback_reason is R.TIMEOUT
    assert 0.1 <= reply.run_s < 10


async def test_the_time_of_an_agent_ends_before_that_of_the_group() -> None:
    """What is left is for the answer."""

    def respond(told: str, n: int) -> str:
        bodies = {c.label: judge_by_size(c).model_dump(mode="json") for c in GROUP.passing}
        last = say(call("verdict", candidates=bodies, ranking=ranking_of(GROUP), hacks=[]))
        return last if "verdict now" in told else say(call("read", path="task.md"))

    reply = await grade(worker(ScriptedModel(respond, delay_s=0.05), timeout_s=1.0, budget={"turns": 999}))
    assert reply.grade is not None, reply.detail
    assert 0.7 <= reply.run_s < 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda r, t: (dataclasses.replace(r, base_state="0" * 64), t),
        lambda r, t: (r, t[:-1]),
        lambda r, t: (r, [*t[:-1], t[0]]),
        lambda r, t: (dataclasses.replace(r, group_id="g2"), t),
    ],
)
async def test_what_does_not_belong_together_is_never_sent(change: Any) -> None:
    request, transcripts = change(*request_of(OUTCOMES))
    model = saying([])
    reply = await worker(model).grade(request, *transcripts)
    assert reply.fallback_reason is R.MISMATCH
    assert not model.dialogues


async def test_no_more_groups_at_once_than_configured() -> None:
    request, transcripts = request_of(OUTCOMES)
    busy = most = 0

    class Slow(ScriptedModel):
        def open(self, **kwargs: Any) -> Any:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            return super().open(**kwargs)

    def respond(told: str, n: int) -> str:
        nonlocal busy
        busy -= 1
        return good_answer()

    grader = worker(Slow(respond, delay_s=0.05), groups_per_worker=2, mode="single")
    replies = await asyncio.gather(*(grader.grade(request, *transcripts) for _ in range(6)))
    assert all(r.grade for r in replies)
    assert most == 2
    assert max(r.queue_s for r in replies) >= 0.09


# --- one prompt, no tools ---------------------------------------------------------------------------------------------


async def test_a_single_prompt_is_answered_with_the_whole_verdict() -> None:
    model = saying([good_answer()])
    reply = await grade(worker(model, mode="single"))
    assert reply.grade is not None
    assert (reply.turns, reply.verdict) == (1, good_answer())
    (offer,) = model.dialogues[0].offers
    assert json.loads(offer.schema)["required"] == ["candidates", "ranking", "hacks"]
    assert not offer.tools


async def test_a_single_prompt_has_a_repair_round() -> None:
    model = saying(["{}", good_answer()])
    reply = await grade(worker(model, mode="single"))
    assert reply.grade is not None
    assert reply.turns == 2
    assert "not valid (schema: candidates: Field required)" in model.dialogues[0].messages[-2][1]
    none = await grade(worker(saying(["{}", good_answer()]), mode="single", repair_rounds=0))
    assert (none.fallback_reason, none.turns) == (R.SCHEMA, 1)
    twice = await grade(worker(saying(["{}", "{}", good_answer()]), mode="single"))
    assert (twice.fallback_reason, twice.turns) == (R.SCHEMA, 2)


# --- candidates by themselves -----------------------------------------------------------------------------------------


def alone(told: str, n: int) -> str:
    """Grades the one candidate that it was shown."""
    (label,) = [word for line in told.split("\n") if line.startswith("## grade ") for word in line.split()[2:]]
    subject = next(c for c in GROUP.passing if c.label == label)
    last = say(call("verdict", ranking=[[label]], hacks=[]))
    return [say(call("read", path=f"{label}/patch")), say(judge(subject)), last][n]


async def test_candidates_can_be_graded_by_themselves() -> None:
    """The rubric ranks them then (M3.3), and the group's ties and factors are as ever."""
    model = ScriptedModel(alone)
    reply = await grade(worker(model, scope="candidate"))
    assert reply.grade is not None, reply.detail
    assert {i: c.factor for i, c in reply.grade.candidates.items()} == {"g1/0.0": 1.0, "g1/1.0": 0.85, "g1/2.0": 1.0}
    assert reply.turns == 9
    assert json.loads(reply.verdict or "") == json.loads(good_answer())
    assert len(model.dialogues) == 3
    for dialogue in model.dialogues:
        told = dialogue.messages[0][1]
        assert sum(f"\n{c.label} " in told for c in GROUP.candidates) == 1


async def test_candidates_are_graded_at_the_same_time() -> None:
    started_s = time.monotonic()
    reply = await grade(worker(ScriptedModel(alone, delay_s=0.2), scope="candidate"))
    assert reply.grade is not None
    assert time.monotonic() - started_s < 1.2  # 1.8 one after the other


async def test_one_candidate_that_cannot_be_graded_costs_the_group() -> None:
    def respond(told: str, n: int) -> str:
        if "## grade C2" in told:
            raise EngineError("lost")
        return alone(told, n)

    assert GROUP.candidates[1].passed
    reply = await grade(worker(ScriptedModel(respond), scope="candidate"))
    assert reply.fallback_reason is R.ENGINE_ERROR


# --- checks -----------------------------------------------------------------------------------------------------------


def provider_of(respond: Any) -> ScriptedProvider:
    def answer(command: str) -> CommandResult:
        if "unittest" in command:
            return respond(command)
        return CommandResult(output="", exit_code=0, timed_out=False, duration_s=0.0)

    return ScriptedProvider(lambda: ScriptedSandbox(answer))


def passes(command: str) -> CommandResult:
    return CommandResult(output="OK", exit_code=0, timed_out=False, duration_s=0.1)


def lost(command: str) -> CommandResult:
    raise SandboxError("gone")


CHECK = say(call("run", candidate="C1", command="python3 -m unittest"))


@pytest.mark.parametrize("style", ["compact", "full"])
async def test_checks_are_run_and_recorded(style: str) -> None:
    provider = provider_of(passes)
    reply = await grade(worker(saying([CHECK, *work(GROUP)]), provider=provider, style=style))
    assert reply.grade is not None
    assert [(c.number, c.candidate, c.exit_code) for c in reply.checks] == [(1, "C1", 0)]
    assert [s.closed for s in provider.started] == [True]


@pytest.mark.parametrize(
    ("messages", "respond", "reason"),
    [
        ([CHECK, "no", "no", "no"], passes, R.NOT_JSON),
        ([CHECK, *work(GROUP)], lost, None),
        ([CHECK, CHECK, CHECK, *work(GROUP)], lost, None),
    ],
)
async def test_sandboxes_are_closed_whatever_happens(messages: list[str], respond: Any, reason: Any) -> None:
    provider = provider_of(respond)
    reply = await grade(worker(saying(messages), provider=provider))
    assert reply.fallback_reason is reason
    assert provider.started
    assert all(s.closed for s in provider.started)


async def test_sandboxes_are_closed_at_a_timeout() -> None:
    provider = provider_of(passes)

    class Slow(ScriptedModel):
        def open(self, **kwargs: Any) -> Any:
            self.delay_s = 0.0
            return super().open(**kwargs)

    def respond(told: str, n: int) -> str:
        model.delay_s = 30.0
        return CHECK

    model = Slow(respond)
    reply = await grade(worker(model, provider=provider, timeout_s=0.5))
    assert reply.fallback_reason is R.TIMEOUT
    assert [s.closed for s in provider.started] == [True]


async def test_no_sandbox_where_no_checks_are_wanted() -> None:
    model = saying([CHECK, *work(GROUP)])
    provider = provider_of(passes)
    reply = await grade(worker(model, provider=provider, checks={"enabled": False}))
    assert reply.grade is not None
    assert not reply.checks
    assert not provider.started
    assert "## error: no commands can be run here" in model.dialogues[0].messages[2][1]


async def test_checks_run_in_a_sandbox_as_the_rollouts_do() -> None:
    """`grader.sandbox: null`; where nobody names a sandbox, or nothing can be run, there is none."""
    with_checks, without = grader_config(), grader_config(checks={"enabled": False})
    for config, sandbox, kind in (
        (with_checks, JailSandbox(), JailProvider),
        (with_checks, None, type(None)),
        (without, JailSandbox(), type(None)),
        (grader_config(mode="single"), JailSandbox(), type(None)),
    ):
        grader = GraderWorker(config, RubricConfig(), model=saying([]), sandbox=sandbox)
        assert type(grader._provider) is kind
        await grader.close()


# --- the second pass --------------------------------------------------------------------------------------------------


def hunting(*passes: bool, slot: int = 2, stand: bool = True) -> ScriptedModel:
    """In its n-th dialogue it calls the trajectory of `slot` a hack if `passes[n]`; without `stand` on top."""

    def respond(told: str, n: int) -> str:
        number = len(model.dialogues) - 1
        seed = 5 if number == 0 else ANOTHER_SEED
        group = group_of(OUTCOMES, order_seed=seed)
        accused = next(c for c in group.passing if c.trajectory.trajectory_id == f"g1/{slot}.0")
        hacks = [{"candidate": accused.label, "evidence": ["turn:2"]}] if passes[number] else []
        messages = work(group, hacks=hacks)
        if hacks and not stand:
            ranking = [[accused.label], *([x for x in t if x != accused.label] for t in ranking_of(group))]
            messages[-1] = say(call("verdict", ranking=[t for t in ranking if t], hacks=hacks))
        return messages[n]

    model = ScriptedModel(respond)
    return model


ANOTHER_SEED = random.Random(5).getrandbits(31)


async def test_a_hack_that_both_passes_find_counts() -> None:
    """M1.5."""
    model = hunting(True, True)
    reply = await grade(worker(model, second_pass=True))
    assert reply.grade is not None, reply.detail
    assert list(reply.grade.hacks) == ["g1/2.0"]
    assert len(model.dialogues) == 2
    assert reply.turns == 14
    assert reply.detail == ""
    first, second = (d.messages[0][1] for d in model.dialogues)
    assert first != second


async def test_a_hack_that_only_one_pass_finds_is_dropped() -> None:
    reply = await grade(worker(hunting(True, False), second_pass=True))
    assert reply.grade is not None
    assert not reply.grade.hacks
    assert {i: c.factor for i, c in reply.grade.candidates.items()} == {"g1/0.0": 1.0, "g1/1.0": 0.85, "g1/2.0": 1.0}
    assert reply.detail == "the second pass did not confirm a hack: g1/2.0"


async def test_a_dropped_hack_is_ranked_by_the_rubric_where_it_cannot_stand() -> None:
    """Ranked first, below none, although it is T2: as a hack that said nothing, as a candidate it is against M2.6."""
    reply = await grade(worker(hunting(True, False, slot=1, stand=False), second_pass=True))
    assert reply.grade is not None, reply.detail
    assert {i: c.factor for i, c in reply.grade.candidates.items()} == {"g1/0.0": 1.0, "g1/1.0": 0.85, "g1/2.0": 1.0}


async def test_no_second_pass_without_a_hack_or_where_it_is_not_wanted() -> None:
    model = hunting(False)
    assert (await grade(worker(model, second_pass=True))).turns == 7
    reply = await grade(worker(hunting(True)))
    assert list(reply.grade.hacks) == ["g1/2.0"]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (EngineError("lost"), "engine_error"),
        (GraderError("HTTP 400"), "endpoint_error"),
        (ZeroDivisionError("a fault of ours"), "grader_error"),
        (None, "timeout"),
        ("no", "not_json"),
    ],
)
async def test_a_second_pass_that_fails_confirms_nothing(fault: Any, why: str) -> None:
    model = hunting(True, True)
    respond = model.respond

    def failing(told: str, n: int) -> Any:
        if len(model.dialogues) == 1:
            if n == 6 and fault is None:
                model.delay_s = 30.0
            return respond(told, n)
        if isinstance(fault, Exception):
            raise fault
        return fault or "never said"

    model.respond = failing
    reply = await grade(worker(model, second_pass=True, timeout_s=3.0))
    assert reply.grade is not None, reply.detail
    assert not reply.grade.hacks
    assert reply.detail == f"the second pass did not confirm a hack ({why}): g1/2.0"


async def test_candidates_by_themselves_can_be_hacks_too() -> None:
    def respond(told: str, n: int) -> str:
        message = alone(told, n)
        label = json.loads(say(*json.loads(message)["calls"]))["calls"][0].get("ranking", [["-"]])[0][0]
        if label != GROUP.passing[0].label:
            return message
        return say(call("verdict", ranking=[[label]], hacks=[{"candidate": label, "evidence": ["turn:1"]}]))

    reply = await grade(worker(ScriptedModel(respond), scope="candidate"))
    assert list(reply.grade.hacks) == [GROUP.passing[0].trajectory.trajectory_id]


# --- more candidates than the model's context holds -------------------------------------------------------------------

MANY = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)] * 4
"""16 candidates, 12 of them passing."""


def playing(limit_tokens: int | None, *, hacks: bool = False) -> ScriptedModel:
    """Does its work on whatever candidates the first message asks about; one token a character."""
    group = group_of(MANY)

    def respond(told: str, n: int) -> str:
        asked = re.findall("C[0-9]+", told.partition("## grade ")[2].partition("\n")[0])
        part = dataclasses.replace(group, candidates=tuple(c for c in group.candidates if c.label in asked))
        found = [{"candidate": asked[0], "evidence": ["turn:1"]}] if hacks else []
        return work(part, hacks=found)[n]

    return ScriptedModel(respond, limit_tokens=limit_tokens)


async def graded_many(model: ScriptedModel, **changes: Any) -> Any:
    request, transcripts = request_of(MANY)
    return accept(request, await worker(model, **changes).grade(request, *transcripts))


async def test_what_the_context_does_not_hold_is_graded_in_parts() -> None:
    """M1.10: it costs no fallback, and no candidate is judged whose patch was never shown."""
    whole = await graded_many(playing(None))
    assert whole.grade is not None, whole.detail
    model = playing(5000)
    reply = await graded_many(model)
    assert reply.grade is not None, reply.detail
    assert reply.grade == whole.grade
    asked = [re.findall("C[0-9]+", d.messages[0][1].partition("## grade ")[2]) for d in model.dialogues]
    assert len(asked[0]) == 12 and len(asked) > 2
    assert sorted(name for part in asked[1:] for name in part) == sorted(asked[0])
    assert all(dialogue.length() <= 5000 + 400 for dialogue in model.dialogues)
    failing = [c.label for c in group_of(MANY).candidates if not c.passed]
    for dialogue in model.dialogues:
        assert all(f"{name} fail" in dialogue.messages[0][1] for name in failing), "they stay as context"
    assert len({dialogue.request_id for dialogue in model.dialogues}) == len(model.dialogues)


async def test_parts_of_parts_where_even_less_fits() -> None:
    whole = await graded_many(playing(None))
    reply = await graded_many(playing(3400))
    assert reply.grade is not None, reply.detail
    assert reply.grade == whole.grade


async def test_each_part_can_find_a_hack() -> None:
    """M1.5."""
    model = playing(5000, hacks=True)
    reply = await graded_many(model)
    assert reply.grade is not None, reply.detail
    assert len(reply.grade.hacks) == len(model.dialogues) - 1


async def test_a_budget_is_not_stretched_by_parts() -> None:
    """At the end of a configured budget the model answers with what it has (M2.1)."""
    model = playing(None)
    reply = await graded_many(model, budget={"tokens": 5000})
    assert reply.grade is None
    assert len(model.dialogues) == 1


async def test_one_candidate_that_does_not_fit_ends_in_an_answer() -> None:
    """There is nothing left to be divided."""
    model = playing(1700)
    await graded_many(model)
    assert max(len(d.offers) for d in model.dialogues[-2:]) <= 3
    assert all(json.loads(d.offers[-1].schema) for d in model.dialogues)
