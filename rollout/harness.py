"""Rollouts by harnesses that are not ours: they talk to the gateway, and what they leave in the sandbox is verified.

    harness -> [gateway: one session, one token] -> engine        its commands -> [sandbox] -> verified as always

The budgets are those of the built-in loop (M1.3): turns are the policy's replies, tokens those of all its contexts.
A harness that fails by itself masks the trajectory; one that gives up, or meets a budget, leaves what is verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from configs.schema import BuiltinHarness, CommandHarness, LimitsConfig, RolloutConfig
from envs.sandbox import CommandResult, Sandbox, SandboxProvider
from envs.task import Task
from envs.verifier import Verification
from infra.errors import GagarError, HarnessError, WorkspaceError
from rollout.agent import Episode, Record, conclude
from rollout.chat import ChatFormat
from rollout.engine import Engine
from rollout.gateway.rendering import Renderer
from rollout.gateway.server import Endpoint, Gateway
from rollout.gateway.session import Session
from rollout.trajectory import Payload, Status, Trajectory, Transcript


class CommandTimeUsedError(GagarError):
    """The budget of command time is used up."""


class Commands:
    """A rollout's sandbox with the budgets of commands, for a harness that lives outside of it."""

    def __init__(self, sandbox: Sandbox, session: Session, limits: LimitsConfig) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self.spent_s = 0.0
        """Command time so far."""
        self._session = session

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run one command, for at most `timeout_s` and what the limits allow.

        Raises SandboxError when the sandbox is lost, CommandTimeUsedError once the budget is used up.
        """
        left_s = self.limits.command_budget_s - self.spent_s
        if left_s > 0.0:
            timeout_s = min(timeout_s, self.limits.command_timeout_s, left_s)
            result = await self.sandbox.run(command, timeout_s=timeout_s)
            self.spent_s += result.duration_s
            self._session.ran(result.exit_code, result.duration_s)
        if left_s <= 0.0 or self.spent_s >= self.limits.command_budget_s:
            raise CommandTimeUsedError(
                f"the commands took rollout.limits.command_budget_s = {self.limits.command_budget_s:g} s"
            )
        return result


class Harness(Protocol):
    """A program that solves a task with a policy and a sandbox."""

    async def run(self, *, task: Task, endpoint: Endpoint, commands: Commands) -> Status:
        """Work on the task until it is done or given up.

        Raises SandboxError, CommandTimeUsedError, and HarnessError for what is the harness's own fault or came of a
        call that the gateway refused.
        """
        ...


def make_harness(config: RolloutConfig) -> Harness | None:
    """The harness that a configuration names; None for the built-in loop. Raises ConfigError where it is not there."""
    if isinstance(config.harness, BuiltinHarness):
        return None
    if isinstance(config.harness, CommandHarness):
        from rollout.harness_command import CommandLine

        return CommandLine(config.harness)
    from rollout.harness_mini import MiniSweAgent

    return MiniSweAgent(config.harness)


@dataclass(slots=True, kw_only=True)
class _HarnessEpisode(Episode):
    """A trajectory that a harness runs."""

    harness: Harness
    gateway: Gateway
    session: Session

    async def run(self) -> tuple[Status, Verification]:
        """See `Episode.run`."""
        sandbox = await self.start()
        commands = Commands(sandbox, self.session, self.limits)
        try:
            async with self.gateway.serving(self.session) as endpoint:
                status = await self._work(endpoint, commands)
            self.turns = list(self.session.turns())
            return status, await self.verify(sandbox)
        finally:
            self.turns = list(self.session.turns())
            self.engine_s = self.session.engine_s
            self.sandbox_s += commands.spent_s
            await sandbox.close()

    def record(self) -> Record:
        """See `Episode.record`."""
        session = self.session
        return Record(
            payload=session.payload(),
            prompt_tokens=session.prompt_tokens,
            drift=session.drift,
            notes=session.notes(),
        )

    async def _work(self, endpoint: Endpoint, commands: Commands) -> Status:
        """How it ended. What the gateway knows goes before what the harness makes of it."""
        failure: HarnessError | None = None
        status = Status.SUBMITTED
        try:
            status = await self.harness.run(task=self.task, endpoint=endpoint, commands=commands)
        except CommandTimeUsedError:
            status = Status.TIME_LIMIT
        except HarnessError as error:
            failure = error
        session = self.session
        if session.lost is not None:
            raise session.lost
        if session.contexts == 0:
            if session.end is Status.TOKEN_LIMIT:
                raise WorkspaceError(
                    f"the harness's first prompt of {self.task.task_id} does not fit rollout.limits.max_total_tokens = "
                    f"{self.limits.max_total_tokens}; raise it, or give the harness shorter prompts"
                )
            raise failure or HarnessError("the harness ended without a reply of the policy; see the worker's log")
        if session.end is not None:
            return session.end
        if failure is not None:
            raise failure
        return status


async def run_harness_episode(
    *,
    harness: Harness,
    gateway: Gateway,
    task: Task,
    trajectory_id: str,
    group_id: str,
    engine: Engine,
    chat: ChatFormat,
    provider: SandboxProvider,
    config: RolloutConfig,
) -> tuple[Trajectory, Payload | None, Transcript]:
    """Sample and verify one trajectory. Never raises for what was lost: see `rollout.agent.run_episode`."""
    session = Session(
        trajectory_id=trajectory_id,
        engine=engine,
        renderer=Renderer(chat),
        limits=config.limits,
        temperature=config.sampling.temperature,
    )
    episode = _HarnessEpisode(
        task=task,
        trajectory_id=trajectory_id,
        provider=provider,
        config=config,
        harness=harness,
        gateway=gateway,
        session=session,
    )
    return await conclude(episode, group_id)
