"""vLLM inside one process: an `LLMEngine` that a single thread steps.

In-process because vLLM's own server processes cost three imports of the library at every start. The thread owns the
engine: requests, weight updates and statistics reach it as commands that it runs between two steps, so a weight update
needs no other protocol than "not now", and every token of a step belongs to exactly one policy version.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from configs.schema import EngineConfig
from infra.errors import EngineError
from rollout.engine import EngineLost, EngineStats, Generation

T = TypeVar("T")
_CPU_BLOCK_TOKENS = 32
"""Prefix-cache granularity on CPU: the smallest block that its attention kernels are made for."""


class VllmEngine:
    """Implements `Engine` for callers in the same process. Raises EngineLost once nothing more can come of it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        seed: int = 0,
        held: bool = False,
        on_lost: Callable[[EngineLost], None] = lambda _: None,
    ) -> None:
        """Starts loading in the engine's own thread; `await ready()` tells how it went.

        A `held` engine keeps its requests waiting until it has been given weights, or `release`d. `on_lost` is called
        if an engine that had been ready is lost.
        """
        self.config = config
        self.seed = seed
        self.held = held
        self.version = 0
        """Policy version that the next step samples under."""
        self.start_s: float | None = None
        self._engine: Any = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, Future[Generation]] = {}
        self._paused = held
        self._on_lost = on_lost
        self._stopping = False
        self._lost: EngineLost | None = None
        self._generated = self._prompted = self._prompt_hits = 0
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="vllm-engine", daemon=True)
        self._thread.start()

    # ---- for callers, on any event loop -----------------------------------------------------------------------------

    async def ready(self) -> None:
        """Returns when the model is loaded. Raises EngineError with the reason and a remedy."""
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        json_schema: str | None = None,
    ) -> Generation:
        """See `Engine.generate`. Cancelling it aborts the request."""
        done: Future[Generation] = Future()
        done.set_running_or_notify_cancel()  # the engine's thread sets it, whether or not somebody still waits
        request = (request_id, list(prompt_ids), max_tokens, temperature, list(stop_ids), json_schema)
        try:
            await self._call(lambda: self._add(done, *request))
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self.abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Drops a request, if it still runs; does not wait."""
        self._inbox.put(lambda: self._abort(request_id))

    async def stats(self) -> EngineStats:
        """Counters now."""
        return await self._call(self._stats)

    async def weight_transfer(self, method: str, **kwargs: Any) -> None:
        """One of the workers' weight transfer methods, between two steps. The pause that `start_weight_update` begins
        lasts until `finish`. If it fails half-way the weights are undefined and the engine is lost."""
        await self._call(lambda: self._transfer(method, kwargs))

    async def finish(self, version: int) -> None:
        """Ends a weight update: tokens from now on are sampled by `version`."""
        await self._call(lambda: self._finish(version))

    async def release(self) -> None:
        """Lets a held engine go on with the weights it was loaded with."""
        await self._call(self._resume)

    async def _call(self, work: Callable[[], T]) -> T:
        """Runs `work` in the engine's thread, between two steps."""
        if self._lost is not None:
            raise self._lost
        done: Future[T] = Future()

        def run() -> None:
            try:
                if self._lost is not None:
                    raise self._lost
                done.set_result(work())
            except BaseException as e:
                done.set_exception(e)

        self._inbox.put(run)
        return await asyncio.shield(asyncio.wrap_future(done))

    def shutdown(self) -> None:
        """Ends the thread; requests in flight raise EngineLost."""
        self._inbox.put(self._stop)
        self._thread.join(timeout=30.0)

    def _stop(self) -> None:
        self._stopping = True

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        """Loads, then steps while there is work. The one place where any error ends the engine."""
        try:
            self._load()
            self._loaded.set_result(None)
            while not self._stopping:
                self._run_commands()
                if self._running and not self._paused:
                    self._step()
            raise EngineLost("the engine was shut down")
        except BaseException as e:
            self._lose(e if isinstance(e, EngineLost) else EngineLost(f"vLLM failed: {type(e).__name__}: {e}"))
        while not self._stopping:  # whoever still asks is told
            self._inbox.get()()

    def _run_commands(self) -> None:
        """Runs what has arrived; waits for something to arrive if there is nothing to step."""
        while True:
            idle = self._paused or not self._running
            try:
                command = self._inbox.get(block=idle and not self._stopping)
            except queue.Empty:
                return
            command()
            if self._lost is not None:
                raise self._lost

    def _lose(self, error: EngineLost) -> None:
        self._lost = error
        if not self._loaded.done():
            self._loaded.set_exception(error)
        elif not self._stopping:
            self._on_lost(error)
        for future in self._running.values():
            future.set_exception(error)
        self._running.clear()

    def _load(self) -> None:
        start_s = time.monotonic()
        if not (Path(self.config.model) / "config.json").is_file():
            raise EngineLost(f"no HF checkpoint at {self.config.model}; set model to a folder with config.json")
        # Millions of objects are made and none is freed: the collector only costs time (about 1.5 s of 8).
        gc.disable()
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            from rollout.weight_transfer import register

            gc.freeze()
            register()  # vLLM's plug-in loader does it too, in its worker processes, where the project is installed
            _register_model_class(self.config.model)
            arguments = EngineArgs(**engine_arguments(self.config, self.seed))
            self._engine = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
            self._engine.set_weight_version(str(self.version))
        except (Exception, SystemExit) as e:
            raise EngineLost(_load_failure(self.config, e)) from e
        finally:
            gc.enable()
        self.start_s = time.monotonic() - start_s

    def _add(
        self,
        done: Future[Generation],
        request_id: str,
        prompt_ids: list[int],
        max_tokens: int,
        temperature: float,
        stop_ids: list[int],
        json_schema: str | None,
    ) -> None:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        if request_id in self._running:
            raise EngineError(f"request {request_id} is running already; ids must be unique")
        if json_schema is not None and self._engine.tokenizer is None:
            raise EngineError(f"structured output needs a tokenizer, and {self.config.model} has no tokenizer.json")
        try:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                stop_token_ids=stop_ids,
                seed=request_seed(self.seed, request_id) if self.config.device == "cpu" else None,
                ignore_eos=True,  # `stop_ids` says it all
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                structured_outputs=None if json_schema is None else StructuredOutputsParams(json=json_schema),
            )
            prompt = TokensPrompt(prompt_token_ids=prompt_ids)
            self._engine.add_request(request_id, prompt, params)
        except Exception as e:
            raise EngineError(f"the engine refused request {request_id}: {e}") from e
        self._running[request_id] = done

    def _abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._engine.abort_request([request_id])

    def _step(self) -> None:
        for output in self._engine.step():
            if not output.finished:
                continue
            self._prompted += len(output.prompt_token_ids)
            self._prompt_hits += output.num_cached_tokens or 0
            future = self._running.pop(output.request_id, None)
            if future is not None:
                generation = _generation(output.outputs[0])
                self._generated += len(generation.token_ids)
                future.set_result(generation)

    def _transfer(self, method: str, kwargs: dict[str, Any]) -> None:
        if method == "start_weight_update":
            self._paused = True
        try:
            self._engine.collective_rpc(method, kwargs=kwargs)
        except Exception as e:
            self._lost = EngineLost(f"a weight update failed in {method}: {type(e).__name__}: {e}")
            raise self._lost from e

    def _finish(self, version: int) -> None:
        self._transfer("finish_weight_update", {})
        self.version = version
        self._engine.set_weight_version(str(version))
        # Nothing computed under older weights may serve a later token: requests in flight keep their tokens (M6.4) and
        # have their keys and values computed anew, so that every probability is one that these weights give.
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._resume()

    def _resume(self) -> None:
        self._paused = self.held = False

    def _stats(self) -> EngineStats:
        scheduler = self._engine.engine_core.engine_core.scheduler
        running, waiting = scheduler.get_request_counts()
        return EngineStats(
            version=self.version,
            running=running,
            waiting=waiting,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
            cached_prompt_tokens=self._prompt_hits,
            kv_usage=scheduler.get_kv_cache_usage(),
            start_s=self.start_s or 0.0,
        )


def request_seed(seed: int, request_id: str) -> int:
    """Of one request's own random numbers: what it samples then depends on the weights, its prompt and this alone, not
    on what else is in the batch, nor on the replica. On a GPU requests have none: vLLM would draw the noise of each
    row of the batch by a kernel of its own."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=4).digest(), "big")


def engine_arguments(config: EngineConfig, seed: int) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs."""
    from vllm.config import WeightTransferConfig

    arguments: dict[str, Any] = {
        "model": config.model,
        "skip_tokenizer_init": not (Path(config.model) / "tokenizer.json").is_file(),
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
        "enable_prefix_caching": True,
        "async_scheduling": False,  # a step's tokens must belong to one policy version
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "weight_transfer_config": WeightTransferConfig(backend=config.weight_transfer),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.device == "cpu":
        arguments |= {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30), "block_size": _CPU_BLOCK_TOKENS}
        # Of a prompt that is read in parts vLLM turns back the request's random numbers, which a CPU's cannot be: every
        # request that a weight update interrupts is such a prompt.
        arguments["enable_chunked_prefill"] = False
    elif config.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    return arguments


def _register_model_class(model: str) -> None:
    """Lets vLLM look at the model's class in this process.

    It would start a process for that, which imports the library once more, whenever its cache in the home directory
    is cold: 8 s at the first start on a machine.
    """
    import json

    from vllm import ModelRegistry

    architectures = json.loads((Path(model) / "config.json").read_text()).get("architectures") or []
    for architecture in architectures:
        known = ModelRegistry.models.get(architecture)
        load = getattr(known, "load_model_cls", None)
        if load is not None:
            ModelRegistry.register_model(architecture, load())


def _generation(completion: Any) -> Generation:
    """From vLLM's output: flat log-probabilities (the sampled token's only) and spans of weight versions."""
    token_ids = tuple(completion.token_ids)
    logprobs = tuple(completion.logprobs.logprobs)
    versions: list[int] = []
    for span in completion.weight_versions or ():
        versions += [int(span.version)] * (span.end - span.start)
    if not len(token_ids) == len(logprobs) == len(versions):
        raise EngineError(
            f"vLLM returned {len(token_ids)} tokens, {len(logprobs)} log-probabilities and {len(versions)} versions"
        )
    reason: Literal["stop", "length"] = "stop" if completion.finish_reason == "stop" else "length"
    return Generation(token_ids=token_ids, logprobs=logprobs, versions=tuple(versions), finish_reason=reason)


def _load_failure(config: EngineConfig, error: BaseException) -> str:
    """What to tell the user."""
    text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    if "memory" in text.lower():
        key = "kv_cache_gib" if config.device == "cpu" else "gpu_memory_utilization"
        return f"vLLM could not get its memory ({text}); lower the engine's {key} or max_model_len"
    return f"vLLM could not load {config.model} ({text})"
