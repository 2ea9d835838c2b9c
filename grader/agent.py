"""The grader's loop: ask the model for calls, carry them out, tell it what they gave, until the verdict (M2.1).

What the model may call, and what a call answers, is the desk's business (`grader.tools`); the conversation is the
dialogue's (`grader.client`). Here are the budgets, and what happens to messages that are no calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grader.client import Completion, Dialogue, Result
from grader.endpoint import NativeCall
from grader.offers import MAX_CALLS
from grader.prompt import Style
from grader.quoting import one_line
from grader.tools import Call, Desk
from grader.verdict import FallbackReason, InvalidVerdict, Verdict, parse_json

_CLOSING_TOKENS = 80
"""Room kept for telling the model that it must answer now."""
_CLOSING_CALLS = ("judge", "verdict")
_CLOSING: dict[Style, str] = {
    "compact": "## verdict now",
    "full": "The budget is used up. Answer now with the verdict call, with what you have.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBudget:
    """What one grading may use up. At the end of any of the three the model must answer with what it has."""

    turns: int
    """Answers of the model, the verdict included."""
    tokens: int
    """Length of the conversation, answers included."""
    seconds: float
    """From the first question on; what is under way is finished."""
    answer_tokens: int
    """The most that one answer can take: kept free for the last one."""

    def room(self, dialogue: Dialogue, results: Sequence[Result] = ()) -> int:
        """Tokens that would be left if these results were told and then answered; negative: they do not fit."""
        limits = [self.tokens - self.answer_tokens]
        if dialogue.limit_tokens is not None:
            limits.append(dialogue.limit_tokens)
        return min(limits) - dialogue.length(results)


class ContextSpent(InvalidVerdict):
    """The model's context was full before every candidate was judged. Nothing was asked about the others: a verdict
    on patches that were never shown would be a guess."""

    def __init__(self, judged: int, passing: int) -> None:
        super().__init__(
            FallbackReason.PROMPT_TOO_LONG, f"the context was full when {judged} of {passing} candidates were judged"
        )
        self.judged = judged


async def run_agent(
    dialogue: Dialogue, desk: Desk, budget: AgentBudget, on_completion: Callable[[Completion], None]
) -> Verdict:
    """The model's verdict, assembled by the desk, not validated yet.

    A message that is no calls is answered with what is wrong with it, and costs a turn.

    Args:
        on_completion: is given every answer of the model as it comes.

    Raises:
        ContextSpent: the model's context (not the budget) ended the work on several candidates.
        InvalidVerdict: two unusable messages in a row, or no verdict although nothing else could be answered.
        EngineError, GraderError: see `Dialogue.ask`; ContextFullError if not even the question for the verdict fits.
    """
    ends_s = time.monotonic() + budget.seconds
    keep = budget.answer_tokens + _CLOSING_TOKENS  # for one more answer like this one, and the last one's question
    final = budget.turns == 1 or budget.room(dialogue) < keep
    before: InvalidVerdict | None = None
    for turn in range(1, budget.turns + 1):
        results, fault = await _step(dialogue, desk, final, on_completion)
        if desk.verdict is not None:
            return desk.verdict
        if final or (fault and before):
            raise fault or _no_verdict(results)
        before = fault
        _check_context(dialogue, desk, results, keep)
        final = turn + 1 == budget.turns or time.monotonic() >= ends_s or budget.room(dialogue, results) < keep
        if final:
            if budget.room(dialogue, results) < _CLOSING_TOKENS:
                results = [
                    Result(text=_error(desk, "no room is left for this"), call_id=r.call_id) for r in results[:1]
                ]
            results = [*results, Result(text=_CLOSING[desk.style])]
        dialogue.tell(results)
    raise AssertionError("unreachable: the last turn returns or raises")


def _check_context(dialogue: Dialogue, desk: Desk, results: Sequence[Result], keep: int) -> None:
    """Raises ContextSpent where the work can go on only in other conversations, about fewer candidates each."""
    limit, passing = dialogue.limit_tokens, len(desk.workspace.group.passing)
    if limit is None or limit - dialogue.length(results) >= keep:
        return
    if len(desk.judgements) < passing and passing > 1:
        raise ContextSpent(len(desk.judgements), passing)


async def answer_again(
    dialogue: Dialogue, desk: Desk, problem: str, on_completion: Callable[[Completion], None]
) -> Verdict:
    """The verdict once more, after the model was told what was wrong with its last one.

    Raises:
        InvalidVerdict: the answer holds no verdict.
        EngineError, GraderError: see `Dialogue.ask`.
    """
    desk.verdict = None
    dialogue.tell([Result(text=_error(desk, problem)), Result(text=_CLOSING[desk.style])])
    results, fault = await _step(dialogue, desk, True, on_completion)
    if desk.verdict is None:
        raise fault or _no_verdict(results)
    return desk.verdict


def _error(desk: Desk, message: str) -> str:
    head = "## " if desk.style == "compact" else ""
    return f"{head}error: {one_line(message)}"


def _no_verdict(results: Sequence[Result]) -> InvalidVerdict:
    """What the last call was told says why, with the reason in front if it came from the validation."""
    said = results[-1].text.removeprefix("## ").removeprefix("error: ")
    reason = next((r for r in FallbackReason if said.startswith(f"{r.value}: ")), None)
    if reason is None:
        return InvalidVerdict(FallbackReason.SCHEMA, f"no verdict: {said}")
    return InvalidVerdict(reason, said.removeprefix(f"{reason.value}: "))


async def _step(
    dialogue: Dialogue, desk: Desk, final: bool, on_completion: Callable[[Completion], None]
) -> tuple[list[Result], InvalidVerdict | None]:
    """One answer of the model and what its calls gave, in order; with what was wrong if none of it could be used."""
    completion = await dialogue.ask(desk.offer(final))
    on_completion(completion)
    try:
        calls = _calls_of(completion)
    except InvalidVerdict as error:
        told = _error(desk, str(error))
        return [Result(text=told, call_id=c.call_id) for c in completion.calls] or [Result(text=told)], error
    results: list[Result] = []
    fault: InvalidVerdict | None = None
    for call in calls[:MAX_CALLS]:
        if isinstance(call, _BadCall):
            fault = call.fault
            text = _error(desk, str(fault))
        elif final and call.tool not in _CLOSING_CALLS:
            text = _error(desk, f"no time is left for {call.tool}")
        else:
            text = await desk.execute(call)
        results.append(Result(text=text, call_id=call.call_id))
        if desk.verdict is not None:
            break
    if len(calls) > MAX_CALLS:
        results.append(Result(text=_error(desk, f"only the first {MAX_CALLS} calls of a message are carried out")))
    return results, fault if all(isinstance(call, _BadCall) for call in calls) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BadCall:
    """A native call that could not be read."""

    call_id: str
    fault: InvalidVerdict


def _calls_of(completion: Completion) -> list[Call | _BadCall]:
    """The calls of a message, native ones or those of a JSON object {"calls":[{"tool":...,...}]}.

    Raises:
        InvalidVerdict: the message holds none that can be read.
    """
    if not completion.complete:
        raise InvalidVerdict(FallbackReason.TRUNCATED, "the message was cut at its token limit")
    if completion.calls:
        return [_native(call) for call in completion.calls]
    if not completion.text.strip():
        raise InvalidVerdict(FallbackReason.NOT_JSON, "the message is empty")
    data = parse_json(completion.text)
    items = data.get("calls") if isinstance(data, dict) else None
    if not isinstance(items, list) or not items:
        raise InvalidVerdict(FallbackReason.SCHEMA, 'a message is {"calls":[{"tool":...}]}, with one call or more')
    if not all(isinstance(item, dict) and isinstance(item.get("tool"), str) for item in items):
        raise InvalidVerdict(FallbackReason.SCHEMA, 'every call is an object with a "tool"')
    return [
        Call(tool=item["tool"], arguments={key: item[key] for key in item if key != "tool"}, call_id=None)
        for item in items
    ]


def _native(call: NativeCall) -> Call | _BadCall:
    try:
        arguments = parse_json(call.arguments or "{}")
    except InvalidVerdict as error:
        return _BadCall(call_id=call.call_id, fault=error)
    if not isinstance(arguments, dict):
        fault = InvalidVerdict(FallbackReason.SCHEMA, "the arguments are no JSON object")
        return _BadCall(call_id=call.call_id, fault=fault)
    return Call(tool=call.name, arguments=arguments, call_id=call.call_id)
