"""From a configuration to wired, running parts, and the commands that use them: `gagar train` and `gagar eval`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml

from configs.check import resolved
from configs.models import read_facts
from configs.schema import (
    AdvantageMode,
    EndpointGraderBackend,
    EngineConfig,
    EvalConfig,
    GraderConfig,
    Resources,
    RunConfig,
    VllmGraderBackend,
)
from envs.source import make_source
from grader.worker import GraderWorker
from infra import access, scrub
from infra.errors import GagarError, StorageError
from infra.placement import actor_options
from infra.pool import ActorPool
from infra.sinks import JsonlFile
from infra.telemetry import Telemetry
from infra.watchdog import Watchdog
from learner.group import LearnerGroup
from orchestrator import control
from orchestrator.admission import Admission
from orchestrator.archive import GroupArchive
from orchestrator.canaries import make_canaries
from orchestrator.checkpoint import Checkpoint, Checkpoints, cut_logs
from orchestrator.evaluate import EvalResult, evaluate
from orchestrator.ledger import Ledger
from orchestrator.ledger_store import LedgerStore, indices
from orchestrator.loop import Parts, Scheduler
from orchestrator.mixer import Mixer
from orchestrator.observer import RunObserver
from orchestrator.progress import Progress, end_table, stall_message
from orchestrator.report import write_report
from orchestrator.runfiles import ARCHIVE, CONFIG, EVAL, GROUPS, LEDGER, METRICS, ROLLOUTS, read_jsonl, require_run
from orchestrator.scaling import Elastic, Full, Scaling
from orchestrator.standstill import make_watchdog, pool_reports
from orchestrator.status import run_state
from rollout.engine import EngineClient
from rollout.engine_pool import EnginePool
from rollout.worker import RolloutWorker

T = TypeVar("T")
STOPPED = "stopped by SIGTERM; the same command with --resume goes on from the last checkpoint"
Starting = Callable[[], Coroutine[Any, Any, T]]
"""Await the call for the part, ready to be used."""


def run_training(config: RunConfig, *, config_file: Path, resume: bool) -> int:
    """Train one run, from the start or from its last checkpoint; returns the process's exit code.

    Raises:
        GagarError: with one message for the user; what the run had completed stays on disk.
    """
    scrub.install(scrub.key_variables(config))
    run_dir = Path(config.output) / config.name
    progress = Progress(config.steps, config.telemetry.progress_every_s)
    checkpoint = _open_run(run_dir, config, resume=resume, say=progress.event)
    progress.event(f"run {run_dir} ({config_file})" + (f", resumed at step {checkpoint.step}" if checkpoint else ""))
    telemetry = Telemetry(run_dir, wandb=config.telemetry.wandb, config=config.model_dump(mode="json"))
    observer = RunObserver(config, run_dir, telemetry, progress)
    observer.state("running")
    watchdog = make_watchdog(
        run_dir,
        config.scheduler,
        say=progress.event,
        ended=lambda text: observer.state("failed", error=text),
    )
    watchdog.headline = lambda still_s: stall_message(observer.shown, still_s)
    observer.still = watchdog.still
    watchdog.start()
    phases_s: dict[str, float] = {}
    try:
        with ray_session(config):
            work = _train(config, run_dir, checkpoint, telemetry, progress, observer, watchdog, phases_s)
            run_loop(watchdog.attended(work))
        observer.state("finished", activity="finished")
    except BaseException as e:
        observer.state("failed", error=str(e) or type(e).__name__)
        raise
    finally:
        progress.close()
        telemetry.close()
        _report(run_dir, progress)
        watchdog.close()
    progress.console.print(end_table(read_jsonl(run_dir / METRICS), read_jsonl(run_dir / EVAL), phases_s))
    return 0


def _report(run_dir: Path, progress: Progress) -> None:
    """The report is a view of the files: failing to write it must not hide how the run ended."""
    try:
        progress.event(f"report: {write_report(run_dir)}")
    except (GagarError, OSError) as e:
        progress.event(f"no report: {e}")


async def _train(
    config: RunConfig,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    telemetry: Telemetry,
    progress: Progress,
    observer: RunObserver,
    watchdog: Watchdog,
    phases_s: dict[str, float],
) -> None:
    start_s = time.monotonic()
    evals = JsonlFile(run_dir / EVAL, sync=True)
    groups = JsonlFile(run_dir / GROUPS, sync=True)
    canaries = make_canaries(config, run_dir)
    control.clear(run_dir)

    async def measure(label: str, step: int, rollout: ActorPool) -> None:
        assert config.eval is not None
        begin_s = time.monotonic()
        observer.state("running", activity="evaluating")
        result = await _evaluate(config, config.eval, label, step, rollout, progress, moved=watchdog.moved)
        evals.append(result.record())
        phases_s[f"evaluation {label}"] = time.monotonic() - begin_s

    # Everything starts at once; the first evaluation needs only the engines and the rollout workers, and runs while the
    # learner and the grader load.
    keep = (run_dir / ROLLOUTS).resolve() if config.checkpoint.rollouts else None
    async with (
        _rollout_pool(config, progress, keep=keep) as (engines, rollout_ready),
        _learner(config, progress) as learner_ready,
        grader_pool(config, progress) as grader_ready,
    ):
        others = asyncio.gather(learner_ready(), grader_ready())
        with watchdog.waits.on("start-up", "the engines and the rollout workers"):
            rollout = await rollout_ready()
        watchdog.moved()
        phases_s["start-up"] = time.monotonic() - start_s
        if config.eval is not None and config.eval.before and checkpoint is None:
            await measure("before", 0, rollout)
        with watchdog.waits.on("start-up", "the learner and the graders"):
            learner, grader = await others
        watchdog.moved()
        kept = config.telemetry.archive == "graded" and grader is not None
        archive = GroupArchive(run_dir / ARCHIVE) if kept else None
        mixer = Mixer.of(config.sources, config.scheduler, group_size=config.algorithm.group_size)
        store = LedgerStore(run_dir / LEDGER, run_dir / ROLLOUTS)
        left = store.load(mark=(checkpoint.state.get("ledger") or 0) if checkpoint else 0)
        mixer.restore(checkpoint.state["mixer"] if checkpoint else {}, indices(left))
        if left:
            progress.event(
                f"{len(left)} groups come back, {sum(len(k.rollouts) for k in left)} rollouts of them finished"
            )
        if checkpoint is not None:
            observer.on_checkpoint(checkpoint.path)
            await learner.load(checkpoint.learner)
            await learner.publish(engines, checkpoint.step)
        scheduler = Scheduler(
            config=config,
            parts=Parts(
                sources={name: make_source(name, c) for name, c in config.sources.items()},
                engines=engines,
                rollout=rollout,
                grader=grader,
                learner=learner,
                canaries=canaries,
                rollouts=keep,
            ),
            ledger=Ledger(store),
            mixer=mixer,
            audit=groups,
            checkpoints=Checkpoints(run_dir, keep=config.checkpoint.keep),
            telemetry=telemetry,
            observer=observer,
            start_step=checkpoint.step if checkpoint else 0,
            archive=archive,
            admission=Admission.of(config, kv_tokens_per_engine=_kv_tokens(config.engine)),
            kept=left,
            waits=watchdog.waits,
        )
        watchdog.pools = lambda: pool_reports(scheduler.parts)
        with contextlib.closing(store), archive or contextlib.nullcontext():
            async with _scaling(config, run_dir, scheduler, progress, observer):
                await scheduler.run()
        if archive is not None and archive.lost:
            progress.event(
                f"{archive.lost} graded groups are not in the archive, because transcripts were lost; the first: "
                f"{archive.first_loss}"
            )
        if config.eval is not None and config.eval.after:
            await measure("after", scheduler.step, rollout)


@asynccontextmanager
async def _scaling(
    config: RunConfig, run_dir: Path, scheduler: Scheduler, progress: Progress, observer: RunObserver
) -> AsyncIterator[None]:
    """While it trains, the run's pools change their sizes, by `gagar scale` and by policy (docs/scaling.md)."""
    parts = scheduler.parts
    pools: dict[str, Elastic] = {"rollout": parts.rollout, "engine": parts.engines}
    parts.rollout.say = parts.engines.say = progress.event
    if parts.grader is not None:
        pools["grader"] = parts.grader
        parts.grader.say = progress.event
    for elastic in (parts.rollout, parts.engines, parts.grader):
        if elastic is not None:
            elastic.on_change(scheduler.resize)
    full = Full(parts.rollout)

    def queue_s(pool: str) -> float:
        now_s = scheduler.clock.now()
        if pool == "rollout":
            return full(now_s)
        waiting = scheduler.grading.waiting if scheduler.grading is not None else {}
        return now_s - min(waiting.values(), default=now_s)

    scaling = Scaling(
        run_dir=run_dir,
        pools=pools,
        config=config.scaling,
        queue_s=queue_s,
        most=_most(config),
        say=progress.event,
    )
    observer.figures = scaling.scalars
    task = asyncio.create_task(scaling.run())
    try:
        yield
    finally:
        task.cancel()


def _most(config: RunConfig) -> dict[str, int]:
    """Pools that cannot grow at will. Graders share the requests that their endpoint takes by their largest number."""
    if config.grader is None or not isinstance(config.grader.backend, EndpointGraderBackend):
        return {}
    return {"grader": max(config.grader.workers, config.scaling.grader.max if config.scaling.grader else 0)}


def _sharing(config: RunConfig, grader: GraderConfig) -> GraderConfig:
    """What each grader is told: how many there may be, so that they never ask more of their endpoint together."""
    return grader.model_copy(update={"workers": _most(config).get("grader", grader.workers)})


def run_eval(config: RunConfig, checkpoint: Path | None) -> int:
    """Evaluate the configuration's policy on held-out tasks, or that of a run's checkpoint or of an HF folder; prints
    the result."""
    settings = config.eval or EvalConfig()
    if checkpoint is not None:
        policy = checkpoint / "policy"
        engine = config.engine.model_copy(update={"model": str(policy if policy.is_dir() else checkpoint)})
        config = config.model_copy(update={"engine": engine})
    progress = Progress(0, config.telemetry.progress_every_s)

    async def go() -> EvalResult:
        async with _rollout_pool(config, progress) as (_, ready):
            rollout = await ready()
            return await _evaluate(config, settings, "eval", 0, rollout, progress)

    try:
        with ray_session(config):
            result = run_loop(go())
    finally:
        progress.close()
    for name, rate in result.pass_rate_by.items():
        progress.console.print(f"  {name:24} {rate:6.1%}")
    return 0


async def _evaluate(
    config: RunConfig,
    settings: EvalConfig,
    label: str,
    step: int,
    rollout: ActorPool,
    progress: Progress,
    moved: Callable[[], None] = lambda: None,
) -> EvalResult:
    total = settings.tasks * settings.samples
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1
        moved()
        if done % max(total // 4, 1) == 0:
            progress.event(f"evaluation {label}: {done}/{total} trajectories")

    result = await evaluate(
        label=label,
        step=step,
        config=settings,
        source=make_source(settings.source, config.sources[settings.source]),
        rollout=rollout,
        wall_s=config.rollout.limits.wall_s,
        on_done=on_done,
    )
    rate = "all masked" if result.pass_rate is None else f"{result.pass_rate:.1%}"
    progress.event(
        f"held-out {settings.source} pass rate {label}: {rate} (avg@{settings.samples}, {settings.tasks} tasks)"
    )
    if result.masked:
        progress.event(
            f"{result.masked} of {total} trajectories were lost and left out; the first: {result.first_error}"
        )
    return result


# ---- parts ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _rollout_pool(
    config: RunConfig, progress: Progress, keep: Path | None = None
) -> AsyncIterator[tuple[EnginePool, Starting[ActorPool]]]:
    """The policy's engines and the rollout workers, starting; await the call for the ready pool. `keep`: where workers
    write the rollouts that they have finished for training."""
    async with _engines("policy", config.engine, config.seed, progress) as (engines, engines_ready):
        pool = _pool(
            "rollout",
            RolloutWorker,
            (config.rollout, config.engine.model, engines.client(), keep),
            workers=config.rollout.workers,
            slots=config.rollout.slots_per_worker,
            resources=config.rollout.resources,
        )

        engines.on_change(lambda: pool.broadcast("use_engines", engines.replicas()))

        async def ready() -> ActorPool:
            await asyncio.gather(engines_ready(), pool.ready())
            return pool

        try:
            yield engines, ready
        finally:
            await pool.shutdown()


@asynccontextmanager
async def grader_pool(config: RunConfig, progress: Progress) -> AsyncIterator[Starting[ActorPool | None]]:
    """The graders, starting; await the call for the ready pool, or for None where the mode needs no grades."""
    grader = config.grader
    async with contextlib.AsyncExitStack() as stack:
        waits: list[Callable[[], Awaitable[None]]] = []
        pool: ActorPool | None = None
        if grader is not None and config.algorithm.mode is not AdvantageMode.OUTCOME:
            client: EngineClient | None = None
            if isinstance(grader.backend, VllmGraderBackend):
                starting = _engines("grader", grader.backend.engine, config.seed + 1, progress)
                engines, engines_ready = await stack.enter_async_context(starting)
                client = engines.client()
                waits.append(engines_ready)
            pool = _pool(
                "grader",
                GraderWorker,
                (_sharing(config, grader), config.algorithm.rubric),
                kwargs={"engine": client, "sandbox": config.rollout.sandbox},
                workers=grader.workers,
                slots=grader.groups_per_worker,
                resources=grader.resources,
            )
            stack.push_async_callback(pool.shutdown)
            waits.append(pool.ready)

        async def ready() -> ActorPool | None:
            await asyncio.gather(*(wait() for wait in waits))
            return pool

        yield ready


@asynccontextmanager
async def _engines(
    name: str, config: EngineConfig, seed: int, progress: Progress
) -> AsyncIterator[tuple[EnginePool, Starting[None]]]:
    engines = EnginePool(config, name=name, seed=seed)
    start_s = time.monotonic()
    engines.start()

    async def ready() -> None:
        await engines.ready()
        progress.event(f"{name} engine ready ({config.replicas} x {config.device}, {time.monotonic() - start_s:.0f} s)")

    try:
        yield engines, ready
    finally:
        await engines.shutdown()


@asynccontextmanager
async def _learner(config: RunConfig, progress: Progress) -> AsyncIterator[Starting[LearnerGroup]]:
    """The learner group, starting; await the call for the ready one."""
    group = LearnerGroup(config.learner, config.loss, config.rollout.sampling.temperature)
    start_s = time.monotonic()
    group.start()

    async def ready() -> LearnerGroup:
        await group.ready()
        c = config.learner
        progress.event(
            f"learner ready ({c.world_size} x {c.device}, ZeRO {c.zero_stage}, {time.monotonic() - start_s:.0f} s)"
        )
        return group

    try:
        yield ready
    finally:
        group.shutdown()


def _kv_tokens(config: EngineConfig) -> int | None:
    """Room in the KV cache of one engine, where the configuration says how large it is."""
    if config.device != "cpu":
        return None
    values = read_facts(Path(config.model)).kv_values_per_token
    if values is None:
        return None
    return int(config.kv_cache_gib * 2**30) // (values * (4 if config.dtype == "float32" else 2))


def _pool(
    name: str,
    actor: type,
    args: tuple[Any, ...],
    *,
    workers: int,
    slots: int,
    resources: Resources,
    kwargs: dict[str, Any] | None = None,
) -> ActorPool:
    """A started pool of `actor(*args, **kwargs)`; the light arguments go to each actor by value."""
    import ray

    remote = ray.remote(**actor_options(resources), max_concurrency=slots + 2)(actor)
    pool = ActorPool(name, lambda _: remote.remote(*args, **(kwargs or {})), size=workers, slots=slots)
    pool.start()
    return pool


# ---- a run's folder -------------------------------------------------------------------------------------------------


def _open_run(run_dir: Path, config: RunConfig, *, resume: bool, say: Callable[[str], None]) -> Checkpoint | None:
    """Make the run folder, or reopen it at its last checkpoint. An earlier run of the name is moved aside, not lost."""
    try:
        if resume:
            require_run(run_dir)
            _refuse_running(run_dir)
            checkpoint = Checkpoints(run_dir, keep=config.checkpoint.keep).latest()
            if checkpoint and checkpoint.step >= config.steps and not _evaluation_missing(run_dir, config):
                raise GagarError(
                    f"{run_dir}: already at step {checkpoint.step} of {config.steps}; raise `steps` to train on"
                )
            cut_logs(run_dir, checkpoint.state["logs"] if checkpoint else {})
        else:
            checkpoint = None
            if run_dir.exists():
                _refuse_running(run_dir)
                stamp = datetime.fromtimestamp(run_dir.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
                kept = run_dir.with_name(f"{run_dir.name}.{stamp}")
                run_dir.rename(kept)
                say(f"an earlier run of this name is kept as {kept}")
            run_dir.mkdir(parents=True)
        text = yaml.safe_dump(resolved(config), sort_keys=False)
        (run_dir / CONFIG).write_text(text, encoding="utf-8")
    except OSError as e:
        raise StorageError(f"{run_dir}: cannot be set up ({e}); choose another `output` or free space") from e
    return checkpoint


def _evaluation_missing(run_dir: Path, config: RunConfig) -> bool:
    """Whether a run that did all its steps ended before its last evaluation."""
    wanted = config.eval is not None and config.eval.after
    return wanted and all(line["label"] != "after" for line in read_jsonl(run_dir / EVAL))


def _refuse_running(run_dir: Path) -> None:
    if run_state(run_dir) == "running":
        raise GagarError(
            f"{run_dir}: this run is still running (see `gagar status {run_dir}`); wait for it, stop it, or give "
            "another --name"
        )


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Ray as the configuration wants it: a local one that nobody else can reach, or a running cluster."""
    import ray

    local = config.ray.address is None
    size = config.ray.object_store_mib
    with access.own_token() if local else contextlib.nullcontext():
        ray.init(
            address=config.ray.address,
            include_dashboard=False if local else None,
            object_store_memory=size * 2**20 if local and size else None,
            log_to_driver=False,
            logging_level="error",
            configure_logging=True,
            namespace=f"gagar-{config.name}",
            **({"_node_ip_address": access.LOOPBACK} if local else {}),
        )
        try:
            yield
        finally:
            ray.shutdown()


def run_loop(main: Coroutine[Any, Any, T], *, stopped: str = STOPPED) -> T:
    """asyncio.run, with the one GagarError of a group of failed loops brought to the surface.

    SIGTERM ends the work as an interrupt does: parts are shut down, and `stopped` is the error's message.
    """
    told = False

    async def go() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal told
            told = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        return await main

    try:
        return asyncio.run(go())
    except asyncio.CancelledError:
        if not told:
            raise
        raise GagarError(stopped) from None
    except BaseExceptionGroup as group:
        known = group.subgroup(GagarError)
        if known is None:
            raise
        error: BaseException = known
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
