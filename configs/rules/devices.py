"""Devices, and the actors that stand on them."""

from __future__ import annotations

from collections.abc import Iterator

from configs.problems import Problem
from configs.rules.findings import engines_of, idle, problem
from configs.schema import Resources, RunConfig


def engine_device(config: RunConfig) -> Iterator[Problem]:
    """Keys of the other device, and GPUs that do not fit."""
    for key, engine in engines_of(config):
        if engine.device == "cpu":
            yield from idle(config, f"{key}.gpu_memory_utilization", f"{key}.device = cpu", "use kv_cache_gib")
            if engine.tensor_parallel_size > 1:
                yield problem(config, f"{key}.tensor_parallel_size", "works with device cuda only; set it to 1")
            if engine.weight_transfer == "nccl":
                yield problem(config, f"{key}.weight_transfer", "works with device cuda only; choose ray_object")
        else:
            yield from idle(config, f"{key}.kv_cache_gib", f"{key}.device = cuda", "use gpu_memory_utilization")
            yield from idle(config, f"{key}.threads", f"{key}.device = cuda")
        wanted = engine.tensor_parallel_size if engine.device == "cuda" else 0
        yield from _gpus(config, f"{key}.resources", engine.resources, wanted, engine.device)


def learner_device(config: RunConfig) -> Iterator[Problem]:
    """Keys of the other device, and ZeRO stages that an option needs."""
    learner = config.learner
    if learner.device == "cuda":
        yield from idle(config, "learner.threads", "learner.device = cuda")
    if learner.offload_optimizer and learner.device == "cpu":
        yield problem(config, "learner.offload_optimizer", "has no effect on learner.device = cpu; set it to false")
    elif learner.offload_optimizer and learner.zero_stage == 0:
        yield problem(config, "learner.offload_optimizer", "needs learner.zero_stage >= 1; raise the stage")
    wanted = 1 if learner.device == "cuda" else 0
    yield from _gpus(config, "learner.resources", learner.resources, wanted, learner.device)
    if learner.dtype == "bfloat16" and learner.zero_stage == 0:
        yield problem(
            config,
            "learner.zero_stage",
            "would accumulate gradients in bfloat16; raise it to 1 or more, or choose learner.dtype = float32",
        )
    engine = config.engine
    if engine.device == "cuda" and engine.weight_transfer == "ray_object" and engine.tensor_parallel_size > 1:
        yield problem(
            config,
            "engine.weight_transfer",
            f"reaches engines on one GPU only, and engine.tensor_parallel_size = {engine.tensor_parallel_size}; "
            "choose nccl",
        )
    if engine.weight_transfer == "nccl" and learner.device == "cpu" and engine.device == "cuda":
        yield problem(
            config, "engine.weight_transfer", "needs learner.device = cuda as well; choose ray_object for a CPU learner"
        )


def _gpus(config: RunConfig, key: str, resources: Resources, wanted: int, device: str) -> Iterator[Problem]:
    """0 asks for what is wanted; a share of one GPU lets actors live together on it."""
    if resources.gpus in (0, wanted) or (wanted == 1 and resources.gpus < 1):
        return
    if device == "cpu":
        yield problem(config, f"{key}.gpus", "would leave GPUs idle, because device = cpu; set it to 0")
    else:
        yield problem(config, f"{key}.gpus", f"does not fit the {wanted} GPUs that one actor uses; set it to {wanted}")


def worker_resources(config: RunConfig) -> Iterator[Problem]:
    """Rollout and grader workers compute on CPUs, and Ray counts CPUs and GPUs apart from custom resources."""
    pools = {"rollout.resources": config.rollout.resources}
    if config.grader is not None:
        pools["grader.resources"] = config.grader.resources
    for key, resources in pools.items():
        if resources.gpus:
            yield problem(config, f"{key}.gpus", "would leave GPUs idle, because these workers use none; set it to 0")
    pools |= {f"{key}.resources": engine.resources for key, engine in engines_of(config)}
    pools["learner.resources"] = config.learner.resources
    for key, resources in pools.items():
        for name in resources.custom:
            if name.upper() in ("CPU", "GPU", "MEMORY", "OBJECT_STORE_MEMORY"):
                yield problem(config, f"{key}.custom.{name}", "is no custom resource; use cpus and gpus")


def scaling(config: RunConfig) -> Iterator[Problem]:
    """A pool that follows its queue starts inside its bounds."""
    if config.grader is None:
        yield from idle(config, "scaling.grader", "there is no grader")
    sizes = {"rollout": config.rollout.workers, "grader": config.grader.workers if config.grader else None}
    for name, limits in (("rollout", config.scaling.rollout), ("grader", config.scaling.grader)):
        workers = sizes[name]
        if limits is not None and workers is not None and not limits.min <= workers <= limits.max:
            yield problem(
                config,
                f"{name}.workers",
                f"is outside scaling.{name} (min {limits.min}, max {limits.max}); start inside it, or widen it",
            )
