"""The agent's loop (M2.1): calls are carried out in order, budgets end in an answer, nonsense is answered."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from grader_parts import CLEAN, HARDCODED, NOISY, call, group_of, judge, ranking_of, say, work

from configs.schema import RubricConfig
from envs.sandbox import CommandResult, ScriptedProvider, ScriptedSandbox
from grader.agent import AgentBudget, answer_again, run_agent
from grader.checks import Checker
from grader.client import Completion, Result, ScriptedDialogue, ScriptedModel
from grader.endpoint import NativeCall
from grader.prompt import Style, opening
from grader.tools import Call, Desk
from grader.verdict import FallbackReason, InvalidVerdict, Verdict, validate
from grader.workspace import Workspace
from infra.errors import SandboxError

R = FallbackReason
OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)]
GROUP = group_of(OUTCOMES)
PASSING = [c.label for c in GROUP.passing]


class Bench:
    """One grading of GROUP by a scripted model."""

    def __init__(
        self,
        answers: Sequence[str | Completion] | Callable[[str, int], str | Completion],
        *,
        style: Style = "full",
        checker: Checker | None = None,
        **budget: Any,
    ) -> None:
        respond = answers if callable(answers) else lambda told, n: answers[n]
        workspace = Workspace.build(GROUP, reference_patch=False)
        first = opening(workspace, style=style, prompt_chars=6000)
        self.model = ScriptedModel(respond, delay_s=budget.pop("delay_s", 0.0))
        self.dialogue: ScriptedDialogue = self.model.open(system=first.system, user=first.user, request_id="g1/grade")
        self.desk = Desk(workspace, RubricConfig(), style=style, output_chars=2000, checker=checker)
        limits = {"turns": 24, "tokens": 1_000_000, "seconds": 60.0, "answer_tokens": 400, **budget}
        self.budget = AgentBudget(**limits)
        self.seen: list[Completion] = []

    async def run(self) -> Verdict:
        return await run_agent(self.dialogue, self.desk, self.budget, self.seen.append)

    async def fails(self) -> InvalidVerdict:
        with pytest.raises(InvalidVerdict) as caught:
            await self.run()
        return caught.value

    def told(self, number: int) -> str:
        """What the model was told after its answer `number`, counted from 0."""
        answers = [i for i, (role, _) in enumerate(self.dialogue.messages) if role == "assistant"]
        end = [*answers, len(self.dialogue.messages)][number + 1]
        return "\n".join(text for _, text in self.dialogue.messages[answers[number] + 1 : end])


@pytest.mark.parametrize("style", ["compact", "full"])
async def test_it_reads_judges_and_ranks(style: Style) -> None:
    """M2.2, and the verdict is what was judged on the way."""
    bench = Bench(work(GROUP), style=style)
    verdict = await bench.run()
    grade = validate(verdict, GROUP, RubricConfig(), bench.desk.checks)
    assert list(verdict.candidates) == PASSING
    assert sorted(grade.candidates) == ["g1/0.0", "g1/1.0", "g1/2.0"]
    assert len(bench.seen) == 2 * len(PASSING) + 1
    assert "result += item" in bench.told(0) or "return 3" in bench.told(0)
    assert f"judged {PASSING[0]}: T" in bench.told(1)
    assert f"order: {json.dumps(ranking_of(GROUP), separators=(',', ':'))}" in bench.told(2 * len(PASSING) - 1)
    roles = [role for role, _ in bench.dialogue.messages if role != "system"]
    assert roles == ["user", "assistant"] * len(bench.seen)


async def test_the_conversation_only_grows() -> None:
    """The prefix cache depends on it."""
    seen: list[str] = []
    messages = work(GROUP)

    def respond(told: str, n: int) -> str:
        seen.append(told)
        return messages[n]

    await Bench(respond).run()
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))


async def test_calls_of_one_message_are_carried_out_in_order() -> None:
    judged = [judge(candidate) for candidate in GROUP.passing]
    bench = Bench([say(call("list"), call("read", path="task.md"), *judged[:2]), *work(GROUP)[-2:]])
    await bench.run()
    told = bench.told(0)
    places = [told.index(t) for t in ("repo/", "returns -3", f"judged {PASSING[0]}", f"judged {PASSING[1]}")]
    assert places == sorted(places)


async def test_nothing_is_carried_out_after_the_verdict() -> None:
    last = json.loads(work(GROUP)[-1])["calls"]
    bench = Bench([say(*map(judge, GROUP.passing)), say(*last, call("read", path="task.md"))])
    await bench.run()
    assert "task.md" not in bench.desk._read


async def test_only_the_first_calls_of_a_message_are_carried_out() -> None:
    bench = Bench([say(*[call("read", path=f"C{i}/patch") for i in (1, 2, 3, 4, 1, 2)]), *work(GROUP)])
    await bench.run()
    assert bench.told(0).count("<data ") == 4
    assert bench.told(0).endswith("error: only the first 4 calls of a message are carried out")


# --- what the model gets wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("I would rather not.", "not_json"),
        ("", "empty"),
        ("[]", "a message is"),
        ('{"calls":[]}', "a message is"),
        ('{"calls":{}}', "a message is"),
        ('{"calls":[7]}', 'every call is an object with a "tool"'),
        ('{"calls":[{"tool":7}]}', 'every call is an object with a "tool"'),
        ('{"calls":[{"tool":"list","tool":"run"}]}', "repeated"),
        ("[" * 5000, "not_json"),
        (Completion(text='{"calls":[{"to', complete=False, prompt_tokens=1, completion_tokens=1), "token limit"),
    ],
)
async def test_a_message_that_is_no_calls_is_told_so(message: str | Completion, said: str) -> None:
    bench = Bench([message, *work(GROUP)])
    verdict = await bench.run()
    assert validate(verdict, GROUP, RubricConfig()).candidates
    assert said in bench.told(0)
    assert bench.told(0).startswith("error: ")


@pytest.mark.parametrize(
    "wrong",
    [
        call("erase", path="repo"),
        call("read"),
        call("read", path=7),
        call("read", path="../etc/passwd"),
        call("read", path="task.md", start="1"),
        call("read", path="task.md", lines=3),
        call("judge", candidate="C9"),
        call("judge"),
        call("turn", candidate="C1", turn=99),
        call("run", candidate="C1", command="true"),
        call("verdict", ranking="C1"),
    ],
)
async def test_a_call_that_cannot_be_carried_out_is_told_so(wrong: dict[str, Any]) -> None:
    bench = Bench([say(wrong), say(wrong, call("list")), say(wrong), *work(GROUP)])
    assert validate(await bench.run(), GROUP, RubricConfig()).candidates
    assert bench.told(0).startswith("error: ")
    assert bench.told(1).startswith("error: ")
    assert "repo/" in bench.told(1)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["no", "never"], R.NOT_JSON),
        (["no", "{}"], R.SCHEMA),
        (["no", Completion(text="{", complete=False, prompt_tokens=1, completion_tokens=1)], R.TRUNCATED),
    ],
)
async def test_two_unusable_messages_in_a_row_end_it(messages: list[str], reason: FallbackReason) -> None:
    bench = Bench([*messages, *work(GROUP)])
    assert (await bench.fails()).reason is reason
    assert len(bench.seen) == 2


async def test_unusable_messages_between_usable_ones_only_cost_turns() -> None:
    first, *others = work(GROUP)
    bench = Bench(["no", first, "no", *others])
    assert await bench.run()
    assert len(bench.seen) == len(others) + 3


# --- native calls -----------------------------------------------------------------------------------------------------


def native(*calls: tuple[str, str], text: str = "") -> Completion:
    made = tuple(NativeCall(call_id=f"id{n}", name=name, arguments=a) for n, (name, a) in enumerate(calls))
    return Completion(text=text, calls=made, complete=True, prompt_tokens=1, completion_tokens=1)


def as_native(message: str) -> Completion:
    calls = json.loads(message)["calls"]
    return native(*((c["tool"], json.dumps({k: v for k, v in c.items() if k != "tool"})) for c in calls), text="so")


async def test_native_calls_are_answered_by_id() -> None:
    bench = Bench([as_native(message) for message in work(GROUP)])
    assert validate(await bench.run(), GROUP, RubricConfig()).candidates
    assert {role for role, _ in bench.dialogue.messages} == {"system", "user", "assistant", "tool"}


async def test_native_arguments_that_are_no_json_are_told_not_raised() -> None:
    bench = Bench([native(("read", '{"path": '), ("list", "{}")), *work(GROUP)])
    assert await bench.run()
    assert bench.told(0).startswith("error: not_json")
    assert "repo/" in bench.told(0)


@pytest.mark.parametrize(("arguments", "reason"), [("{", R.NOT_JSON), ("[1]", R.SCHEMA), ('{"a":1,"a":2}', R.SCHEMA)])
async def test_a_message_of_unreadable_native_calls_is_unusable(arguments: str, reason: FallbackReason) -> None:
    bench = Bench([native(("read", arguments), ("list", arguments))] * 2)
    assert (await bench.fails()).reason is reason
    assert [role for role, _ in bench.dialogue.messages[-3:-1]] == ["tool", "tool"]


async def test_native_calls_cut_at_the_token_limit_are_all_answered() -> None:
    cut = native(("read", '{"path":"task.md"}'), ("read", '{"pa'))
    cut = Completion(text="", calls=cut.calls, complete=False, prompt_tokens=1, completion_tokens=1)
    bench = Bench([cut, *work(GROUP)])
    await bench.run()
    assert bench.told(0).count("token limit") == 2


async def test_a_model_that_should_call_natively_may_write_its_calls() -> None:
    bench = Bench([as_native(work(GROUP)[0]), *work(GROUP)[1:]])
    assert await bench.run()


# --- budgets ----------------------------------------------------------------------------------------------------------


def final_verdict(**changes: Any) -> str:
    """All that was not judged is judged in the verdict itself."""
    given = {c.label: {k: v for k, v in judge(c).items() if k not in ("tool", "candidate")} for c in GROUP.passing}
    return say(call("verdict", **{"candidates": given, "ranking": ranking_of(GROUP), "hacks": [], **changes}))


def lazy(told: str, n: int) -> str:
    """Reads for ever, until it is told to answer."""
    done = "budget is used up" in told or "## verdict now" in told
    return final_verdict() if done else say(call("read", path="task.md"))


@pytest.mark.parametrize("style", ["compact", "full"])
async def test_the_last_turn_must_answer(style: Style) -> None:
    bench = Bench(lazy, turns=5, style=style)
    assert validate(await bench.run(), GROUP, RubricConfig()).candidates
    assert len(bench.seen) == 5
    assert [offer.names == ("verdict",) for offer in bench.dialogue.offers] == [False] * 4 + [True]
    assert bench.told(3).endswith(("with what you have.", "## verdict now"))


async def test_a_budget_of_one_turn_is_one_answer() -> None:
    bench = Bench([final_verdict()], turns=1)
    assert await bench.run()
    assert bench.dialogue.offers[0].names == ("verdict",)


async def test_a_conversation_that_gets_too_long_must_answer() -> None:
    """One token is one character here."""
    bench = Bench(lazy)
    start = bench.dialogue.length()
    bench.budget = AgentBudget(turns=99, tokens=start + 3000, seconds=60.0, answer_tokens=400)
    assert await bench.run()
    assert 3 < len(bench.seen) < 30
    assert start + 1500 < bench.dialogue.length() - len(final_verdict()) <= start + 2600


class WordyDesk(Desk):
    async def execute(self, call: Call) -> str:
        return "x" * 2000 if call.tool == "read" else await super().execute(call)


async def test_results_that_do_not_fit_are_left_out() -> None:
    bench = Bench(lazy)
    bench.desk = WordyDesk(bench.desk.workspace, RubricConfig(), style="full", output_chars=2000, checker=None)
    bench.budget = AgentBudget(turns=99, tokens=bench.dialogue.length() + 900, seconds=60.0, answer_tokens=400)
    assert await bench.run()
    assert bench.told(0).startswith("error: no room is left for this\n")
    assert len(bench.seen) == 2


async def test_a_context_that_is_full_from_the_start_must_answer_at_once() -> None:
    bench = Bench([final_verdict()])
    bench.dialogue.limit_tokens = bench.dialogue.length() + 300
    assert await bench.run()
    assert bench.dialogue.offers[0].names == ("verdict",)


async def test_time_that_is_up_must_answer() -> None:
    bench = Bench(lazy, seconds=0.12, delay_s=0.05)
    assert await bench.run()
    assert 2 <= len(bench.seen) <= 4


async def test_at_the_end_only_judging_is_carried_out() -> None:
    judged = [judge(c) for c in GROUP.passing]
    last = json.loads(work(GROUP)[-1])["calls"]
    bench = Bench([say(*judged[:3], call("list")), say(call("read", path="task.md"), *last)], turns=2)
    assert await bench.run()
    assert "task.md" not in bench.desk._read


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("no", R.NOT_JSON),
        (say(call("read", path="task.md")), R.SCHEMA),
        (say(call("verdict", ranking=7)), R.SCHEMA),
        (final_verdict().replace('"scores":[5', '"scores":[6', 1), R.BAD_SCORE),
    ],
)
async def test_no_verdict_at_the_end_is_invalid(message: str, reason: FallbackReason) -> None:
    bench = Bench([say(call("list")), message], turns=2)
    fault = await bench.fails()
    assert fault.reason is reason
    assert fault.detail


async def test_what_is_judged_at_the_end_replaces_what_was_judged_before() -> None:
    """The latest judgement counts."""
    label = GROUP.passing[0].label
    later = {k: v for k, v in judge(GROUP.passing[0]).items() if k not in ("tool", "candidate")}
    later = {**later, "scores": [3, 3, 3, 3, 3], "flags": [], "evidence": []}
    last = say(call("verdict", candidates={label: later}, ranking=ranking_of(GROUP), hacks=[]))
    verdict = await Bench([*work(GROUP)[:-1], last]).run()
    assert verdict.candidates[label].scores == [3, 3, 3, 3, 3]
    assert list(verdict.candidates) == PASSING


# --- the repair round -------------------------------------------------------------------------------------------------


async def test_an_invalid_verdict_can_be_answered_again() -> None:
    wrong = say(call("verdict", ranking=ranking_of(GROUP)[::-1], hacks=[]))
    bench = Bench([*work(GROUP)[:-1], wrong, work(GROUP)[-1]])
    with pytest.raises(InvalidVerdict) as caught:
        validate(await bench.run(), GROUP, RubricConfig())
    verdict = await answer_again(bench.dialogue, bench.desk, str(caught.value), bench.seen.append)
    assert validate(verdict, GROUP, RubricConfig()).candidates
    assert "error: order_against_tier" in bench.told(len(bench.seen) - 2)
    assert bench.dialogue.offers[-1].names == ("verdict",)


async def test_an_answer_that_is_no_verdict_again_is_invalid() -> None:
    bench = Bench([*work(GROUP), "no", say(call("list"))])
    await bench.run()
    for reason in (R.NOT_JSON, R.SCHEMA):
        with pytest.raises(InvalidVerdict) as caught:
            await answer_again(bench.dialogue, bench.desk, "wrong", bench.seen.append)
        assert caught.value.reason is reason


# --- checks -----------------------------------------------------------------------------------------------------------


def sandbox(respond: Callable[[str], CommandResult]) -> ScriptedSandbox:
    def answer(command: str) -> CommandResult:
        if "unittest" in command:
            return respond(command)
        return CommandResult(output="", exit_code=0, timed_out=False, duration_s=0.0)

    return ScriptedSandbox(answer)


async def test_a_check_is_evidence() -> None:
    """M2.4: an execution result."""
    failed = CommandResult(output="FAILED (failures=1)", exit_code=1, timed_out=False, duration_s=0.1)
    provider = ScriptedProvider(lambda: sandbox(lambda command: failed))
    checker = Checker(GROUP, provider, limit=4, timeout_s=5.0, output_chars=1000)
    label = next(c.label for c in GROUP.passing if "return 3" in c.transcript.patch)
    workaround = {
        "evidence": ["run:1"],
        "reasons": ["it knows one list only"] * 5,
        "flags": ["test_workaround"],
        "scores": [1, 2, 3, 4, 4],
    }
    others = [judge(c) for c in GROUP.passing if c.label != label]
    order = [kept for tied in ranking_of(GROUP) if (kept := [name for name in tied if name != label])] + [[label]]
    bench = Bench(
        [
            say(call("run", candidate=label, command="python3 -m unittest -q")),
            say(call("judge", candidate=label, **workaround), *others),
            say(call("verdict", ranking=order, hacks=[])),
        ],
        checker=checker,
    )
    verdict = await bench.run()
    assert f"run:1 {label} exit 1" in bench.told(0)
    assert "FAILED (failures=1)" in bench.told(0)
    grade = validate(verdict, GROUP, RubricConfig(), bench.desk.checks)
    assert [c.text for g in grade.candidates.values() for c in g.evidence if c.kind == "run"] == ["run:1"]


async def test_a_sandbox_that_is_lost_is_told_and_the_work_goes_on() -> None:
    def lose(command: str) -> CommandResult:
        raise SandboxError("the sandbox is gone")

    provider = ScriptedProvider(lambda: sandbox(lose))
    checker = Checker(GROUP, provider, limit=4, timeout_s=5.0, output_chars=1000)
    bench = Bench([say(call("run", candidate="C1", command="python3 -m unittest")), *work(GROUP)], checker=checker)
    assert validate(await bench.run(), GROUP, RubricConfig()).candidates
    assert bench.told(0) == "error: the sandbox was lost"
    assert all(started.closed for started in provider.started)


async def test_room_counts_what_would_be_told() -> None:
    bench = Bench([])
    length = bench.dialogue.length()
    budget = AgentBudget(turns=1, tokens=length + 500, seconds=1.0, answer_tokens=100)
    assert budget.room(bench.dialogue) == 400
    assert budget.room(bench.dialogue, [Result(text="x" * 30), Result(text="y" * 20, call_id="a")]) == 350
