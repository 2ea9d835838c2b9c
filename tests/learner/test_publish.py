"""The transfer of weights without an engine: what goes into the object store comes out the same, in the right order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from learner.publish import Publisher
from rollout.engine_pool import TransferTarget

pytestmark = pytest.mark.e2e
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARAMETERS = {
    "model.embed_tokens.weight": torch.arange(600, dtype=torch.float32).reshape(20, 30),
    "model.layers.0.weight": torch.linspace(-1, 1, 77).to(torch.bfloat16),
    "model.scale": torch.tensor(3.5),
    "model.layers.1.weight": torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).T,
}


class Engine:
    """The weight transfer methods of an engine actor; keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(("init", request.init_info))

    def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    def update_weights(self, request: Any) -> None:
        from rollout.weight_transfer import _read

        tensors = {name: tensor.clone() for chunk in request.update_info["chunks"] for name, tensor in _read(chunk)}
        self.calls.append(("update", tensors))

    def finish_weight_update(self, version: int) -> None:
        self.calls.append(("finish", version))


class Handle:
    """An actor handle whose actor lives in this process: no second import of vLLM just to read a request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: ray.put(getattr(self.engine, method)(*args)))


def gathered() -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters in one buffer that is written over, as under ZeRO 3: valid only while yielded."""
    for name, tensor in PARAMETERS.items():
        buffer = tensor.clone()
        yield name, buffer
        buffer.zero_()


def publisher(handles: list[Any], rank: int = 0, full: Any = gathered) -> Publisher:
    target = TransferTarget(backend="ray_object", handles=tuple(handles), workers_per_replica=1)
    return Publisher(target, rank=rank, parameters=PARAMETERS.items(), full=full)


def test_every_engine_gets_every_parameter_bit_for_bit(ray_session: None) -> None:
    engines = [Engine(), Engine()]
    publishing = publisher([Handle(e) for e in engines])
    assert publishing.publish(7) > 0.0
    for engine in engines:
        (_, _), (_, received), (_, version) = engine.calls
        assert [name for name, _ in engine.calls] == ["start", "update", "finish"]
        assert version == 7
        assert list(received) == list(PARAMETERS)
        for name, tensor in PARAMETERS.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor), name
    assert publishing.sent is not None


def test_other_ranks_only_help_to_gather(ray_session: None) -> None:
    engine = Engine()
    seen: list[str] = []

    def full() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in PARAMETERS.items():
            seen.append(name)
            yield name, tensor

    helping = publisher([Handle(engine)], rank=1, full=full)
    helping.publish(1)
    assert seen == list(PARAMETERS)
    assert engine.calls == []
    assert helping.sent is None


def test_parameters_are_split_into_objects_of_bounded_size(ray_session: None) -> None:
    from rollout.weight_transfer import _read, _store

    chunks = list(_store(gathered(), chunk_bytes=150))
    assert [chunk["names"] for chunk in chunks] == [
        ["model.embed_tokens.weight"],
        ["model.layers.0.weight"],
        ["model.scale", "model.layers.1.weight"],
    ]
    assert {name: tensor.shape for chunk in chunks for name, tensor in _read(chunk)} == {
        name: tensor.shape for name, tensor in PARAMETERS.items()
    }


def test_sharded_parameters_are_described_whole(ray_session: None) -> None:
    from learner.publish import _source

    shard = torch.nn.Parameter(torch.zeros(0))
    shard.ds_shape = torch.Size([4, 5])  # type: ignore[attr-defined]
    (meta,) = _source([("w", shard)], gathered).metadata()
    assert (meta.name, meta.dtype, meta.shape) == ("w", torch.float32, (4, 5))


def test_a_dead_engine_is_left_out_and_the_weights_are_kept_for_it(ray_session: None) -> None:
    dead = ray.remote(Engine).options(num_cpus=0).remote()
    ray.get(dead.__ray_ready__.remote())
    ray.kill(dead)
    live = Engine()
    publisher([dead, Handle(live)]).publish(2)
    assert [name for name, _ in live.calls] == ["start", "update", "finish"]
    alone = publisher([dead])
    alone.publish(3)
    assert alone.sent is not None
    assert [name for chunk in alone.sent["chunks"] for name in chunk["names"]]


def test_replicas_take_consecutive_places_in_a_communicator(ray_session: None) -> None:
    """With NCCL each worker process needs a rank of its own: rank 0 is the learner's."""
    from rollout.weight_transfer import EngineSyncClient

    engines = [Engine() for _ in range(3)]
    client = EngineSyncClient([Handle(e) for e in engines], workers=4, strict=True)
    client.init_weight_transfer_engine({"master_address": "10.0.0.1", "rank_offset": 1, "world_size": 13})
    told = [info for engine in engines for _, info in engine.calls]
    assert [info["rank_offset"] for info in told] == [1, 5, 9]
    assert {info["world_size"] for info in told} == {13}
