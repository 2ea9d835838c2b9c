"""The rollout worker: a Ray actor that runs the agent loop of many trajectories at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from configs.schema import RolloutConfig
from envs.sandbox import make_provider
from envs.task import Task
from rollout.agent import run_episode
from rollout.chat import ChatFormat
from rollout.engine import Engine, EngineClient
from rollout.trajectory import Payload, Status, Trajectory, Transcript


class RolloutWorker:
    """Its methods are coroutines; how many trajectories run at once is bounded by the pool that calls it."""

    def __init__(self, config: RolloutConfig, model_dir: str, engine: Engine) -> None:
        """Raises ConfigError or SandboxError where the checkpoint's chat format or the sandbox cannot be had."""
        self._config = config
        self._chat = ChatFormat.load(model_dir)
        self._chat.initial(config.system_prompt, "")
        self._engine = engine
        self._provider = make_provider(config.sandbox)

    async def ping(self) -> bool:
        """Answers while the worker lives."""
        return True

    async def use_engines(self, replicas: Mapping[int, Any]) -> None:
        """The engines from now on: some have come or gone."""
        if isinstance(self._engine, EngineClient):
            self._engine.use(replicas)

    async def rollout(
        self, task: Task, trajectory_id: str, group_id: str
    ) -> tuple[Trajectory, Payload | None, Transcript]:
        """One trajectory as three values, so that a caller with `num_returns=3` fetches the metadata only.

        Never raises: a fault of ours masks this one trajectory, and is logged in full.
        """
        start_s = time.monotonic()
        try:
            return await run_episode(
                task=task,
                trajectory_id=trajectory_id,
                group_id=group_id,
                engine=self._engine,
                chat=self._chat,
                provider=self._provider,
                config=self._config,
            )
        except Exception as error:
            logging.getLogger(__name__).exception("trajectory %s failed", trajectory_id)
            detail = f"fault in the rollout worker: {type(error).__name__}: {error}"
            trajectory = lost_trajectory(task, trajectory_id, group_id, detail, time.monotonic() - start_s)
            return trajectory, None, Transcript(trajectory_id=trajectory_id, turns=(), patch="", test_log="")


def lost_trajectory(task: Task, trajectory_id: str, group_id: str, error: str, wall_s: float) -> Trajectory:
    """A trajectory of which nothing is left: masked as a lost sandbox, since that is what was lost with it (M1.3)."""
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        task_id=task.task_id,
        source=task.source,
        status=Status.INFRA_SANDBOX,
        reward=None,
        passed=None,
        turns=0,
        prompt_tokens=0,
        response_tokens=0,
        total_tokens=0,
        policy_versions=(),
        payload_sha256=None,
        engine_s=0.0,
        sandbox_s=0.0,
        verify_s=0.0,
        wall_s=wall_s,
        error=error,
    )
