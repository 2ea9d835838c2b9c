"""The actor that grades groups: one group in, one grade or one typed reason out (M1.4, M1.10)."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field

from configs.schema import GraderConfig, RubricConfig
from grader.candidates import CandidateGroup, MismatchError, label_group
from grader.client import Completion, Dialogue, GraderModel, PromptTooLongError, make_model
from grader.exchange import Grader, GradeReply, GradeRequest, base_state_of
from grader.prompt import GraderPrompt, build_prompt
from grader.verdict import FallbackReason, Grade, InvalidVerdict, parse_verdict, validate
from infra.errors import EngineError, GraderError
from rollout.engine import Engine
from rollout.trajectory import Transcript

__all__ = ["GradeReply", "GradeRequest", "Grader", "GraderWorker"]

_log = logging.getLogger(__name__)

_MIN_PROMPT_CHARS = 400
"""A prompt that must shrink below this to fit the model's context is given up."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """What happened so far while one group is graded."""

    queue_s: float
    started_s: float
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    verdict: str | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def count(self, completion: Completion) -> None:
        self.turns += 1
        self.prompt_tokens += completion.prompt_tokens
        self.completion_tokens += completion.completion_tokens
        self.verdict = completion.text.encode("utf-8", "replace").decode("utf-8")  # it is written to a file as it is


class GraderWorker:
    """Grades groups, several at once. A Ray actor in a run (its methods are coroutines); needs no Ray itself."""

    def __init__(
        self,
        config: GraderConfig,
        rubric: RubricConfig,
        *,
        engine: Engine | None = None,
        model: GraderModel | None = None,
    ) -> None:
        """`engine` serves the vllm backend; `model` replaces what the configuration names.

        Raises:
            ConfigError: the backend cannot be set up.
        """
        self.config = config
        self.rubric = rubric
        self.model = model or make_model(config, engine)
        self._slots = asyncio.Semaphore(config.groups_per_worker)

    async def grade(self, request: GradeRequest, *transcripts: Transcript) -> GradeReply:
        """See `Grader.grade`. Queueing is measured from the request's submission, or else from this call."""
        called_unix_s = time.time()
        async with self._slots:
            since = called_unix_s if request.submitted_unix_s is None else request.submitted_unix_s
            run = _Run(queue_s=max(0.0, time.time() - since), started_s=time.monotonic())
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    grade = await self._grade(request, transcripts, run)
            except Exception as error:  # the one broad catch of this actor: no fault may cost more than a fallback
                return self._reply(request, run, None, *_reason(error, self.config.timeout_s))
            return self._reply(request, run, grade, None, "")

    async def close(self) -> None:
        """Close the model's connections."""
        await self.model.close()

    async def _grade(self, request: GradeRequest, transcripts: tuple[Transcript, ...], run: _Run) -> Grade:
        if request.base_state != base_state_of(request.task):
            raise MismatchError("the task's files are not the repository state the request names")
        group = label_group(
            group_id=request.group_id,
            task=request.task,
            trajectories=request.trajectories,
            transcripts=transcripts,
            order_seed=request.order_seed,
        )
        run.labels = {c.label: c.trajectory.trajectory_id for c in group.candidates}
        # The engine wants unique ids, and one group can be asked for again while a lost worker's request still runs.
        dialogue, prompt = self._open(group, f"{request.group_id}/grade{request.attempt}-{uuid.uuid4().hex[:12]}")
        for round_left in range(self.config.repair_rounds, -1, -1):
            completion = await dialogue.ask(prompt.schema)
            run.count(completion)
            try:
                return validate(parse_verdict(completion.text, complete=completion.complete), group, self.rubric)
            except InvalidVerdict as invalid:
                if not round_left:
                    raise
                dialogue.tell(
                    f"That verdict is not valid ({invalid}). Answer again with the whole corrected JSON object."
                )
        raise AssertionError("unreachable: the last round returns or raises")

    def _open(self, group: CandidateGroup, request_id: str) -> tuple[Dialogue, GraderPrompt]:
        """Start the dialogue; material that does not fit the model's context is cut further, evenly."""
        chars = self.config.prompt_chars
        while True:
            prompt = build_prompt(group, style=self.config.style, prompt_chars=chars)
            try:
                return self.model.open(system=prompt.system, user=prompt.user, request_id=request_id), prompt
            except PromptTooLongError as error:
                chars = int(min(chars, len(prompt.user)) * min(0.9, error.limit_tokens / error.prompt_tokens))
                if chars < _MIN_PROMPT_CHARS:
                    raise

    def _reply(
        self, request: GradeRequest, run: _Run, grade: Grade | None, reason: FallbackReason | None, detail: str
    ) -> GradeReply:
        return GradeReply(
            group_id=request.group_id,
            attempt=request.attempt,
            base_state=base_state_of(request.task),
            policy_versions={t.trajectory_id: t.policy_versions for t in request.trajectories},
            order_seed=request.order_seed,
            grade=grade,
            fallback_reason=reason,
            detail=detail,
            model=self.model.name,
            queue_s=run.queue_s,
            run_s=time.monotonic() - run.started_s,
            turns=run.turns,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            verdict=run.verdict,
            labels=run.labels,
        )


def _reason(error: Exception, timeout_s: float) -> tuple[FallbackReason, str]:
    """The fallback reason of whatever ended a grading."""
    match error:
        case InvalidVerdict():
            return error.reason, error.detail
        case TimeoutError():
            return FallbackReason.TIMEOUT, f"no valid verdict within {timeout_s:g} s"
        case MismatchError():
            return FallbackReason.MISMATCH, str(error)
        case PromptTooLongError():
            return FallbackReason.PROMPT_TOO_LONG, str(error)
        case EngineError():
            return FallbackReason.ENGINE_ERROR, str(error)
        case GraderError():
            return FallbackReason.ENDPOINT_ERROR, str(error)
        case _:
            _log.exception("the grader failed")
            return FallbackReason.GRADER_ERROR, f"{type(error).__name__}: {error}"
