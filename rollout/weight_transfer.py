"""New weights for running engines, through vLLM's own weight transfer API.

Importing this module imports parts of vLLM: engines and learner ranks do, the driver does not. vLLM brings NCCL; the
backend here, `ray_object`, is for machines without it: rank 0 puts every parameter into Ray's object store once, and
each engine reads it there without another copy on its node.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)

from infra.errors import EngineError
from rollout.engine import EngineLost

RAY_OBJECT = "ray_object"
CHUNK_BYTES = 256 * 2**20
"""Parameters that become one object; bounds the extra memory of rank 0."""


def register() -> None:
    """Makes `ray_object` known to vLLM's two factories. The entry point of `vllm.general_plugins`; safe to repeat."""
    for factory, class_name in (
        (WeightTransferEngineFactory, "RayObjectWeightTransferEngine"),
        (WeightTransferTrainerFactory, "RayObjectTrainer"),
    ):
        if RAY_OBJECT not in factory._registry:
            factory.register_engine(RAY_OBJECT, __name__, class_name)


@dataclass
class RayObjectInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up: a reference carries its own address."""


@dataclass
class RayObjectUpdateInfo(WeightTransferUpdateInfo):
    """What one update brings."""

    chunks: list[dict[str, Any]]
    """Each {"names", "dtypes", "shapes", "ref"}; `ref` is an ObjectRef of the parameters' bytes as flat arrays."""


class RayObjectWeightTransferEngine(WeightTransferEngine[RayObjectInitInfo, RayObjectUpdateInfo]):
    """The worker's side: loads checkpoint-format weights between the two halves of vLLM's layerwise reload."""

    init_info_cls = RayObjectInitInfo
    update_info_cls = RayObjectUpdateInfo

    def init_transfer_engine(self, init_info: RayObjectInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """The layers take checkpoint tensors again (CPU layers hold prepacked copies otherwise)."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its wait for an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: RayObjectUpdateInfo) -> None:
        """Loads every chunk."""
        for chunk in update_info.chunks:
            self.model.load_weights(_read(chunk))

    def finish_weight_update(self) -> None:
        """Repacks what was loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def _read(chunk: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) over the object store's own memory."""
    import ray

    arrays = ray.get(chunk["ref"])
    for name, dtype, shape, array in zip(chunk["names"], chunk["dtypes"], chunk["shapes"], arrays, strict=True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(array)
        yield name, flat.view(getattr(torch, dtype)).reshape(shape)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Gives an output head that shares the embedding's parameter the new values too.

    Checkpoints with tied embeddings hold no `lm_head.weight`, so the layerwise reload puts the head back as it was
    ("ParallelLMHead: Failed to load weights"). The shared parameter is new by then, but on a CPU the head multiplies by
    a copy that was packed when the old one was loaded.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    shared = {id(m.weight) for m in embeddings if not isinstance(m, ParallelLMHead)}
    for head in embeddings:
        if isinstance(head, ParallelLMHead) and id(head.weight) in shared:
            head.quant_method.process_weights_after_loading(head)


@dataclass
class RayObjectTrainerInitInfo(TrainerInitInfo):
    """The trainer's side needs to know its rank only."""

    backend: ClassVar[str] = RAY_OBJECT


class RayObjectTrainer(TrainerWeightTransferEngine[RayObjectTrainerInitInfo]):
    """The learner's side: rank 0 stores the parameters and drives the engines, the others help to gather them."""

    init_info_cls = RayObjectTrainerInitInfo
    sent: dict[str, Any] | None = None
    """On rank 0: the last update, kept for engines that restart."""

    @classmethod
    def trainer_init(cls, init_info: RayObjectTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """See the base class. Nothing is exchanged."""
        if source is None:
            raise ValueError(f"the {RAY_OBJECT} trainer needs a WeightSource")
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """One update. The engines pause only after everything is in the object store."""
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.sent = {"chunks": list(_store(self.source))}
        self.client.start_weight_update()
        self.client.update_weights(self.sent)
        self.client.finish_weight_update()


def _store(source: Any, chunk_bytes: int = CHUNK_BYTES) -> Iterator[dict[str, Any]]:
    """Puts the source's parameters into the object store, about `chunk_bytes` an object."""
    import ray

    chunk: dict[str, list[Any]] = {"names": [], "dtypes": [], "shapes": [], "arrays": []}
    size = 0

    def flush() -> dict[str, Any]:
        stored = {key: list(chunk[key]) for key in ("names", "dtypes", "shapes")}
        stored["ref"] = ray.put(list(chunk["arrays"]))
        for values in chunk.values():
            values.clear()
        return stored

    for name, tensor in source:
        # A copy: a gathered parameter is valid only until the source goes on.
        flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
        chunk["names"].append(name)
        chunk["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
        chunk["shapes"].append(list(tensor.shape))
        chunk["arrays"].append(flat.numpy())
        size += flat.numel()
        if size >= chunk_bytes:
            yield flush()
            size = 0
    if chunk["names"]:
        yield flush()


class EngineSyncClient:
    """Drives the replicas of one engine pool as vLLM's `VLLMWeightSyncClient`; every call waits for all of them.

    With `workers` processes a replica (its tensor parallel size), replica i's first one has transfer rank
    `rank_offset + i * workers`. A replica that dies is left out of the update, were it the only one: it gets the
    weights when it has restarted. Not if `strict`, where the others would wait for it in a collective. Raises
    EngineError.
    """

    def __init__(
        self, handles: Sequence[Any], *, workers: int = 1, strict: bool = False, timeout_s: float = 300.0
    ) -> None:
        self.handles = tuple(handles)
        self._left = self.handles
        """Those that have not died during this update."""
        self.workers = workers
        self.strict = strict
        self.timeout_s = timeout_s
        self.version = 0
        """The version that the next finished update gives the engines."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The handshake, with each replica's own rank."""
        calls = []
        self._left = self.handles
        for index, handle in enumerate(self.handles):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self.workers
            calls.append(handle.init_weight_transfer_engine.remote(WeightTransferInitRequest(init_info=info)))
        self._wait(calls, "the handshake")

    def start_weight_update(self) -> None:
        """Engines finish their step and pause; requests in flight stay."""
        self._left = self.handles
        self._wait([h.start_weight_update.remote() for h in self.handles], "the pause")

    def update_weights(self, update_info: Any) -> None:
        """Engines load."""
        request = WeightTransferUpdateRequest(update_info=update_info)
        self._wait([h.update_weights.remote(request) for h in self._left], "loading")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Engines take the new version and go on."""
        version = self.version if weight_version is None else int(weight_version)
        self._wait([h.finish_weight_update.remote(version) for h in self._left], "the end")

    def shutdown_weight_transfer_engine(self) -> None:
        """Releases communicators."""
        self._wait([h.shutdown_weight_transfer_engine.remote() for h in self._left], "shutting down")

    def _wait(self, calls: list[Any], doing: str) -> None:
        import ray
        from ray.exceptions import GetTimeoutError, NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError

        left = []
        for handle, call in zip(self._left, calls, strict=True):
            try:
                ray.get(call, timeout=self.timeout_s)
            except (RayActorError, NodeDiedError, OutOfMemoryError, RayTaskError) as e:
                if isinstance(e, RayTaskError) and not isinstance(e.cause, EngineLost):
                    raise
                if self.strict:
                    raise EngineError(f"an engine was lost during a weight update ({doing}): {e}") from e
                continue
            except GetTimeoutError:
                raise EngineError(
                    f"an engine did not answer within {self.timeout_s:g} s of a weight update ({doing})"
                ) from None
            left.append(handle)
        self._left = tuple(left)
