"""The rollout worker: a Ray actor that runs the agent loop of many trajectories at once."""

from __future__ import annotations

from configs.schema import RolloutConfig
from envs.sandbox import make_provider
from envs.task import Task
from rollout.agent import run_episode
from rollout.chat import ChatFormat
from rollout.engine import Engine
from rollout.trajectory import Payload, Trajectory, Transcript


class RolloutWorker:
    """Its methods are coroutines; how many trajectories run at once is bounded by the pool that calls it."""

    def __init__(self, config: RolloutConfig, model_dir: str, engine: Engine) -> None:
        """Raises ConfigError or SandboxError where the checkpoint's chat format or the sandbox cannot be had."""
        self._config = config
        self._chat = ChatFormat.load(model_dir)
        self._engine = engine
        self._provider = make_provider(config.sandbox)

    async def ping(self) -> bool:
        """Answers while the worker lives."""
        return True

    async def rollout(
        self, task: Task, trajectory_id: str, group_id: str
    ) -> tuple[Trajectory, Payload | None, Transcript]:
        """One trajectory as three values, so that a caller with `num_returns=3` fetches the metadata only."""
        return await run_episode(
            task=task,
            trajectory_id=trajectory_id,
            group_id=group_id,
            engine=self._engine,
            chat=self._chat,
            provider=self._provider,
            config=self._config,
        )
