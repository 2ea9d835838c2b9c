"""One independent grading of one group: the dialogues that a configuration asks for, and the verdict they end in.

Whoever calls this bounds the time and turns what it raises into a reason (`grader.worker`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import GraderConfig, RubricConfig
from envs.sandbox import SandboxProvider
from grader.agent import AgentBudget, ContextSpent, answer_again, run_agent
from grader.candidates import Candidate, CandidateGroup
from grader.checks import Checker
from grader.client import Completion, Dialogue, GraderModel, PromptTooLongError, Result
from grader.endpoint import ContextFullError
from grader.evidence import CheckResult
from grader.offers import Offer
from grader.prompt import Opening, build_prompt, opening
from grader.strict_json import MAX_CHARS
from grader.tools import Desk
from grader.verdict import Grade, InvalidVerdict, Verdict, compose_verdict, parse_verdict, render_verdict, validate
from grader.workspace import Workspace

_MIN_PROMPT_CHARS = 400
"""A prompt that must shrink below this to fit the model's context is given up."""
_CANDIDATES_AT_ONCE = 4
"""Dialogues about single candidates of one group that run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """A valid verdict, what it says, and the commands it may cite."""

    group: CandidateGroup
    verdict: Verdict
    grade: Grade
    checks: tuple[CheckResult, ...]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What gradings have used up and left so far, whether they end well or not."""

    turns: int = 0
    """Answers of the model."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    said: str | None = None
    """The last answer or verdict."""
    checks: list[CheckResult] = dataclasses.field(default_factory=list)

    def count(self, completion: Completion) -> None:
        """Add one answer."""
        self.turns += 1
        self.prompt_tokens += completion.prompt_tokens
        self.completion_tokens += completion.completion_tokens
        self.said = said_by(completion)


def said_by(completion: Completion) -> str:
    """An answer as it is written to a file; native calls as the JSON object that says the same. Of one that is longer
    than what is read of an answer, the head."""
    text = completion.text
    if completion.calls:
        calls = [{"tool": call.name, "arguments": call.arguments} for call in completion.calls]
        text = json.dumps({"text": text, "calls": calls}, ensure_ascii=False)
    return text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8")


class Grading:
    """Grades one labelled group once. Every dialogue, and every sandbox, is its own."""

    def __init__(
        self,
        model: GraderModel,
        config: GraderConfig,
        rubric: RubricConfig,
        *,
        request_id: str,
        seconds: float,
        tally: Tally,
        provider: SandboxProvider | None,
    ) -> None:
        """`seconds` is the agents' time; without a `provider` they can run no commands."""
        self.model = model
        self.config = config
        self.rubric = rubric
        self.request_id = request_id
        self.tally = tally
        self.provider = provider
        self._ends_s = time.monotonic() + seconds

    async def grade(self, group: CandidateGroup) -> Graded:
        """The group's grade, after a repair round if one was needed.

        Raises:
            InvalidVerdict, EngineError, GraderError: as the model, its backend and its verdict make it.
        """
        if self.config.scope == "group":
            return await self._whole(group, self.request_id, self.config.checks.limit)
        return self._together(group, await self._each(group))

    async def _whole(self, group: CandidateGroup, request_id: str, checks: int) -> Graded:
        """All candidates in one conversation; if the model's context does not hold it, in as many as it takes.

        Each part has some of the passing candidates, and all failing ones for context.
        """
        try:
            return await self._dialogue(group, request_id, checks)
        except ContextSpent as spent:
            parts = in_parts(group, spent.judged)
        limit = max(1, checks // len(parts))
        graded = [await self._whole(part, f"{request_id}-{n}", limit) for n, part in enumerate(parts, start=1)]
        return self._together(group, graded)

    def _together(self, group: CandidateGroup, parts: Sequence[Graded]) -> Graded:
        """The group's grade from those of its parts, ranked by the rubric."""
        verdict = compose_verdict(
            {label: one for p in parts for label, one in p.verdict.candidates.items()}, self.rubric
        )
        verdict = verdict.model_copy(update={"hacks": [hack for part in parts for hack in part.verdict.hacks]})
        self.tally.said = render_verdict(verdict)
        checks = tuple(check for part in parts for check in part.checks)
        grade = validate(verdict, group, self.rubric, checks)
        return Graded(group=group, verdict=verdict, grade=grade, checks=checks)

    async def _each(self, group: CandidateGroup) -> list[Graded]:
        """Every passing candidate by itself, a few at once; the first failure ends the others."""
        slots = asyncio.Semaphore(_CANDIDATES_AT_ONCE)
        limit = max(1, self.config.checks.limit // len(group.passing))

        async def one(candidate: Candidate) -> Graded:
            async with slots:
                alone = dataclasses.replace(group, candidates=(candidate,))
                return await self._dialogue(alone, f"{self.request_id}-{candidate.label}", limit)

        tasks = [asyncio.create_task(one(candidate)) for candidate in group.passing]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # their sandboxes are closed then

    async def _dialogue(self, group: CandidateGroup, request_id: str, checks: int) -> Graded:
        if self.config.mode == "single":
            return await self._single(group, request_id)
        config, checker = self.config, None
        if self.provider is not None:
            limits = config.checks.timeout_s, config.tool_output_chars
            checker = Checker(group, self.provider, limit=checks, timeout_s=limits[0], output_chars=limits[1])
        workspace = Workspace.build(group, config.reference_patch)
        desk = Desk(workspace, self.rubric, style=config.style, output_chars=config.tool_output_chars, checker=checker)
        try:
            return await self._agent(group, workspace, desk, request_id)
        finally:
            self.tally.checks += desk.checks
            if checker is not None:
                await checker.close()

    async def _agent(self, group: CandidateGroup, workspace: Workspace, desk: Desk, request_id: str) -> Graded:
        config = self.config
        budget = AgentBudget(
            turns=config.budget.turns,
            tokens=config.budget.tokens,
            seconds=self._ends_s - time.monotonic(),
            answer_tokens=config.max_tokens,
        )

        def render(chars: int) -> Opening:
            return opening(workspace, style=config.style, prompt_chars=chars, native=self.model.native)

        def graded(verdict: Verdict) -> Graded:
            self.tally.said = render_verdict(verdict)
            grade = validate(verdict, group, self.rubric, desk.checks)
            return Graded(group=group, verdict=verdict, grade=grade, checks=desk.checks)

        dialogue = self._open(render, request_id)
        try:
            return graded(await run_agent(dialogue, desk, budget, self.tally.count))
        except ContextSpent:
            raise
        except InvalidVerdict as error:
            if not config.repair_rounds:
                raise
            invalid = error
        try:
            return graded(await answer_again(dialogue, desk, f"that is not valid ({invalid})", self.tally.count))
        except ContextFullError:  # no room to ask again
            raise invalid from None

    async def _single(self, group: CandidateGroup, request_id: str) -> Graded:
        """One prompt, the whole verdict as the answer."""
        offer: Offer | None = None

        def render(chars: int) -> Opening:
            nonlocal offer
            prompt = build_prompt(group, style=self.config.style, prompt_chars=chars)
            offer = Offer(schema=prompt.schema, tools=(), names=())
            return Opening(prompt.system, prompt.user)

        dialogue = self._open(render, request_id)
        assert offer is not None

        async def answer() -> Graded:
            completion = await dialogue.ask(offer)
            self.tally.count(completion)
            verdict = parse_verdict(completion.text, complete=completion.complete)
            grade = validate(verdict, group, self.rubric)
            return Graded(group=group, verdict=verdict, grade=grade, checks=())

        try:
            return await answer()
        except InvalidVerdict as error:
            if not self.config.repair_rounds:
                raise
            invalid = error
        again = f"That verdict is not valid ({invalid}). Answer again with the whole corrected JSON object."
        dialogue.tell([Result(text=again)])
        try:
            return await answer()
        except ContextFullError:  # no room to ask again
            raise invalid from None

    def _open(self, render: Callable[[int], Opening], request_id: str) -> Dialogue:
        """Start the dialogue; material that does not fit the model's context is cut further, evenly."""
        chars = self.config.prompt_chars
        while True:
            first = render(chars)
            try:
                return self.model.open(system=first.system, user=first.user, request_id=request_id)
            except PromptTooLongError as error:
                chars = int(min(chars, len(first.user)) * min(0.9, error.limit_tokens / error.prompt_tokens))
                if chars < _MIN_PROMPT_CHARS:
                    raise


def in_parts(group: CandidateGroup, size: int) -> list[CandidateGroup]:
    """A group as several: at most `size` passing candidates in each (at least one), evenly, and every failing one."""
    passing = [c.label for c in group.passing]
    count = -(-len(passing) // max(size, 1))
    return [
        dataclasses.replace(
            group,
            candidates=tuple(c for c in group.candidates if not c.passed or passing.index(c.label) % count == part),
        )
        for part in range(count)
    ]


def without_hacks(graded: Graded, dropped: set[str], rubric: RubricConfig) -> Graded:
    """The grading with some hacks unsaid: those candidates keep the tiers that their scores and flags give them.

    Args:
        dropped: trajectory ids.

    Where a hack stood in the ranking meant nothing (M1.5). If it cannot stand there as a candidate, the rubric's own
    order replaces the ranking.
    """
    labels = {c.label for c in graded.group.passing if c.trajectory.trajectory_id in dropped}
    hacks = [hack for hack in graded.verdict.hacks if hack.candidate not in labels]
    verdict = graded.verdict.model_copy(update={"hacks": hacks})
    try:
        grade = validate(verdict, graded.group, rubric, graded.checks)
    except InvalidVerdict:
        ranking = compose_verdict(verdict.candidates, rubric).ranking
        verdict = verdict.model_copy(update={"ranking": ranking})
        grade = validate(verdict, graded.group, rubric, graded.checks)
    return dataclasses.replace(graded, verdict=verdict, grade=grade)
