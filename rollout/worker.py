"""The rollout worker: a Ray actor that runs the agent loop of many trajectories at once."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import CommandHarness, RolloutConfig
from envs.sandbox import make_provider
from envs.task import Split, Task
from infra import process
from infra.errors import StorageError
from rollout.agent import run_episode
from rollout.chat import ChatFormat
from rollout.engine import Engine, EngineClient
from rollout.gateway.server import Gateway, open_folder
from rollout.harness import make_harness, run_harness_episode
from rollout.spool import read_rollout, write_rollout
from rollout.trajectory import Payload, Status, Trajectory, Transcript


class RolloutWorker:
    """Its methods are coroutines; how many trajectories run at once is bounded by the pool that calls it."""

    def __init__(self, config: RolloutConfig, model_dir: str, engine: Engine, keep: Path | None = None) -> None:
        """`keep`: folder that finished rollouts of training tasks are written to, beside the object store; None: none.

        Raises ConfigError or SandboxError where the checkpoint's chat format or the sandbox cannot be had.
        """
        process.enter()
        self._keep = keep
        self._config = config
        self._chat = ChatFormat.load(model_dir)
        self._chat.initial(config.system_prompt, "")
        self._engine = engine
        self._harness = make_harness(config)
        # A command in the sandbox reaches the gateway by a socket in a folder that the sandbox sees.
        inside = config.harness if isinstance(config.harness, CommandHarness) else None
        folder = open_folder() if inside is not None else None
        self._gateway = Gateway(folder)
        self._provider = make_provider(config.sandbox, [] if inside is None else [str(folder), *inside.paths])
        self._name = f"{platform.node()}:{os.getpid()}"

    async def ping(self) -> bool:
        """Answers while the worker lives."""
        return True

    async def use_engines(self, replicas: Mapping[int, Any]) -> None:
        """The engines from now on: some have come or gone."""
        if isinstance(self._engine, EngineClient):
            self._engine.use(replicas)

    async def close(self) -> None:
        """End the sandboxes that were started ahead. No trajectory can be sampled afterwards."""
        await self._provider.close()

    async def rollout(
        self, task: Task, trajectory_id: str, group_id: str
    ) -> tuple[Trajectory, Payload | None, Transcript]:
        """One trajectory as three values, so that a caller with `num_returns=3` fetches the metadata only.

        Never raises: a fault of ours masks this one trajectory, and is logged in full.
        """
        start_s = time.monotonic()
        try:
            trajectory, payload, transcript = await self._episode(task, trajectory_id, group_id)
            trajectory = replace(trajectory, worker=self._name)
            wanted = task.split is Split.TRAIN and not trajectory.status.masked
            if self._keep is not None and payload is not None and wanted:
                written = await asyncio.to_thread(self._write, self._keep, trajectory, payload, transcript)
                trajectory = replace(trajectory, unwritten=not written)
            return trajectory, payload, transcript
        except Exception as error:
            logging.getLogger(__name__).exception("trajectory %s failed", trajectory_id)
            detail = f"fault in the rollout worker: {type(error).__name__}: {error}"
            wall_s = time.monotonic() - start_s
            trajectory = lost_trajectory(
                task, trajectory_id, group_id, Status.INFRA_WORKER, detail, wall_s, worker=self._name
            )
            return trajectory, None, Transcript(trajectory_id=trajectory_id, turns=(), patch="", test_log="")

    async def _episode(
        self, task: Task, trajectory_id: str, group_id: str
    ) -> tuple[Trajectory, Payload | None, Transcript]:
        """By the built-in loop, or the run's harness where there is a sandbox to work in."""
        parts: dict[str, Any] = {
            "task": task,
            "trajectory_id": trajectory_id,
            "group_id": group_id,
            "engine": self._engine,
            "chat": self._chat,
            "provider": self._provider,
            "config": self._config,
        }
        if self._harness is None or not task.needs_sandbox:
            return await run_episode(**parts)
        return await run_harness_episode(harness=self._harness, gateway=self._gateway, **parts)

    async def restore(self, path: Path) -> tuple[Trajectory, Payload, Transcript]:
        """A rollout that an earlier session of the run finished, as `rollout` returned it. Raises StorageError."""
        return read_rollout(path)

    def _write(self, folder: Path, trajectory: Trajectory, payload: Payload, transcript: Transcript) -> bool:
        """Whether it is on the disk. One that takes no more costs a resume this rollout, not the run."""
        try:
            write_rollout(folder, trajectory, payload, transcript)
        except StorageError as error:
            logging.getLogger(__name__).error("%s", error)
            return False
        return True


def lost_trajectory(
    task: Task,
    trajectory_id: str,
    group_id: str,
    status: Status,
    error: str,
    wall_s: float,
    *,
    worker: str | None = None,
) -> Trajectory:
    """A trajectory of which nothing is left: masked (M1.3), with the class of what was lost."""
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        task_id=task.task_id,
        source=task.source,
        status=status,
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
        worker=worker,
    )
