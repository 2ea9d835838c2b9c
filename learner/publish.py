"""The learner's end of weight publishing: from the ranks' parameters to every engine of a pool, requests in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from infra.errors import EngineError, LearnerError

if TYPE_CHECKING:
    import torch

    from rollout.engine_pool import TransferTarget

FullParameters = Callable[[], Iterator[tuple[str, "torch.Tensor"]]]
"""Yields (Hugging Face name, whole parameter), tied ones once; collective where parameters are sharded."""


class Publisher:
    """One rank's side of the transfer, set up once. Every rank has one, and all of them publish together.

    `parameters` are the policy's (`RankCore.policy_parameters`): names, dtypes and whole shapes are read from them
    without gathering (ZeRO 3 keeps the shape as `ds_shape`). `full` yields the same names in the same order, gathered,
    and with adapters merged in.
    """

    def __init__(
        self, target: TransferTarget, *, rank: int, parameters: Iterable[tuple[str, Any]], full: FullParameters
    ) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from rollout.weight_transfer import EngineSyncClient, register

        register()
        self.target = target
        self._client = EngineSyncClient(
            target.handles, workers=target.workers_per_replica, strict=target.backend == "nccl"
        )
        try:
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                self._init_info(rank), client=self._client, source=_source(parameters, full)
            )
        except EngineError as e:
            raise LearnerError(f"weight transfer could not be set up: {e}") from e

    def publish(self, version: int) -> float:
        """Gives every engine the parameters as they are now, under `version`; returns seconds. Collective.

        Tokens sampled after it returns carry the new version. Raises LearnerError if the engines did not take it.
        """
        start_s = time.monotonic()
        self._client.version = version
        try:
            self._trainer.send_weights()
        except EngineError as e:
            raise LearnerError(f"weights of version {version} did not reach the engines: {e}") from e
        return time.monotonic() - start_s

    @property
    def sent(self) -> dict[str, Any] | None:
        """On rank 0 with `ray_object`: the last update, for `EnginePool.remember`."""
        return getattr(self._trainer, "sent", None)

    def shutdown(self) -> None:
        """Releases communicators."""
        self._trainer.shutdown()

    def _init_info(self, rank: int) -> Any:
        if self.target.backend == "ray_object":
            from rollout.weight_transfer import RayObjectTrainerInitInfo

            return RayObjectTrainerInitInfo(rank=rank)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        # Rank 0 opens the rendezvous and tells the engines where; the other ranks take no part in it.
        return NCCLTrainerInitInfo(
            rank=rank,
            master_address=get_ip(),
            master_port=get_open_port(),
            world_size=1 + len(self.target.handles) * self.target.workers_per_replica,
        )


def _source(parameters: Iterable[tuple[str, Any]], full: FullParameters) -> Any:
    """A vLLM WeightSource over `full`."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    described = [ParamMeta(name, p.dtype, tuple(getattr(p, "ds_shape", p.shape))) for name, p in parameters]

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return list(described)

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(full())

    return Source()
