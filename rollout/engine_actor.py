"""One replica of an engine pool: the Ray actor around a `VllmEngine`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

from configs.schema import EngineConfig
from infra import process
from infra.errors import EngineError
from rollout.engine import EngineLost, EngineStats, Generation
from rollout.vllm_engine import VllmEngine


def environment(config: EngineConfig) -> dict[str, str]:
    """Variables that must be set before vLLM is imported."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "gagar_weight_transfer",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # tensor parallel workers; a fork cannot use CUDA
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    if config.device == "cpu":
        # The CPU backend leaves the threads alone, so OpenMP's own variable holds.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.threads)}
        # Threads that spin while they wait starve whoever shares the cores: 1,000 tokens/s instead of 6,000.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        # oneDNN keeps a kernel for each number of rows that a step had, 1,024 of them: 450 MiB in two minutes of full
        # load. A step needs one for each shape of the model's weights, a handful.
        env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "32"
        # vLLM keeps 512 MiB of grammars, but every request of a grader has one of its own. What xgrammar's cache counts
        # is not all that it keeps: with room for 8 MiB it held 100 after 1,750 grammars, and went on growing.
        env["VLLM_XGRAMMAR_CACHE_MB"] = "1"
        if config.enforce_eager:
            # A helper of the sampler is compiled even then: 12 s of g++ at the first token, on every start.
            env["TORCH_COMPILE_DISABLE"] = "1"
    return env


class EngineActor:
    """One replica as a Ray actor. Its weight transfer methods are those that vLLM's trainers call.

    If its engine is lost after it was ready, the process ends, so that Ray restarts the actor. A restarted actor would
    sample from the checkpoint's weights, so it holds its requests until the pool calls `adopt`.
    """

    def __init__(self, config: EngineConfig, name: str, seed: int, held: bool = False) -> None:
        """`held`: keeps its requests until `adopt`, as after a restart."""
        import ray

        process.enter()
        os.environ.update(environment(config))  # where Ray hands out a worker that it had prepared without them
        self._name = name
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._engine = VllmEngine(config, seed=seed, held=held or restarted, on_lost=self._end)
        self._updating = asyncio.Lock()
        self._published_to = False
        """A learner holds the lock."""

    async def ready(self) -> EngineStats:
        """Returns when the engine is loaded. Raises EngineError naming this replica."""
        try:
            await self._engine.ready()
        except EngineError as e:
            raise EngineError(f"{self._name}: {e}") from None
        return await self._engine.stats()

    async def pid(self) -> int:
        """Process id on its node."""
        return os.getpid()

    async def gone(self) -> None:
        """Never returns: a call that fails when the actor does."""
        await asyncio.Event().wait()

    async def generate(self, **request: Any) -> Generation:
        """See `Engine.generate`."""
        await self._engine.ready()
        return await self._engine.generate(**request)

    async def abort(self, request_id: str) -> None:
        """Drops a request, if it still runs."""
        self._engine.abort(request_id)

    async def stats(self) -> EngineStats:
        """Counters now."""
        return await self._engine.stats()

    async def adopt(self, version: int, update_info: dict[str, Any] | None) -> None:
        """After a restart, or before it joins: takes the weights that the other replicas have; None means those of the
        checkpoint."""
        async with self._updating:
            if not self._engine.held and self._engine.version >= version:  # an update came first
                return
            if update_info is None:
                await self._engine.release()
                return
            await self._engine.weight_transfer("start_weight_update")
            await self._engine.weight_transfer("update_weights", update_info=update_info)
            await self._engine.finish(version)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """vLLM's handshake; `request` is a WeightTransferInitRequest."""
        await self._engine.ready()
        await self._engine.weight_transfer("init_weight_transfer_engine", init_info=request.init_info)

    async def start_weight_update(self) -> None:
        """Pauses after the current step, requests in flight kept. An update that its learner did not live to finish is
        closed first, and nothing is sampled between: there is one learner at a time."""
        if self._published_to:
            await self._engine.weight_transfer("finish_weight_update")
        else:
            await self._updating.acquire()
            self._published_to = True
        await self._engine.weight_transfer("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        """Loads; `request` is a WeightTransferUpdateRequest."""
        await self._engine.weight_transfer("update_weights", update_info=request.update_info)

    async def finish_weight_update(self, version: int) -> None:
        """Takes the new version and goes on."""
        await self._engine.finish(version)
        self._published_to = False
        self._updating.release()

    async def shutdown_weight_transfer_engine(self) -> None:
        """Releases communicators."""
        await self._engine.weight_transfer("shutdown_weight_transfer_engine")

    def _end(self, error: EngineLost) -> None:
        """Called in the engine's thread. The pause lets the callers' answers out."""
        print(f"{self._name}: {error}; the actor restarts", file=sys.stderr, flush=True)
        threading.Timer(1.0, os._exit, (1,)).start()
