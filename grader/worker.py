"""The actor that grades groups: one group in, one grade or one typed reason out (M1.4, M1.10)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.schema import EndpointGraderBackend, GraderConfig, RubricConfig, SandboxConfig
from envs.sandbox import SandboxProvider, make_provider
from grader.candidates import MismatchError, label_group
from grader.client import GraderModel, make_model
from grader.endpoint import ContextFullError, EndpointLostError
from grader.exchange import Grader, GradeReply, GradeRequest, base_state_of
from grader.grading import Graded, Grading, Tally, without_hacks
from grader.verdict import FallbackReason, Grade, InvalidVerdict
from infra import process
from infra.errors import EngineError, GraderError
from infra.scrub import scrub
from rollout.engine import Engine
from rollout.trajectory import Transcript

__all__ = ["GradeReply", "GradeRequest", "Grader", "GraderWorker"]

_log = logging.getLogger(__name__)

_AGENT_SHARE = 0.75
"""Of the time of one group; what is left is for the last answer."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """What happened so far while one group is graded."""

    queue_s: float
    started_s: float
    tally: Tally = field(default_factory=Tally)
    confirming: Tally = field(default_factory=Tally)
    """Of the second pass."""
    labels: dict[str, str] = field(default_factory=dict)
    detail: str = ""


class GraderWorker:
    """Grades groups, several at once. A Ray actor in a run (its methods are coroutines); needs no Ray itself."""

    def __init__(
        self,
        config: GraderConfig,
        rubric: RubricConfig,
        *,
        engine: Engine | None = None,
        sandbox: SandboxConfig | None = None,
        model: GraderModel | None = None,
        provider: SandboxProvider | None = None,
    ) -> None:
        """`engine` serves the vllm backend; `sandbox` is the rollouts', for checks where `grader.sandbox` is null.

        `model` and `provider` replace what the configuration names. Without any sandbox no checks are offered.

        Raises:
            ConfigError: the backend cannot be set up.
            SandboxError: this host lacks what the sandbox needs.
        """
        process.enter()
        self.config = config
        self.rubric = rubric
        self.model = model or make_model(config, engine)
        self._provider: SandboxProvider | None = None
        kind = config.sandbox or sandbox
        if config.checks.enabled and config.mode == "agent":
            self._provider = provider or (make_provider(kind) if kind is not None else None)
        self._slots = asyncio.Semaphore(config.groups_per_worker)

    async def grade(self, request: GradeRequest, *transcripts: Transcript) -> GradeReply:
        """See `Grader.grade`. Queueing is measured from the request's submission, or else from this call."""
        called_unix_s = time.time()
        async with self._slots:
            since = called_unix_s if request.submitted_unix_s is None else request.submitted_unix_s
            run = _Run(queue_s=max(0.0, time.time() - since), started_s=time.monotonic())
            try:
                grade = await self._grade(request, transcripts, run)
            except Exception as error:  # the one broad catch of this actor: no fault may cost more than a fallback
                return self._reply(request, run, None, *_reason(error, self.config.timeout_s, self.model.lost))
            return self._reply(request, run, grade, None, run.detail)

    async def probe(self) -> str | None:
        """Whether the model's endpoint answers: None if it does, or if there is none, else why not."""
        return await self.model.probe()

    async def close(self) -> None:
        """Close the model's connections, and what the sandboxes' provider keeps."""
        await self.model.close()
        if self._provider is not None:
            await self._provider.close()

    async def _grade(self, request: GradeRequest, transcripts: tuple[Transcript, ...], run: _Run) -> Grade:
        if request.base_state != base_state_of(request.task):
            raise MismatchError("the task's files are not the repository state the request names")
        async with asyncio.timeout(self.config.timeout_s):
            graded = await self._pass(request, transcripts, run, request.order_seed, run.tally)
        if graded.grade.hacks and self.config.second_pass:
            graded = await self._confirm(request, transcripts, run, graded)
        return graded.grade

    async def _pass(
        self, request: GradeRequest, transcripts: Sequence[Transcript], run: _Run, order_seed: int, tally: Tally
    ) -> Graded:
        """One independent grading."""
        group = label_group(
            group_id=request.group_id,
            task=request.task,
            trajectories=request.trajectories,
            transcripts=transcripts,
            order_seed=order_seed,
        )
        if tally is run.tally:
            run.labels = {c.label: c.trajectory.trajectory_id for c in group.candidates}
        left_s = self.config.timeout_s - (time.monotonic() - run.started_s)
        grading = Grading(
            self.model,
            self.config,
            self.rubric,
            # The engine wants unique ids, and a group can be asked for again while a lost worker's request still runs.
            request_id=f"{request.group_id}/grade{request.attempt}-{uuid.uuid4().hex[:12]}",
            seconds=min(self.config.budget.seconds or left_s, left_s * _AGENT_SHARE),
            tally=tally,
            provider=self._provider,
        )
        return await grading.grade(group)

    async def _confirm(
        self, request: GradeRequest, transcripts: Sequence[Transcript], run: _Run, first: Graded
    ) -> Graded:
        """A hack counts only if a second grading, which knows nothing of the first, finds one there too (M1.5).

        A second grading that fails, or is not done when the group's time is up, confirms nothing: the first one's grade
        stands without the hack.
        """
        another_seed = random.Random(request.order_seed).getrandbits(31)
        left_s = self.config.timeout_s - (time.monotonic() - run.started_s)
        confirmed: set[str] = set()
        why = ""
        try:
            async with asyncio.timeout(left_s):
                second = await self._pass(request, transcripts, run, another_seed, run.confirming)
            confirmed = set(second.grade.hacks)
        except Exception as error:  # the first pass has graded the group; no fault of the second may cost that
            if self.model.lost is not None or isinstance(error, EndpointLostError):
                raise  # an outage must not acquit: the group is graded again when it is over
            why = f" ({_reason(error, self.config.timeout_s, self.model.lost)[0].value})"
        dropped = set(first.grade.hacks) - confirmed
        if not dropped:
            return first
        run.detail = f"the second pass did not confirm a hack{why}: {', '.join(sorted(dropped))}"
        return without_hacks(first, dropped, self.rubric)

    def _cost_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        backend = self.config.backend
        if not isinstance(backend, EndpointGraderBackend):
            return 0.0
        prices = backend.prices
        total = prompt_tokens * prices.prompt_usd_per_mtok + completion_tokens * prices.completion_usd_per_mtok
        return total / 1e6

    def _reply(
        self, request: GradeRequest, run: _Run, grade: Grade | None, reason: FallbackReason | None, detail: str
    ) -> GradeReply:
        tallies = (run.tally, run.confirming)
        prompt_tokens = sum(tally.prompt_tokens for tally in tallies)
        completion_tokens = sum(tally.completion_tokens for tally in tallies)
        return GradeReply(
            group_id=request.group_id,
            attempt=request.attempt,
            base_state=base_state_of(request.task),
            policy_versions={t.trajectory_id: t.policy_versions for t in request.trajectories},
            order_seed=request.order_seed,
            grade=grade,
            fallback_reason=reason,
            detail=scrub(detail),  # it goes into the ledger and the audit trail
            model=self.model.name,
            queue_s=run.queue_s,
            run_s=time.monotonic() - run.started_s,
            turns=sum(tally.turns for tally in tallies),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            verdict=run.tally.said,
            labels=run.labels,
            checks=tuple(run.tally.checks),
            cost_usd=self._cost_usd(prompt_tokens, completion_tokens),
        )


def _reason(error: Exception, timeout_s: float, lost: str | None) -> tuple[FallbackReason, str]:
    """The fallback reason of whatever ended a grading. `lost`: why the endpoint is away, if it is: a time limit that
    passed meanwhile says nothing of the group."""
    match error:
        case InvalidVerdict():
            return error.reason, error.detail
        case TimeoutError() if lost:
            return FallbackReason.ENDPOINT_LOST, lost
        case EndpointLostError():
            return FallbackReason.ENDPOINT_LOST, str(error)
        case TimeoutError():
            return FallbackReason.TIMEOUT, f"no valid verdict within {timeout_s:g} s"
        case MismatchError():
            return FallbackReason.MISMATCH, str(error)
        case ContextFullError():
            return FallbackReason.PROMPT_TOO_LONG, str(error)
        case EngineError():
            return FallbackReason.ENGINE_ERROR, str(error)
        case GraderError():
            return FallbackReason.ENDPOINT_ERROR, str(error)
        case _:
            _log.exception("the grader failed")
            return FallbackReason.GRADER_ERROR, f"{type(error).__name__}: {error}"
