"""The rules of `configs.check`: what cannot run in combination, and keys without effect in this combination.

Each rule is a function that yields problems; `RULES` is the whole list, and each has tests of its own. Keys without
effect count only if the user wrote them: defaults are silent.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from configs.models import ModelFacts, missing_files, read_facts
from configs.problems import KeyPath, Problem, is_set, show, value_at
from configs.schema import (
    AdvantageMode,
    BuiltinHarness,
    CommandHarness,
    DaytonaSandbox,
    DockerSandbox,
    EndpointGraderBackend,
    EngineConfig,
    GraderConfig,
    JailSandbox,
    ListedSource,
    MinirepoSource,
    RemoteSandbox,
    Resources,
    RunConfig,
    SandboxConfig,
    ServiceSandbox,
    VllmGraderBackend,
)
from configs.secrecy import is_secret, secret_in_argument


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
        if twice := _twice(kinds):
            yield _problem(config, f"sources.{name}.kinds", f"names {twice} twice; remove one of them")
        place = source.path if isinstance(source, ListedSource) else ""
        stream = (source.type, source.seed, kinds, place)
        if stream in streams:
            yield _problem(
                config,
                f"sources.{name}.seed",
                f"gives the same tasks as sources.{streams[stream]}; choose another one",
            )
        streams.setdefault(stream, name)
        if not name or not all(c.isalnum() or c in "_-" for c in name):
            yield _problem(config, f"sources.{name}", "is not a usable name; use letters, digits, _ and -")


def _twice(values: Iterable[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _code_quota(config: RunConfig) -> bool:
    code = MinirepoSource | ListedSource
    return any(isinstance(s, code) and s.groups_per_step > 0 for s in config.sources.values())


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
    elif not _code_quota(config):
        for key in ("rubric", "lambda_max") if mode is AdvantageMode.REDISTRIBUTE else ("rubric",):
            why = "no code source has a quota, and only code groups are graded"
            yield from _idle(config, f"algorithm.{key}", why)


def grading(config: RunConfig) -> Iterator[Problem]:
    """Quality factors come from a grader, and only code groups have them (M1, last paragraph)."""
    mode = config.algorithm.mode
    if mode is AdvantageMode.OUTCOME:
        if config.grader is not None:
            yield from _idle(config, "grader", "algorithm.mode = outcome uses no grades", "set grader: null")
    elif not _code_quota(config):
        why = "no code source has a quota, and only code groups are graded"
        yield from _idle(config, "algorithm.mode", why, "set mode: outcome, or give a minirepo source a quota")
        if config.grader is not None:
            yield from _idle(config, "grader", why, "set grader: null, or give a minirepo source a quota")
    elif config.grader is None:
        yield Problem(
            path=("grader",),
            message=f"is missing, and algorithm.mode = {mode.value} needs grades; add a grader, or choose mode outcome",
        )


def harness(config: RunConfig) -> Iterator[Problem]:
    """What a harness that is not ours needs, and what it leaves without effect."""
    chosen = config.rollout.harness
    if isinstance(chosen, BuiltinHarness):
        return
    why = f"rollout.harness.type = {chosen.type} reads commands in its own way"
    yield from _idle(config, "rollout.action_format", why)
    if isinstance(chosen, CommandHarness):
        if not isinstance(config.rollout.sandbox, JailSandbox):
            yield _problem(
                config,
                "rollout.harness.type",
                "reaches the gateway by a socket that only jails are shown; choose rollout.sandbox.type jail",
            )
        for folder in chosen.paths:
            if not os.path.isdir(folder):
                yield _problem(config, "rollout.harness.paths", f"names {folder}, which is no folder; give one that is")
    elif chosen.config_file is not None and not os.path.isfile(chosen.config_file):
        yield _problem(config, "rollout.harness.config_file", "is no file; give a configuration of mini-swe-agent")


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
    slowest = [("rollout.limits.wall_s", limits.wall_s, "lost trajectories are masked")]
    if config.grader is not None:
        slowest.append(("grader.timeout_s", config.grader.timeout_s, "a slow grading falls back"))
        if isinstance(config.grader.backend, EndpointGraderBackend):
            wait_s = config.grader.endpoint_wait_s
            slowest.append(("grader.endpoint_wait_s", wait_s, "groups that wait for a lost endpoint fall back"))
    late = next(((key, limit, what) for key, limit, what in slowest if scheduler.abort_after_s <= limit), None)
    if scheduler.abort_after_s <= scheduler.stall_after_s:
        yield _problem(
            config,
            "scheduler.abort_after_s",
            f"is not above stall_after_s = {scheduler.stall_after_s:g}: the run would end before it says why; raise it",
        )
    elif late is not None:
        yield _problem(
            config,
            "scheduler.abort_after_s",
            f"is not above {late[0]} = {late[1]:g}: the run could end before {late[2]}; raise it",
        )


# ---- the grader ----------------------------------------------------------------------------------------------------


def failures(config: RunConfig) -> Iterator[Problem]:
    """M1.3: settings of a pause that is off, and of an endpoint that is not there."""
    if config.scheduler.pause_masked_above is None:
        yield from _idle(config, "scheduler.pause_masked_window", "scheduler.pause_masked_above is null")
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        yield from _idle(config, "grader.endpoint_wait_s", "grader.backend.type = vllm has no endpoint")


def _grader_context(grader: GraderConfig) -> int | None:
    """The longest conversation that the grader's model reads; nobody says so for an endpoint."""
    return grader.backend.engine.max_model_len if isinstance(grader.backend, VllmGraderBackend) else None


def grader_budget(config: RunConfig) -> Iterator[Problem]:
    """A verdict needs room after the prompt, and time after the work."""
    grader = config.grader
    if grader is None:
        return
    context = _grader_context(grader)
    if context is not None and grader.max_tokens >= context:
        yield _problem(
            config,
            "grader.max_tokens",
            f"leaves no room for a prompt in grader.backend.engine.max_model_len = {context}; lower it",
        )
        return
    if grader.mode == "single":
        return
    seconds, tokens = grader.budget.seconds, grader.budget.tokens
    if seconds is not None and seconds >= grader.timeout_s:
        yield _problem(
            config,
            "grader.budget.seconds",
            f"is not below grader.timeout_s = {grader.timeout_s:g}, which would end the group before it can answer; "
            "lower it",
        )
    if context is not None and tokens >= context:
        yield from _idle(
            config,
            "grader.budget.tokens",
            f"grader.backend.engine.max_model_len = {context} is reached first",
            "lower it, or remove the key",
        )
    least, binding = tokens, "grader.budget.tokens"
    if context is not None and context < tokens:
        least, binding = context, "grader.backend.engine.max_model_len"
    if least <= 2 * grader.max_tokens:
        yield _problem(
            config,
            "grader.max_tokens",
            f"leaves no room in {binding} = {least} for a prompt and two answers, a call and the verdict; lower it",
        )


def grader_mode(config: RunConfig) -> Iterator[Problem]:
    """Keys of the tools, where the grader has none (grader.mode single) or no commands."""
    grader = config.grader
    if grader is None:
        return
    commands = [f"grader.{key}" for key in ("checks.limit", "checks.timeout_s", "sandbox")]
    native = isinstance(grader.backend, EndpointGraderBackend) and grader.backend.tool_calling
    if grader.mode == "single":
        budget = [f"grader.budget.{key}" for key in ("turns", "tokens", "seconds")]
        others = ("grader.checks.enabled", "grader.tool_output_chars", "grader.reference_patch")
        for key in (*budget, *commands, *others, "grader.backend.tool_calling"):
            yield from _idle(config, key, "grader.mode = single has no tools", "remove the key, or choose mode agent")
        return
    if native:
        yield from _idle(
            config,
            "grader.backend.structured",
            "grader.backend.tool_calling = true, and tools are called natively instead of as JSON",
            "remove the key, or set tool_calling: false",
        )
    why, remedy = "grader.checks.enabled = false", "remove the key"
    if grader.checks.enabled:
        if grader.style != "compact":
            if grader.checks.timeout_s >= grader.timeout_s:
                yield _problem(
                    config,
                    "grader.checks.timeout_s",
                    f"is not below grader.timeout_s = {grader.timeout_s:g}, the time of the whole group; lower it",
                )
            return
        why, remedy = "grader.style = compact offers no commands", "remove the key, or choose style full"
        commands = ["grader.checks.enabled", *commands]
    for key in commands:
        yield from _idle(config, key, why, remedy)


def canaries(config: RunConfig) -> Iterator[Problem]:
    """Keys of canaries that are off, and where stored ones lie."""
    grader = config.grader
    if grader is None:
        return
    if grader.canaries.share == 0:
        for key in ("path", "window", "alarm_below"):
            yield from _idle(
                config, f"grader.canaries.{key}", "grader.canaries.share = 0 turns canaries off", "raise share"
            )
        return
    path = grader.canaries.path
    if path is not None and not os.path.isdir(path):
        yield _problem(
            config,
            "grader.canaries.path",
            "no such folder; give a folder of stored groups with labels (relative to the configuration file), or null "
            "for the built-in ones",
        )
    elif path is not None and not any(os.scandir(path)):
        yield _problem(config, "grader.canaries.path", "is empty; give a folder of stored groups with labels")


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


def scaling(config: RunConfig) -> Iterator[Problem]:
    """A pool that follows its queue starts inside its bounds."""
    if config.grader is None:
        yield from _idle(config, "scaling.grader", "there is no grader")
    sizes = {"rollout": config.rollout.workers, "grader": config.grader.workers if config.grader else None}
    for name, limits in (("rollout", config.scaling.rollout), ("grader", config.scaling.grader)):
        workers = sizes[name]
        if limits is not None and workers is not None and not limits.min <= workers <= limits.max:
            yield _problem(
                config,
                f"{name}.workers",
                f"is outside scaling.{name} (min {limits.min}, max {limits.max}); start inside it, or widen it",
            )


def grader_engine(config: RunConfig) -> Iterator[Problem]:
    """The grader's weights never change."""
    yield from _idle(config, "grader.backend.engine.weight_transfer", "the grader's weights are never updated")


def grader_backend(config: RunConfig) -> Iterator[Problem]:
    """What an endpoint's address must look like, and no key in the configuration, which the run folder keeps."""
    grader = config.grader
    if grader is None or not isinstance(backend := grader.backend, EndpointGraderBackend):
        return
    yield from _address(config, "grader.backend.base_url", backend.base_url, "https://host/v1")
    yield from _variable(config, "grader.backend.api_key_env", backend.api_key_env)
    if backend.max_concurrency < grader.workers:
        yield _problem(
            config,
            "grader.backend.max_concurrency",
            f"is below grader.workers = {grader.workers}, of which each sends one request at least; raise it, or lower "
            "workers",
        )
    if backend.request_timeout_s > grader.timeout_s:
        yield from _idle(
            config,
            "grader.backend.request_timeout_s",
            f"grader.timeout_s = {grader.timeout_s:g} ends the group first",
            "lower it, or raise grader.timeout_s",
        )


def _sandboxes(config: RunConfig) -> Iterator[tuple[str, SandboxConfig]]:
    yield "rollout.sandbox", config.rollout.sandbox
    if config.grader is not None and config.grader.sandbox is not None:
        yield "grader.sandbox", config.grader.sandbox


def remote_sandbox(config: RunConfig) -> Iterator[Problem]:
    """Addresses of servers, and the variable with their token."""
    for key, sandbox in _sandboxes(config):
        if isinstance(sandbox, RemoteSandbox):
            for host in sandbox.hosts:
                yield from _address(config, f"{key}.hosts", host, "http://host:port")
            yield from _variable(config, f"{key}.token_env", sandbox.token_env)
            if twice := _twice(sandbox.hosts):
                yield _problem(config, f"{key}.hosts", f"names {twice} twice; each sandbox needs a server of its own")


def containers(config: RunConfig) -> Iterator[Problem]:
    """Arguments of docker run are kept in the run folder, so no secret may stand in them; and what would not start."""
    for key, sandbox in _sandboxes(config):
        if isinstance(sandbox, ServiceSandbox):
            for field in ("image", "server_image"):
                image = getattr(sandbox, field, None) or "none"
                if re.search(r"\s|^-", image):
                    yield _problem(config, f"{key}.{field}", "is not the name of an image; give e.g. python:3.11")
                if is_secret(f"https://{image}") and "@sha256:" not in image:
                    yield _hidden(
                        f"{key}.{field}", "may hold a secret; give the bare name, and log in with docker login"
                    )
        if isinstance(sandbox, DaytonaSandbox):
            yield from _variable(config, f"{key}.api_key_env", sandbox.api_key_env)
        if isinstance(sandbox, ServiceSandbox):
            wall_s = config.rollout.limits.wall_s
            if key == "rollout.sandbox" and sandbox.lifetime_s < wall_s:
                yield _problem(
                    config,
                    f"{key}.lifetime_s",
                    f"ends sandboxes before rollout.limits.wall_s = {wall_s:g} s does; raise it, or lower that",
                )
        if not isinstance(sandbox, DockerSandbox):
            continue
        for argument, following in zip(sandbox.docker_args, (*sandbox.docker_args[1:], ""), strict=False):
            if (name := secret_in_argument(argument)) is not None:
                yield _hidden(
                    f"{key}.docker_args",
                    f"holds what looks like a secret{f' ({name}=...)' if name else ''}, which would stand in the run "
                    f"folder; write -e {name or 'NAME'}, which passes the variable on from the environment",
                )
            if argument in ("--network=none", "--net=none") or (
                argument in ("--network", "--net") and following == "none"
            ):
                yield _problem(
                    config,
                    f"{key}.docker_args",
                    "cuts the sandbox's server off (--network=none); give a network without a route outside, "
                    "--network=NAME",
                )


def mirror(config: RunConfig) -> Iterator[Problem]:
    """The address stands in the run folder, so it holds no key; and no node takes it for a folder of its own."""
    address, key = config.checkpoint.mirror, "checkpoint.mirror"
    if address is None:
        return
    scheme, found, rest = address.partition("://")
    if not found or not scheme.isalnum() or not rest.strip("/"):
        yield _problem(config, key, "is no address; give e.g. s3://bucket/runs or file:///shared/runs")
    elif "@" in rest.partition("/")[0] or "?" in rest or is_secret(address):
        yield _hidden(key, "may hold a secret, which would stand in the run folder; give it by the environment")


def _hidden(key: str, message: str) -> Problem:
    """A problem whose value must not be repeated."""
    return Problem(path=tuple(key.split(".")), message=message)


def _address(config: RunConfig, key: str, address: str, example: str) -> Iterator[Problem]:
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield _problem(config, key, f"is not an address; give e.g. {example} or http://host:8000/v1")
    elif "@" in parts.netloc or parts.query or parts.fragment:
        yield _hidden(
            key, f"may hold a secret, which would stand in the run folder; give the bare address, e.g. {example}"
        )


def _variable(config: RunConfig, key: str, name: str) -> Iterator[Problem]:
    if not (name.isascii() and name.isidentifier()):
        yield _hidden(
            key, "is not the name of an environment variable (a key itself never stands here); give e.g. MY_API_KEY"
        )


def sandboxes(config: RunConfig) -> Iterator[Problem]:
    """Single-turn tasks are answered without a sandbox."""
    evaluated = config.eval.source if config.eval is not None else None
    used = [s for name, s in config.sources.items() if s.groups_per_step > 0 or name == evaluated]
    if used and all(source.type == "arith" for source in used):
        limits = [
            f"limits.{key}" for key in ("max_turns", "command_timeout_s", "command_budget_s", "observation_chars")
        ]
        for key in ("sandbox", "action_format", *limits):
            yield from _idle(config, f"rollout.{key}", "only single-turn sources are used")


def mixing(config: RunConfig) -> Iterator[Problem]:
    """M6.2: with one source there is nothing to weigh; M6.4: what is strictly on-policy is never stale."""
    if not config.scheduler.asynchronous:
        why = "scheduler.asynchronous = false trains on tokens of the current weights only"
        yield from _idle(config, "scheduler.max_staleness", why)
    elif not config.scheduler.overlap:
        yield _problem(
            config,
            "scheduler.overlap",
            "needs steps that do not overlap either; set scheduler.asynchronous to false, and remove max_staleness",
        )
    for name, source in config.sources.items():
        if source.max_concurrency is not None and source.min_concurrency > source.max_concurrency:
            yield _problem(
                config,
                f"sources.{name}.min_concurrency",
                f"is above max_concurrency = {source.max_concurrency}; lower it, or raise max_concurrency",
            )
    if len(config.sources) == 1:
        yield from _idle(config, "scheduler.alpha", "there is only one source")
    elif sum(source.groups_per_step > 0 for source in config.sources.values()) == 1:
        yield from _idle(config, "scheduler.alpha", "only one source has a quota")


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
    if not config.eval.before and not config.eval.after and config.eval.every_steps is None:
        yield _problem(
            config,
            "eval",
            "has no effect, because before and after are false and every_steps is null; set eval: null, or one of them",
        )


def telemetry(config: RunConfig) -> Iterator[Problem]:
    """Keys of a switched-off sink, and an archive of what does not happen."""
    if config.grader is None:
        yield from _idle(config, "telemetry.archive", "there is no grader, and only graded groups are kept")
    if config.telemetry.wandb.mode == "disabled":
        for key in ("project", "entity"):
            yield from _idle(config, f"telemetry.wandb.{key}", "telemetry.wandb.mode = disabled")
    elif len(config.telemetry.wandb.project) > 128 or re.search(r"[/\\#?%:]", config.telemetry.wandb.project):
        yield _problem(
            config,
            "telemetry.wandb.project",
            "is not a name that W&B takes; write at most 128 characters, without any of / \\ # ? % :",
        )


def ray_cluster(config: RunConfig) -> Iterator[Problem]:
    """A running cluster has an address, and its own object store."""
    address = config.ray.address
    if address is None:
        return
    if address == "local":
        yield _problem(config, "ray.address", "starts a Ray of its own, as null does; write address: null")
    elif address != "auto" and not _is_ray_address(address):
        yield _problem(
            config,
            "ray.address",
            "is not the address of a cluster; write auto, HOST:PORT (e.g. 10.0.0.1:6379; ports are 1024 to 65535) or "
            "ray://HOST:PORT, or null for a local Ray",
        )
    yield from _idle(
        config, "ray.object_store_mib", f"ray.address = {address} joins a running cluster, whose nodes fix it"
    )


def _is_ray_address(text: str) -> bool:
    found = re.fullmatch(
        r"(?:ray://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):([0-9]{1,5})", text
    )
    return found is not None and 1024 <= int(found[1]) <= 65535


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
        f"differs from engine.model = {show(config.engine.model)}, but the engines sample from the policy that is "
        "trained; name the same folder",
    )


def _recipe_of(folder: Path) -> Path | None:
    """The recipe of a warm-up checkpoint, where one is shipped beside its place."""
    recipe = folder.parent.parent / "sft" / f"{folder.name}.yaml"
    return recipe if folder.parent.name == "checkpoints" and os.path.isfile(recipe) else None


def _folder(config: RunConfig, key: str, engine: EngineConfig | None) -> Iterator[Problem]:
    folder = Path(str(value_at(config, key)))
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for a path that is too long
        made = f"; `gagar sft {recipe}` makes it" if (recipe := _recipe_of(folder)) is not None else ""
        wanted = "give a checkpoint in Hugging Face format (relative to the configuration file)"
        yield _problem(config, key, f"no such folder{made or '; ' + wanted}")
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
    yield from _kv_cache(config, section, engine, facts)
    if engine is not None and facts.attention_heads and facts.attention_heads % engine.tensor_parallel_size:
        yield _problem(
            config,
            f"{section}.tensor_parallel_size",
            f"does not divide the {facts.attention_heads} attention heads of {folder.name}; change it",
        )


def _kv_cache(config: RunConfig, section: str, engine: EngineConfig | None, facts: ModelFacts) -> Iterator[Problem]:
    """vLLM starts only if one sequence of full length fits."""
    if engine is None or engine.device != "cpu" or facts.kv_values_per_token is None:
        return
    size = facts.kv_values_per_token * (4 if engine.dtype == "float32" else 2) * engine.max_model_len / 2**30
    if engine.kv_cache_gib < size:
        yield _problem(
            config,
            f"{section}.kv_cache_gib",
            f"is less than the {size:.3g} GiB of one sequence of {section}.max_model_len = {engine.max_model_len}; "
            "raise it, or lower max_model_len",
        )


def run_folder(config: RunConfig) -> Iterator[Problem]:
    """Where the run's folder cannot be made, whatever the rights."""
    path = Path(config.output).absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    if not os.path.isdir(path):
        yield _problem(config, "output", f"cannot be made, because {path} is no folder; give another one")


RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    quotas,
    groups,
    algorithm_keys,
    grading,
    harness,
    token_budgets,
    time_budgets,
    failures,
    grader_budget,
    grader_mode,
    canaries,
    engine_device,
    learner_device,
    scaling,
    grader_engine,
    grader_backend,
    remote_sandbox,
    containers,
    mirror,
    worker_resources,
    sandboxes,
    mixing,
    evaluation,
    telemetry,
    ray_cluster,
    run_folder,
    models,
)
