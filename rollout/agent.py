"""The agent loop: one task, one sandbox, one context of tokens, until the policy submits or a budget is used up.

Budgets of turns, tokens and command time are the policy's: what it left is verified as it is. A lost sandbox, engine or
verifier and the wall-clock backstop are not, and mask the trajectory (M1.3).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import numpy as np

from configs.schema import LimitsConfig, RolloutConfig
from envs.sandbox import Sandbox, SandboxProvider
from envs.task import FinalState, HiddenTests, Task
from envs.verifier import Verification, verify_answer, verify_patch, verify_state
from envs.workspace import extract_patch, prepare
from envs.workspace import start as start_sandbox
from infra.errors import EngineError, HarnessError, SandboxError, VerifierError, WorkspaceError
from rollout.chat import ChatFormat, parse_action, render_error, render_observation
from rollout.context import Context, join
from rollout.engine import Engine
from rollout.trajectory import Payload, Status, Trajectory, Transcript, Turn

CUT_MESSAGE = "the message was cut at its token limit; write one shorter command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What an episode sampled, for the learner and for the trajectory's metadata."""

    payload: Payload
    prompt_tokens: int
    drift: int = 0
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Episode:
    """One running trajectory: what all ways of running one have in common."""

    task: Task
    trajectory_id: str
    provider: SandboxProvider
    config: RolloutConfig
    turns: list[Turn] = field(default_factory=list)
    engine_s: float = 0.0
    sandbox_s: float = 0.0
    sandbox_start_s: float = 0.0
    verify_s: float = 0.0
    patch: str = ""

    @property
    def limits(self) -> LimitsConfig:
        return self.config.limits

    async def run(self) -> tuple[Status, Verification]:
        """The episode and its verification.

        Raises SandboxError, EngineError, VerifierError or HarnessError when one is lost.
        """
        raise NotImplementedError

    def record(self) -> Record:
        """What was sampled so far."""
        raise NotImplementedError

    async def start(self) -> Sandbox:
        """A sandbox with the task in it. Raises SandboxError."""
        begin_s = time.monotonic()
        sandbox = await start_sandbox(self.provider, self.task)
        try:
            await prepare(sandbox, self.task)
        except BaseException:
            await sandbox.close()
            raise
        self.sandbox_start_s = time.monotonic() - begin_s
        self.sandbox_s += self.sandbox_start_s
        return sandbox

    async def verify(self, sandbox: Sandbox) -> Verification:
        """What the sandbox holds, or the last turn says, against the task. Raises SandboxError or VerifierError."""
        begin_s = time.monotonic()
        try:
            if isinstance(self.task.verifier, HiddenTests):
                self.patch = await extract_patch(sandbox)
                # The fresh one can then take its place: one sandbox a trajectory at any time.
                await sandbox.close()
                return await verify_patch(self.task, self.patch, self.provider)
            if isinstance(self.task.verifier, FinalState):
                return await verify_state(self.task, sandbox)
            last = self.turns[-1].action if self.turns else ""
            return verify_answer(self.task, last)
        finally:
            self.verify_s = time.monotonic() - begin_s


@dataclass(slots=True, kw_only=True)
class _Loop(Episode):
    """The built-in harness."""

    engine: Engine
    chat: ChatFormat
    prompt: list[int]
    context: Context = field(default_factory=Context)

    def __post_init__(self) -> None:
        self.context.show(self.prompt)

    def record(self) -> Record:
        """See `Episode.record`."""
        return Record(payload=join([self.context]), prompt_tokens=len(self.prompt))

    async def run(self) -> tuple[Status, Verification]:
        """See `Episode.run`."""
        if not self.task.needs_sandbox:
            return await self._answer()
        starting = asyncio.ensure_future(self.start())
        sandbox: Sandbox | None = None
        try:
            status = Status.TURN_LIMIT
            while len(self.turns) < self.limits.max_turns:
                # The first generation needs no sandbox, so both start together.
                text, ended = await self._generate()
                if text is None:
                    status = Status.TOKEN_LIMIT
                    break
                sandbox = sandbox or await starting
                if (end := await self._act(sandbox, text, ended)) is not None:
                    status = end
                    break
            sandbox = sandbox or await starting
            return status, await self.verify(sandbox)
        finally:
            if sandbox is None:
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError, SandboxError):
                    sandbox = await starting
            if sandbox is not None:
                await sandbox.close()

    async def _answer(self) -> tuple[Status, Verification]:
        """A single-turn task: the one message is the answer."""
        text, ended = await self._generate()
        begin_s = time.monotonic()
        self._log(text or "", "", None, 0.0)
        verdict = verify_answer(self.task, text or "")
        self.verify_s = time.monotonic() - begin_s
        return (Status.SUBMITTED if ended else Status.TOKEN_LIMIT), verdict

    async def _generate(self) -> tuple[str | None, bool]:
        """One message and whether the policy ended it; None when no token is left for it."""
        room = self.limits.max_total_tokens - len(self.context.token_ids)
        budget = min(self.limits.max_turn_tokens, room)
        if budget <= 0:
            return None, False
        begin_s = time.monotonic()
        generation = await self.engine.generate(
            request_id=f"{self.trajectory_id}/{len(self.turns)}",
            prompt_ids=self.context.token_ids,
            max_tokens=budget,
            temperature=self.config.sampling.temperature,
            stop_ids=self.chat.stop_ids,
        )
        self.engine_s += time.monotonic() - begin_s
        self.context.take(generation)
        ended = generation.finish_reason == "stop"
        ids = generation.token_ids[:-1] if ended else generation.token_ids
        return self.chat.decode(ids), ended

    async def _act(self, sandbox: Sandbox, text: str, ended: bool) -> Status | None:
        """Run the message, log the turn, and show what came of it; a status if that ends the episode."""
        action = parse_action(text, self.config.action_format)
        duration_s, exit_code = 0.0, None
        if not ended:
            if len(self.context.token_ids) >= self.limits.max_total_tokens:
                self._log(text, "", None, 0.0)
                return Status.TOKEN_LIMIT
            observation = render_error(CUT_MESSAGE)
        elif action.submit:
            self._log(text, "", None, 0.0)
            return Status.SUBMITTED
        elif action.command is None:
            observation = render_error(action.error or "expected one bash command")
        else:
            used_s = sum(turn.duration_s for turn in self.turns)
            timeout_s = min(self.limits.command_timeout_s, self.limits.command_budget_s - used_s)
            result = await sandbox.run(action.command, timeout_s=timeout_s)
            duration_s, exit_code = result.duration_s, result.exit_code
            self.sandbox_s += duration_s
            observation = render_observation(
                result.output,
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                max_chars=self.limits.observation_chars,
            )
            if used_s + duration_s >= self.limits.command_budget_s:
                self._log(text, observation, exit_code, duration_s)
                return Status.TIME_LIMIT
        self._log(text, observation, exit_code, duration_s)
        if len(self.turns) == self.limits.max_turns:
            return Status.TURN_LIMIT  # nobody will read the observation
        extension = self.chat.extend(observation, ended=ended)
        if len(self.context.token_ids) + len(extension) >= self.limits.max_total_tokens:
            return Status.TOKEN_LIMIT
        self.context.show(extension)
        return None

    def _log(self, action: str, observation: str, exit_code: int | None, duration_s: float) -> None:
        before = sum(turn.response_tokens for turn in self.turns)
        self.turns.append(
            Turn(
                action=action,
                observation=observation,
                exit_code=exit_code,
                duration_s=duration_s,
                response_tokens=self.context.response_tokens - before,
            )
        )


async def run_episode(
    *,
    task: Task,
    trajectory_id: str,
    group_id: str,
    engine: Engine,
    chat: ChatFormat,
    provider: SandboxProvider,
    config: RolloutConfig,
) -> tuple[Trajectory, Payload | None, Transcript]:
    """Sample and verify one trajectory.

    Never raises for what was lost: the trajectory then has a masked status, says what was lost, and has no payload.
    """
    episode = _Loop(
        task=task,
        trajectory_id=trajectory_id,
        engine=engine,
        chat=chat,
        provider=provider,
        config=config,
        prompt=chat.initial(config.system_prompt, task.statement),
    )
    return await conclude(episode, group_id)


async def conclude(episode: Episode, group_id: str) -> tuple[Trajectory, Payload | None, Transcript]:
    """Run an episode to its end. Never raises for what was lost: see `run_episode`."""
    start_s = time.monotonic()
    task, config = episode.task, episode.config
    verdict: Verification | None = None
    error: str | None = None
    try:
        async with asyncio.timeout(config.limits.wall_s) as wall:
            status, verdict = await episode.run()
    except TimeoutError:
        if not wall.expired():
            raise
        status, error = Status.INFRA_WALL, f"not done within limits.wall_s = {config.limits.wall_s:g} s"
    except WorkspaceError as e:
        status, error = Status.INFRA_SETUP, e.message
    except SandboxError as e:
        status, error = Status.INFRA_SANDBOX, e.message
    except EngineError as e:
        status, error = Status.INFRA_ENGINE, e.message
    except VerifierError as e:
        status, error = Status.INFRA_VERIFIER, e.message
    except HarnessError as e:
        status, error = Status.INFRA_WORKER, e.message
    record = episode.record()
    sampled = record.payload
    payload = sampled if verdict is not None else None
    trajectory = Trajectory(
        trajectory_id=episode.trajectory_id,
        group_id=group_id,
        task_id=task.task_id,
        source=task.source,
        status=status,
        reward=verdict.reward if verdict else None,
        passed=verdict.passed if verdict else None,
        turns=len(episode.turns),
        prompt_tokens=record.prompt_tokens,
        response_tokens=int(sampled.loss_mask.sum()),
        total_tokens=len(sampled.token_ids),
        policy_versions=tuple(int(v) for v in np.unique(sampled.versions[sampled.loss_mask])),
        payload_sha256=payload.sha256() if payload else None,
        engine_s=episode.engine_s,
        sandbox_s=episode.sandbox_s,
        sandbox_start_s=episode.sandbox_start_s,
        verify_s=episode.verify_s,
        wall_s=time.monotonic() - start_s,
        error=error,
        tampered=verdict.tampered if verdict else (),
        contexts=len(sampled.contexts),
        drift=record.drift,
        notes=record.notes,
    )
    transcript = Transcript(
        trajectory_id=episode.trajectory_id,
        turns=tuple(episode.turns),
        patch=episode.patch,
        test_log=verdict.log if verdict else "",
    )
    return trajectory, payload, transcript
