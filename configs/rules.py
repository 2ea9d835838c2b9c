"""The rules of `configs.check`: what cannot run in combination, and keys without effect in this combination.

Each rule is a function that yields problems; `RULES` is the whole list, and each has tests of its own. Keys without
effect count only if the user wrote them: defaults are silent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from configs.models import missing_files, read_facts
from configs.problems import KeyPath, Problem, is_set, show, value_at
from configs.schema import (
    AdvantageMode,
    EndpointGraderBackend,
    EngineConfig,
    MinirepoSource,
    RemoteSandbox,
    Resources,
    RunConfig,
    VllmGraderBackend,
)


def _problem(config: RunConfig, dotted: str, message: str) -> Problem:
    path: KeyPath = tuple(dotted.split("."))
    try:
        value = value_at(config, dotted)
    except (AttributeError, KeyError):
        return Problem(path=path, message=message)
    plain = None if isinstance(value, BaseModel | dict) else show(_plain(value))
    return Problem(path=path, message=message, shown=plain)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else getattr(value, "value", value)


def _idle(config: RunConfig, dotted: str, why: str, remedy: str = "remove the key") -> Iterator[Problem]:
    """A key the user wrote that nothing would read; null says so itself."""
    if is_set(config, dotted) and value_at(config, dotted) is not None:
        yield replace(_problem(config, dotted, f"has no effect, because {why}; {remedy}"), idle=True)


# ---- sources and groups ---------------------------------------------------------------------------------------------


def quotas(config: RunConfig) -> Iterator[Problem]:
    """A batch needs groups, and the same task twice in a batch is a mistake."""
    if sum(source.groups_per_step for source in config.sources.values()) == 0:
        yield _problem(config, "sources", "no source has a quota; set groups_per_step above 0 for at least one source")
    streams: dict[tuple[Any, ...], str] = {}
    for name, source in config.sources.items():
        kinds = tuple(sorted(source.kinds)) if isinstance(source, MinirepoSource) else ()
        stream = (source.type, source.seed, kinds)
        if stream in streams:
            yield _problem(
                config,
                f"sources.{name}.seed",
                f"gives the same tasks as sources.{streams[stream]}; choose another one",
            )
        streams.setdefault(stream, name)
        if not name or not all(c.isalnum() or c in "_-" for c in name):
            yield _problem(config, f"sources.{name}", "is not a usable name; use letters, digits, _ and -")


def groups(config: RunConfig) -> Iterator[Problem]:
    """M1.3: a group whose valid trajectories can never reach the minimum is always skipped."""
    algorithm = config.algorithm
    if algorithm.min_valid > algorithm.group_size:
        yield _problem(
            config,
            "algorithm.min_valid",
            f"is above algorithm.group_size = {algorithm.group_size}, so every group would be skipped; lower it",
        )
    wanted = sum(source.groups_per_step for source in config.sources.values())
    if config.scheduler.max_inflight_groups < wanted:
        yield _problem(
            config,
            "scheduler.max_inflight_groups",
            f"is below the {wanted} groups of one batch (the quotas together); raise it to {wanted} at least",
        )


def algorithm_keys(config: RunConfig) -> Iterator[Problem]:
    """Constants of a mode that is not chosen (M4.6)."""
    mode = config.algorithm.mode
    if mode is not AdvantageMode.REDISTRIBUTE:
        yield from _idle(
            config,
            "algorithm.lambda_max",
            f"algorithm.mode = {mode.value} has no cap",
            "remove it, or choose mode redistribute",
        )
    if mode is AdvantageMode.OUTCOME:
        yield from _idle(config, "algorithm.rubric", "algorithm.mode = outcome uses no quality factors")


def grading(config: RunConfig) -> Iterator[Problem]:
    """Quality factors come from a grader, and only code groups have them (M1, last paragraph)."""
    mode = config.algorithm.mode
    code = any(isinstance(s, MinirepoSource) and s.groups_per_step > 0 for s in config.sources.values())
    if mode is AdvantageMode.OUTCOME:
        if config.grader is not None:
            yield from _idle(config, "grader", "algorithm.mode = outcome uses no grades", "set grader: null")
    elif not code:
        why = "no code source has a quota, and only code groups are graded"
        yield from _idle(config, "algorithm.mode", why, "set mode: outcome, or give a minirepo source a quota")
        if config.grader is not None:
            yield from _idle(config, "grader", why, "set grader: null, or give a minirepo source a quota")
    elif config.grader is None:
        yield Problem(
            path=("grader",),
            message=f"is missing, and algorithm.mode = {mode.value} needs grades; add a grader, or choose mode outcome",
        )


# ---- budgets --------------------------------------------------------------------------------------------------------


def token_budgets(config: RunConfig) -> Iterator[Problem]:
    """A trajectory must fit the engine's context and one packed row of the learner."""
    limits, key = config.rollout.limits, "rollout.limits.max_total_tokens"
    if limits.max_total_tokens > config.engine.max_model_len:
        yield _problem(
            config,
            key,
            f"does not fit engine.max_model_len = {config.engine.max_model_len}; lower it, or raise max_model_len",
        )
    if limits.max_turn_tokens >= limits.max_total_tokens:
        yield _problem(
            config,
            "rollout.limits.max_turn_tokens",
            f"leaves no room for a prompt in max_total_tokens = {limits.max_total_tokens}; lower it",
        )
    if config.learner.max_tokens_per_microbatch < limits.max_total_tokens:
        yield _problem(
            config,
            "learner.max_tokens_per_microbatch",
            f"is below {key} = {limits.max_total_tokens}, so a trajectory may not fit one row; raise it",
        )


def time_budgets(config: RunConfig) -> Iterator[Problem]:
    """M1.3: command time is the policy's and must end a trajectory before the wall clock masks it."""
    limits, scheduler = config.rollout.limits, config.scheduler
    if limits.command_timeout_s > limits.command_budget_s:
        yield _problem(
            config,
            "rollout.limits.command_timeout_s",
            f"is above command_budget_s = {limits.command_budget_s:g}, which ends the trajectory first; lower it",
        )
    if limits.wall_s <= limits.command_budget_s:
        yield _problem(
            config,
            "rollout.limits.wall_s",
            f"is not above command_budget_s = {limits.command_budget_s:g}: trajectories would be masked instead of "
            "judged; raise it",
        )
    if scheduler.abort_after_s <= scheduler.stall_after_s:
        yield _problem(
            config,
            "scheduler.abort_after_s",
            f"is not above stall_after_s = {scheduler.stall_after_s:g}: the run would end before it says why; raise it",
        )


def grader_budget(config: RunConfig) -> Iterator[Problem]:
    """A verdict needs room after the prompt."""
    if config.grader is None or not isinstance(config.grader.backend, VllmGraderBackend):
        return
    context = config.grader.backend.engine.max_model_len
    if config.grader.max_tokens >= context:
        yield _problem(
            config,
            "grader.max_tokens",
            f"leaves no room for a prompt in grader.backend.engine.max_model_len = {context}; lower it",
        )


# ---- devices --------------------------------------------------------------------------------------------------------


def _engines(config: RunConfig) -> Iterator[tuple[str, EngineConfig]]:
    yield "engine", config.engine
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        yield "grader.backend.engine", config.grader.backend.engine


def engine_device(config: RunConfig) -> Iterator[Problem]:
    """Keys of the other device, and GPUs that do not fit."""
    for key, engine in _engines(config):
        if engine.device == "cpu":
            yield from _idle(config, f"{key}.gpu_memory_utilization", f"{key}.device = cpu", "use kv_cache_gib")
            if engine.tensor_parallel_size > 1:
                yield _problem(config, f"{key}.tensor_parallel_size", "works with device cuda only; set it to 1")
            if engine.weight_transfer == "nccl":
                yield _problem(config, f"{key}.weight_transfer", "works with device cuda only; choose ray_object")
        else:
            yield from _idle(config, f"{key}.kv_cache_gib", f"{key}.device = cuda", "use gpu_memory_utilization")
            yield from _idle(config, f"{key}.threads", f"{key}.device = cuda")
        wanted = engine.tensor_parallel_size if engine.device == "cuda" else 0
        yield from _gpus(config, f"{key}.resources", engine.resources, wanted, engine.device)


def learner_device(config: RunConfig) -> Iterator[Problem]:
    """Keys of the other device, and ZeRO stages that an option needs."""
    learner = config.learner
    if learner.device == "cuda":
        yield from _idle(config, "learner.threads", "learner.device = cuda")
    if learner.offload_optimizer and learner.device == "cpu":
        yield _problem(config, "learner.offload_optimizer", "has no effect on learner.device = cpu; set it to false")
    elif learner.offload_optimizer and learner.zero_stage == 0:
        yield _problem(config, "learner.offload_optimizer", "needs learner.zero_stage >= 1; raise the stage")
    wanted = 1 if learner.device == "cuda" else 0
    yield from _gpus(config, "learner.resources", learner.resources, wanted, learner.device)
    if learner.dtype == "bfloat16" and learner.zero_stage == 0:
        yield _problem(
            config,
            "learner.zero_stage",
            "would accumulate gradients in bfloat16; raise it to 1 or more, or choose learner.dtype = float32",
        )
    engine = config.engine
    if engine.device == "cuda" and engine.weight_transfer == "ray_object" and engine.tensor_parallel_size > 1:
        yield _problem(
            config,
            "engine.weight_transfer",
            f"reaches engines on one GPU only, and engine.tensor_parallel_size = {engine.tensor_parallel_size}; "
            "choose nccl",
        )
    if engine.weight_transfer == "nccl" and learner.device == "cpu" and engine.device == "cuda":
        yield _problem(
            config, "engine.weight_transfer", "needs learner.device = cuda as well; choose ray_object for a CPU learner"
        )


def _gpus(config: RunConfig, key: str, resources: Resources, wanted: int, device: str) -> Iterator[Problem]:
    """0 asks for what is wanted; a share of one GPU lets actors live together on it."""
    if resources.gpus in (0, wanted) or (wanted == 1 and resources.gpus < 1):
        return
    if device == "cpu":
        yield _problem(config, f"{key}.gpus", "would leave GPUs idle, because device = cpu; set it to 0")
    else:
        yield _problem(config, f"{key}.gpus", f"does not fit the {wanted} GPUs that one actor uses; set it to {wanted}")


def worker_resources(config: RunConfig) -> Iterator[Problem]:
    """Rollout and grader workers compute on CPUs, and Ray counts CPUs and GPUs apart from custom resources."""
    pools = {"rollout.resources": config.rollout.resources}
    if config.grader is not None:
        pools["grader.resources"] = config.grader.resources
    for key, resources in pools.items():
        if resources.gpus:
            yield _problem(config, f"{key}.gpus", "would leave GPUs idle, because these workers use none; set it to 0")
    pools |= {f"{key}.resources": engine.resources for key, engine in _engines(config)}
    pools["learner.resources"] = config.learner.resources
    for key, resources in pools.items():
        for name in resources.custom:
            if name.upper() in ("CPU", "GPU", "MEMORY", "OBJECT_STORE_MEMORY"):
                yield _problem(config, f"{key}.custom.{name}", "is no custom resource; use cpus and gpus")


def grader_engine(config: RunConfig) -> Iterator[Problem]:
    """The grader's weights never change."""
    yield from _idle(config, "grader.backend.engine.weight_transfer", "the grader's weights are never updated")


def grader_backend(config: RunConfig) -> Iterator[Problem]:
    """What an endpoint's address must look like, and no key in the configuration, which the run folder keeps."""
    backend = config.grader.backend if config.grader is not None else None
    if isinstance(backend, EndpointGraderBackend):
        yield from _address(config, "grader.backend.base_url", backend.base_url, "https://host/v1")
        yield from _variable(config, "grader.backend.api_key_env", backend.api_key_env)


def remote_sandbox(config: RunConfig) -> Iterator[Problem]:
    """Addresses of servers, and the variable with their token."""
    sandbox = config.rollout.sandbox
    if isinstance(sandbox, RemoteSandbox):
        for host in sandbox.hosts:
            yield from _address(config, "rollout.sandbox.hosts", host, "http://host:port")
        yield from _variable(config, "rollout.sandbox.token_env", sandbox.token_env)


def _address(config: RunConfig, key: str, address: str, example: str) -> Iterator[Problem]:
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield _problem(config, key, f"is not an address; give e.g. {example} or http://host:8000/v1")
    elif "@" in parts.netloc or parts.query or parts.fragment:
        message = f"may hold a secret, which would stand in the run folder; give the bare address, e.g. {example}"
        yield Problem(path=tuple(key.split(".")), message=message)


def _variable(config: RunConfig, key: str, name: str) -> Iterator[Problem]:
    if not (name.isascii() and name.isidentifier()):
        message = "is not the name of an environment variable (a key itself never stands here); give e.g. MY_API_KEY"
        yield Problem(path=tuple(key.split(".")), message=message)


def sandboxes(config: RunConfig) -> Iterator[Problem]:
    """Single-turn tasks are answered without a sandbox."""
    evaluated = config.eval.source if config.eval is not None else None
    used = [s for name, s in config.sources.items() if s.groups_per_step > 0 or name == evaluated]
    if used and all(source.type == "arith" for source in used):
        yield from _idle(config, "rollout.sandbox", "only single-turn sources are used")
        yield from _idle(config, "rollout.limits.max_turns", "only single-turn sources are used")


def mixing(config: RunConfig) -> Iterator[Problem]:
    """M6.2: with one source there is nothing to weigh."""
    if len(config.sources) == 1:
        yield from _idle(config, "scheduler.alpha", "there is only one source")


# ---- evaluation, telemetry, Ray -------------------------------------------------------------------------------------


def evaluation(config: RunConfig) -> Iterator[Problem]:
    """Held-out evaluation needs a source, and keys of a switched-off one do nothing."""
    if config.eval is None:
        return
    if config.eval.source not in config.sources:
        names = ", ".join(config.sources) or "none"
        yield _problem(
            config,
            "eval.source",
            f"is not among the sources ({names}); choose one, add it with groups_per_step: 0, or set eval: null",
        )
    if not config.eval.before and not config.eval.after:
        yield _problem(
            config,
            "eval",
            "has no effect, because before and after are false; set eval: null, or one of them true",
        )


def telemetry(config: RunConfig) -> Iterator[Problem]:
    """Keys of a switched-off sink, and an archive of what does not happen."""
    if config.grader is None:
        yield from _idle(config, "telemetry.archive", "there is no grader, and only graded groups are kept")
    if config.telemetry.wandb.mode == "disabled":
        for key in ("project", "entity"):
            yield from _idle(config, f"telemetry.wandb.{key}", "telemetry.wandb.mode = disabled")


def ray_cluster(config: RunConfig) -> Iterator[Problem]:
    """A running cluster has its own object store."""
    if config.ray.address is not None:
        yield from _idle(
            config,
            "ray.object_store_mib",
            f"ray.address = {config.ray.address} joins a running cluster, whose nodes fix it",
        )


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def models(config: RunConfig) -> Iterator[Problem]:
    """Checkpoint folders must be complete before any actor starts, and the engines serve the policy that is trained."""
    engines = dict(_engines(config))
    for key, engine in engines.items():
        yield from _folder(config, f"{key}.model", engine)
    if config.learner.model == config.engine.model:
        return
    yield from _folder(config, "learner.model", None)
    yield _problem(
        config,
        "learner.model",
        f"differs from engine.model = {config.engine.model}, but the engines sample from the policy that is trained; "
        "name the same folder",
    )


def _folder(config: RunConfig, key: str, engine: EngineConfig | None) -> Iterator[Problem]:
    folder = Path(str(value_at(config, key)))
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for a path that is too long
        yield _problem(
            config, key, "no such folder; give a checkpoint in Hugging Face format (relative to the configuration file)"
        )
        return
    if missing := missing_files(folder):
        yield _problem(config, key, f"lacks {', '.join(missing)}; give a complete checkpoint folder")
        return
    try:
        facts = read_facts(folder)
    except (OSError, ValueError) as error:
        yield _problem(config, key, f"cannot be read ({error}); give a complete checkpoint folder")
        return
    section = key.removesuffix(".model")
    if engine is not None and facts.max_positions is not None and engine.max_model_len > facts.max_positions:
        yield _problem(
            config,
            f"{section}.max_model_len",
            f"is above the {facts.max_positions} positions of {folder.name} (max_position_embeddings); lower it",
        )
    if engine is not None and facts.attention_heads and facts.attention_heads % engine.tensor_parallel_size:
        yield _problem(
            config,
            f"{section}.tensor_parallel_size",
            f"does not divide the {facts.attention_heads} attention heads of {folder.name}; change it",
        )


RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    quotas,
    groups,
    algorithm_keys,
    grading,
    token_budgets,
    time_budgets,
    grader_budget,
    engine_device,
    learner_device,
    grader_engine,
    grader_backend,
    remote_sandbox,
    worker_resources,
    sandboxes,
    mixing,
    evaluation,
    telemetry,
    ray_cluster,
    models,
)
