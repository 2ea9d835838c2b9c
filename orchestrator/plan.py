"""What a configuration would start, in figures, without starting it: `gagar train CONFIG --dry-run`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from configs.errors import GagarError
from configs.models import ModelFacts, read_facts
from configs.schema import EngineConfig, RunConfig, VllmGraderBackend

OPTIMIZER_BYTES_PER_PARAMETER = 12
"""Master weights and both Adam moments, each in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool of actors."""

    name: str
    actors: int
    each: str
    """What one actor is, in words."""
    cpus: float
    """Ray CPUs of the whole pool."""
    gpus: float
    """GPUs of the whole pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would start and hold."""

    pools: tuple[PoolPlan, ...]
    models: tuple[tuple[str, Path, ModelFacts], ...]
    """(role, folder, facts)."""
    steps: int
    groups_per_step: int
    trajectories_per_step: int
    tokens_per_step: int
    """At most: trajectories times their token budget."""
    rollout_slots: int
    eval_trajectories: int
    """Of one evaluation."""
    run_dir: Path
    checkpoint_bytes: int
    """All kept checkpoints together, about."""
    free_bytes: int
    """On the disk that holds the run folder."""
    start: str
    """Where it would start, in words."""


def make_plan(config: RunConfig, *, resume: bool = False) -> Plan:
    """The plan of a checked configuration.

    Raises:
        OSError, ValueError: a model folder changed since the check.
        GagarError: there is nothing to resume, as the run itself would say.
    """
    groups = sum(source.groups_per_step for source in config.sources.values())
    trajectories = groups * config.algorithm.group_size
    policy = read_facts(Path(config.learner.model))
    models = [("policy", Path(config.learner.model), policy)]
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        folder = Path(config.grader.backend.engine.model)
        models.append(("grader", folder, read_facts(folder)))
    run_dir = Path(config.output) / config.name
    one = policy.parameters * OPTIMIZER_BYTES_PER_PARAMETER + policy.weight_bytes
    return Plan(
        pools=tuple(_pools(config)),
        models=tuple(models),
        steps=config.steps,
        groups_per_step=groups,
        trajectories_per_step=trajectories,
        tokens_per_step=trajectories * config.rollout.limits.max_total_tokens,
        rollout_slots=config.rollout.workers * config.rollout.slots_per_worker,
        eval_trajectories=config.eval.tasks * config.eval.samples if config.eval is not None else 0,
        run_dir=run_dir,
        checkpoint_bytes=one * min(config.checkpoint.keep, -(-config.steps // config.checkpoint.every_steps)),
        free_bytes=shutil.disk_usage(_existing(run_dir)).free,
        start=_resumed(config, run_dir) if resume else _anew(run_dir),
    )


def _anew(run_dir: Path) -> str:
    if not run_dir.exists():
        return "at step 0"
    _refuse_running(run_dir)
    return "at step 0; the earlier run of this name is kept under another name (--resume goes on with it)"


def _resumed(config: RunConfig, run_dir: Path) -> str:
    """Which checkpoint `--resume` goes on from. Only the run folder is read; nothing is changed in it."""
    from orchestrator.checkpoint import Checkpoints
    from orchestrator.runfiles import EVAL, read_jsonl, require_run

    if config.checkpoint.mirror is not None and not any((run_dir / "checkpoints").glob("step-*")):
        return f"from the newest copy of a checkpoint in {config.checkpoint.mirror}, if there is one"
    if not run_dir.exists():
        raise GagarError(f"{run_dir}: nothing to resume: no run of this name; leave out --resume to start it")
    require_run(run_dir)
    _refuse_running(run_dir)
    checkpoint = Checkpoints(run_dir, keep=config.checkpoint.keep).latest()
    if checkpoint is None:
        return f"at step 0, because {run_dir} has no checkpoint yet; {config.steps} steps remain"
    left = config.steps - checkpoint.step
    if left > 0:
        return f"resumed at step {checkpoint.step} from {checkpoint.path}; {left} of {config.steps} steps remain"
    wanted = config.eval is not None and config.eval.after
    if wanted and all(line["label"] != "after" for line in read_jsonl(run_dir / EVAL)):
        return f"resumed at step {checkpoint.step} from {checkpoint.path}; only the last evaluation remains"
    raise GagarError(
        f"{run_dir}: nothing to resume: already at step {checkpoint.step} of {config.steps}; raise `steps` to train on"
    )


def _refuse_running(run_dir: Path) -> None:
    from orchestrator.status import run_state

    if run_state(run_dir) == "running":
        raise GagarError(
            f"{run_dir}: this run is still running (see `gagar status {run_dir}`); wait for it, stop it, or give "
            "another --name"
        )


def _pools(config: RunConfig) -> list[PoolPlan]:
    rollout, learner, grader = config.rollout, config.learner, config.grader
    pools = [
        _engine_pool("policy engines", config.engine),
        PoolPlan(
            name="rollout workers",
            actors=rollout.workers,
            each=f"{rollout.slots_per_worker} trajectories at once, {rollout.sandbox.type} sandboxes",
            cpus=rollout.workers * rollout.resources.cpus,
            gpus=rollout.workers * rollout.resources.gpus,
        ),
        PoolPlan(
            name="learner ranks",
            actors=learner.world_size,
            each=f"{learner.device}, {learner.dtype}, ZeRO {learner.zero_stage}",
            cpus=learner.world_size * learner.resources.cpus,
            gpus=learner.world_size * (learner.resources.gpus or float(learner.device == "cuda")),
        ),
    ]
    if grader is None:
        return pools
    if isinstance(grader.backend, VllmGraderBackend):
        pools.append(_engine_pool("grader engines", grader.backend.engine))
        served = "on its own engines"
    else:
        served = f"at {grader.backend.base_url}"
    pools.append(
        PoolPlan(
            name="grader workers",
            actors=grader.workers,
            each=f"{grader.groups_per_worker} groups at once, {served}",
            cpus=grader.workers * grader.resources.cpus,
            gpus=grader.workers * grader.resources.gpus,
        )
    )
    return pools


def _engine_pool(name: str, engine: EngineConfig) -> PoolPlan:
    gpus = engine.resources.gpus or (engine.tensor_parallel_size if engine.device == "cuda" else 0)
    parallel = f", tensor parallel {engine.tensor_parallel_size}" if engine.tensor_parallel_size > 1 else ""
    return PoolPlan(
        name=name,
        actors=engine.replicas,
        each=f"vLLM on {engine.device}, {engine.dtype}, {engine.max_model_len:,} tokens of context{parallel}",
        cpus=engine.replicas * engine.resources.cpus,
        gpus=engine.replicas * gpus,
    )


def _existing(path: Path) -> Path:
    """The nearest folder above (or at) `path` that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def render(plan: Plan) -> str:
    """The plan as text, one fact a line."""
    lines = [f"{plan.run_dir}: {plan.steps} steps", f"  {'start':16} {plan.start}"]
    lines += [
        f"  {pool.name:16} {pool.actors:>4} x {pool.each}"
        + (f" ({pool.cpus:g} CPUs, {pool.gpus:g} GPUs in all)" if pool.cpus or pool.gpus else "")
        for pool in plan.pools
    ]
    lines += [
        f"  {role + ' model':16} {facts.architecture}, {facts.parameters:,} parameters, {_size(facts.weight_bytes)} "
        f"({folder})"
        for role, folder, facts in plan.models
    ]
    lines.append(
        f"  {'each step':16} {plan.groups_per_step} groups, {plan.trajectories_per_step:,} trajectories, at most "
        f"{plan.tokens_per_step:,} tokens; {plan.rollout_slots:,} trajectories run at once"
    )
    if plan.eval_trajectories:
        lines.append(f"  {'each evaluation':16} {plan.eval_trajectories:,} trajectories")
    lines.append(f"  {'checkpoints':16} about {_size(plan.checkpoint_bytes)}, {_size(plan.free_bytes)} free")
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
