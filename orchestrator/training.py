"""`gagar train`: one run in its folder, and the sessions in which it trains.

A session goes from a checkpoint, or from the start, to the run's last step. A learner that is lost ends it; the next
one begins at the last checkpoint, as --resume does, while engines, workers and graders stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import yaml

from configs.check import resolved
from configs.schema import RunConfig
from envs.sandbox import in_session
from envs.source import make_source
from infra import scrub
from infra.errors import GagarError, LearnerError, StorageError, first_error
from infra.pool import ActorPool
from infra.sinks import JsonlFile
from infra.storage import Storage
from infra.telemetry import Telemetry
from infra.watchdog import Watchdog
from orchestrator import control, supervise
from orchestrator.admission import Admission
from orchestrator.archive import GroupArchive
from orchestrator.build import (
    grader_pool,
    kv_tokens,
    learner_group,
    most_actors,
    ray_session,
    rollout_pool,
    run_loop,
)
from orchestrator.canaries import make_canaries
from orchestrator.checkpoint import Checkpoint, Checkpoints, cut_logs, log_sizes
from orchestrator.ledger import Ledger
from orchestrator.ledger_store import LedgerStore, indices
from orchestrator.loop import Parts, Scheduler
from orchestrator.measuring import Measuring
from orchestrator.mirror import make_mirror
from orchestrator.mixer import Mixer
from orchestrator.observer import RunObserver
from orchestrator.progress import Progress, end_table, stall_message
from orchestrator.quarantine import Quarantine
from orchestrator.report import write_report
from orchestrator.runfiles import (
    ARCHIVE,
    CONFIG,
    EVAL,
    GROUPS,
    LEDGER,
    METRICS,
    QUARANTINE,
    ROLLOUTS,
    read_jsonl,
    require_run,
)
from orchestrator.saving import closing, settle
from orchestrator.scaling import Elastic, Full, Scaling
from orchestrator.standstill import make_watchdog, pool_reports
from orchestrator.status import run_state


def run_training(config: RunConfig, *, config_file: Path, resume: bool) -> int:
    """Train one run, from the start or from its last checkpoint; returns the process's exit code.

    Raises:
        GagarError: with one message for the user; what the run had completed stays on disk.
    """
    supervise.beat()
    scrub.install(scrub.key_variables(config))
    run_dir = Path(config.output) / config.name
    progress = Progress(config.steps, config.telemetry.progress_every_s)
    checkpoint = _open_run(run_dir, config, resume=resume, say=progress.event)
    progress.event(f"run {run_dir} ({config_file})" + (f", resumed at step {checkpoint.step}" if checkpoint else ""))
    storage = Storage()
    described = config.model_dump(mode="json")
    telemetry = Telemetry(run_dir, wandb=config.telemetry.wandb, config=described, storage=storage)
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
    training = _Training(in_session(config), run_dir, telemetry, storage, progress, observer, watchdog)
    try:
        with ray_session(config):
            run_loop(watchdog.attended(training.run(checkpoint)))
        observer.state("finished", activity="finished")
    except BaseException as e:
        observer.state("failed", error=str(e) or type(e).__name__)
        raise
    finally:
        progress.close()
        telemetry.close()
        _report(run_dir, progress)
        watchdog.close()
    progress.console.print(end_table(read_jsonl(run_dir / METRICS), read_jsonl(run_dir / EVAL), training.phases_s))
    return 0


def _report(run_dir: Path, progress: Progress) -> None:
    """The report is a view of the files: failing to write it must not hide how the run ended."""
    try:
        progress.event(f"report: {write_report(run_dir)}")
    except (GagarError, OSError) as e:
        progress.event(f"no report: {e}")


RESUME = "the last checkpoint is intact: mend that, and run the same command with --resume"


class _Training:
    """The parts of one run, for as long as its process lives."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        telemetry: Telemetry,
        storage: Storage,
        progress: Progress,
        observer: RunObserver,
        watchdog: Watchdog,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.telemetry = telemetry
        self.storage = storage
        self.progress = progress
        self.observer = observer
        self.watchdog = watchdog
        self.phases_s: dict[str, float] = {}
        """What took how long, outside the steps."""
        self.lost_learners = 0
        """Learners that were started again, so far."""
        self._measuring = Measuring(config, run_dir, storage=storage, progress=progress, moved=watchdog.moved)
        self._groups = JsonlFile(run_dir / GROUPS, sync=True, storage=storage)
        self._quarantine = JsonlFile(run_dir / QUARANTINE, sync=True, storage=storage)
        self._copies = make_mirror(config, say=progress.event)
        self._checkpoints = Checkpoints(run_dir, keep=config.checkpoint.keep, storage=storage, copies=self._copies)
        self._reached = 0
        """Optimiser steps done."""

    async def run(self, checkpoint: Checkpoint | None) -> None:
        """Start everything, train to the last step, and end everything."""
        config, waits = self.config, self.watchdog.waits
        start_s = time.monotonic()
        canaries = make_canaries(config, self.run_dir, self.storage)
        control.clear(self.run_dir)
        # Everything starts at once; the first evaluation needs only the engines and the rollout workers, and runs while
        # the learner and the grader load.
        keep = (self.run_dir / ROLLOUTS).resolve() if config.checkpoint.rollouts else None
        async with (
            rollout_pool(config, self.progress, keep=keep) as (engines, rollout_ready),
            learner_group(config, self.progress) as learner_ready,
            grader_pool(config, self.progress) as grader_ready,
        ):
            others = asyncio.gather(learner_ready(), grader_ready())
            with waits.on("start-up", "the engines and the rollout workers"):
                rollout = await rollout_ready()
            self.watchdog.moved()
            self.phases_s["start-up"] = time.monotonic() - start_s
            if config.eval is not None and config.eval.before and checkpoint is None:
                await self._measure("before", 0, rollout)
            with waits.on("start-up", "the learner and the graders"):
                learner, grader = await others
            self.watchdog.moved()
            parts = Parts(
                sources={name: make_source(name, c) for name, c in config.sources.items()},
                engines=engines,
                rollout=rollout,
                grader=grader,
                learner=learner,
                canaries=canaries,
                rollouts=keep,
            )
            self.watchdog.pools = lambda: pool_reports(parts)
            self.observer.after_step = self._measuring.beside(rollout)
            try:
                await self._sessions(parts, checkpoint)
                await self._measuring.settle()
            finally:
                self._measuring.stop()
            if config.eval is not None and config.eval.after:
                await self._measure("after", self._reached, rollout)
            await settle(self.storage, abort_after_s=config.scheduler.abort_after_s)
            if self._copies is not None:
                with waits.on("the end", "the copy of the last checkpoint"):
                    await self._copies.finish(config.scheduler.abort_after_s)

    async def _measure(self, label: str, step: int, rollout: ActorPool) -> None:
        assert self.config.eval is not None
        begin_s = time.monotonic()
        self.observer.state("running", activity="evaluating")
        await self._measuring.measure(label, step, rollout)
        self.phases_s[f"evaluation {label}"] = time.monotonic() - begin_s

    # ---- sessions ---------------------------------------------------------------------------------------------------

    async def _sessions(self, parts: Parts, checkpoint: Checkpoint | None) -> None:
        """Train to the last step; a lost learner starts again from the last checkpoint."""
        kept = self.config.telemetry.archive == "graded" and parts.grader is not None
        archive = GroupArchive(self.run_dir / ARCHIVE, storage=self.storage) if kept else None
        fresh = log_sizes(self.run_dir)
        in_a_row = 0
        with archive or contextlib.nullcontext():
            while True:
                began = self._reached = checkpoint.step if checkpoint else 0
                try:
                    if self.lost_learners:
                        await self._restart_learner(parts)
                    await self._session(parts, checkpoint, archive)
                    break
                except* LearnerError as group:
                    lost = first_error(group, LearnerError)
                    assert lost is not None
                    in_a_row = 1 if self._reached > began else in_a_row + 1
                    if in_a_row > self.config.supervision.learner_restarts:
                        raise LearnerError(f"{lost.message}; {RESUME}") from group
                self.lost_learners += 1
                checkpoint = await asyncio.to_thread(self._checkpoints.latest, say=self.progress.event)
                self._checkpoints.set_aside(checkpoint.step if checkpoint else 0)
                cut_logs(self.run_dir, checkpoint.state["logs"] if checkpoint else fresh)
                self.telemetry.anchor()
                where = checkpoint.path.name if checkpoint else "the start model"
                self.progress.event(f"the learner was lost: {lost}. It starts again from {where}; all else stays")
        if archive is not None and archive.lost:
            self.progress.event(
                f"{archive.lost} graded groups are not in the archive, because transcripts were lost; the first: "
                f"{archive.first_loss}"
            )

    async def _restart_learner(self, parts: Parts) -> None:
        start_s = time.monotonic()
        parts.engines.expect()
        parts.learner.shutdown()
        parts.learner.start()
        with self.watchdog.waits.on("start-up", "the learner, which was lost"):
            await parts.learner.ready()
        self.watchdog.moved()
        self.progress.event(f"learner ready again ({time.monotonic() - start_s:.0f} s)")

    async def _session(self, parts: Parts, checkpoint: Checkpoint | None, archive: GroupArchive | None) -> None:
        config = self.config
        mixer = Mixer.of(config.sources, config.scheduler, group_size=config.algorithm.group_size)
        store = LedgerStore(self.run_dir / LEDGER, self.run_dir / ROLLOUTS, storage=self.storage)
        async with closing(store, self.storage, abort_after_s=config.scheduler.abort_after_s):
            mark = (checkpoint.state.get("ledger") or 0) if checkpoint else 0
            left = store.load(mark, oldest=self._checkpoints.oldest_mark())
            mixer.restore(checkpoint.state["mixer"] if checkpoint else {}, indices(left))
            if left:
                finished = sum(len(k.rollouts) for k in left)
                self.progress.event(f"{len(left)} groups come back, {finished} rollouts of them finished")
            if checkpoint is not None:
                self.observer.on_checkpoint(checkpoint.path)
                await parts.learner.load(checkpoint.learner)
            if checkpoint is not None or self.lost_learners:
                await parts.learner.publish(parts.engines, self._reached)
            scheduler = Scheduler(
                config=config,
                parts=parts,
                ledger=Ledger(store),
                mixer=mixer,
                audit=self._groups,
                checkpoints=self._checkpoints,
                telemetry=self.telemetry,
                observer=self.observer,
                start_step=self._reached,
                archive=archive,
                admission=Admission.of(config, kv_tokens_per_engine=kv_tokens(config.engine)),
                kept=left,
                quarantine=Quarantine(
                    self.config.scheduler.quarantine_after,
                    file=self._quarantine,
                    past=read_jsonl(self.run_dir / QUARANTINE),
                ),
                waits=self.watchdog.waits,
                storage=self.storage,
            )
            async with self._scaling(scheduler):
                try:
                    await scheduler.run()
                finally:
                    self._reached = scheduler.step

    @asynccontextmanager
    async def _scaling(self, scheduler: Scheduler) -> AsyncIterator[None]:
        """While it trains, the run's pools change their sizes, by `gagar scale` and by policy (docs/scaling.md)."""
        parts = scheduler.parts
        pools: dict[str, Elastic] = {"rollout": parts.rollout, "engine": parts.engines}
        if parts.grader is not None:
            pools["grader"] = parts.grader
        full = Full(parts.rollout)

        def queue_s(pool: str) -> float:
            now_s = scheduler.clock.now()
            if pool == "rollout":
                return full(now_s)
            waiting = scheduler.grading.waiting if scheduler.grading is not None else {}
            return now_s - min(waiting.values(), default=now_s)

        scaling = Scaling(
            run_dir=self.run_dir,
            pools=pools,
            config=self.config.scaling,
            queue_s=queue_s,
            most=most_actors(self.config),
            say=self.progress.event,
        )

        def figures() -> dict[str, float]:
            return {**scaling.scalars(), **self._restarts(parts), **self._measuring.scalars()}

        self.observer.figures = figures
        forget = [pool.on_change(scheduler.resize) for pool in (parts.rollout, parts.engines, parts.grader) if pool]
        task = asyncio.create_task(scaling.run())
        try:
            yield
        finally:
            task.cancel()
            for stop in forget:
                stop()

    def _restarts(self, parts: Parts) -> dict[str, float]:
        """Parts that were lost and replaced since the process began, by kind."""
        counts = {"rollout": parts.rollout.restarts, "engine": parts.engines.restarts, "learner": self.lost_learners}
        if parts.grader is not None:
            counts["grader"] = parts.grader.restarts
        return {f"restarts/{name}": float(count) for name, count in counts.items()}


# ---- a run's folder -------------------------------------------------------------------------------------------------


def _open_run(run_dir: Path, config: RunConfig, *, resume: bool, say: Callable[[str], None]) -> Checkpoint | None:
    """Make the run folder, or reopen it at its last checkpoint. An earlier run of the name is moved aside, not lost."""
    copies = make_mirror(config, say=say)
    try:
        if resume:
            _refuse_running(run_dir)
            if copies is not None and not any((run_dir / "checkpoints").glob("step-*")):
                copies.restore(run_dir)
            require_run(run_dir)
            checkpoints = Checkpoints(run_dir, keep=config.checkpoint.keep)
            checkpoint = checkpoints.latest(say=say)
            if checkpoint and checkpoint.step >= config.steps and not _evaluation_missing(run_dir, config):
                raise GagarError(
                    f"{run_dir}: already at step {checkpoint.step} of {config.steps}; raise `steps` to train on"
                )
            checkpoints.set_aside(checkpoint.step if checkpoint else 0)
            cut_logs(run_dir, checkpoint.state["logs"] if checkpoint else {})
        else:
            checkpoint = None
            if run_dir.exists():
                _refuse_running(run_dir)
                stamp = datetime.fromtimestamp(run_dir.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
                kept = run_dir.with_name(f"{run_dir.name}.{stamp}")
                run_dir.rename(kept)
                say(f"an earlier run of this name is kept as {kept}")
            if copies is not None and (moved := copies.set_aside()) is not None:
                say(f"the copies of an earlier run's checkpoints are kept as {moved}")
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
