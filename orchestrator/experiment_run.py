"""The children of an experiment: each cell is `gagar train`, then `gagar eval`; one cell at a time, or several."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from infra.errors import GagarError, StorageError
from infra.sinks import JsonlFile
from orchestrator.experiment import (
    CELLS,
    JUDGE,
    START,
    Cell,
    CellState,
    Experiment,
    alone,
    config_file,
    refuse_other,
    remaining,
    write_configs,
)
from orchestrator.experiment_table import write_table
from orchestrator.runfiles import METRICS, read_jsonl

TELL_S = 60.0
"""Between two lines about a cell that runs."""
STOP_S = 120.0
"""What children get to end by themselves when the experiment is stopped."""

Say = Callable[[str], None]
Run = Callable[[Sequence[str], Path, Say], Coroutine[Any, Any, int]]
"""A command in a process of its own, its output appended to a file; returns the exit code."""


async def run_experiment(
    experiment: Experiment,
    cells: Sequence[Cell],
    *,
    say: Say,
    run: Run | None = None,
) -> list[str]:
    """Run what is left of these cells; returns the names of those that failed. The table is written after each.

    Raises:
        StorageError: something was begun with another configuration, or the folder cannot be written.
        GagarError: another process runs the experiment or a cell, or the start policy cannot be evaluated.
    """
    with alone(experiment):
        return await _run_all(experiment, cells, say=say, run=run)


async def _run_all(experiment: Experiment, cells: Sequence[Cell], *, say: Say, run: Run | None) -> list[str]:
    refuse_other(experiment)
    for cell in cells:
        if experiment.state(cell) is CellState.RUNNING:
            raise GagarError(f"{cell.run_dir}: is run by another process; wait for it, or stop it (gagar status)")
    write_configs(experiment, cells)
    write_table(experiment)  # a damaged file of what is complete is told now, not after hours
    times = JsonlFile(experiment.folder / CELLS, sync=True)
    work = _Work(experiment, times, say, run or child)
    if not experiment.evaluation_file(START).is_file():
        say("the policy that all cells begin with is evaluated")
        command = _eval_command(experiment, START, None)
        if await work.timed(START, "eval", command):
            raise GagarError(f"the start policy could not be evaluated; see {work.log(START)}")
    slots = asyncio.Semaphore(experiment.config.parallel)
    failed: list[str] = []

    async def one(cell: Cell) -> None:
        async with slots:
            if experiment.state(cell) is CellState.DONE:
                say(f"{cell.name}: complete")  # the table above has it
                return
            if not await work.cell(cell):
                failed.append(cell.name)
            write_table(experiment)
            left = remaining(experiment, cells)
            if left.cells and left.hours is not None:
                say(f"{left.cells} cells to go, about {left.hours:.1f} h ({left.basis})")

    async with asyncio.TaskGroup() as group:
        for cell in cells:
            group.create_task(one(cell))
    return failed


class _Work:
    """The steps of a cell."""

    def __init__(self, experiment: Experiment, times: JsonlFile, say: Say, run: Run) -> None:
        self._experiment = experiment
        self._times = times
        self._say = say
        self._run = run

    def log(self, name: str) -> Path:
        """Where the children of a cell print to."""
        return self._experiment.folder / "logs" / f"{name}.log"

    async def cell(self, cell: Cell) -> bool:
        """Train and evaluate what is missing of a cell; whether it is complete."""
        experiment = self._experiment
        state = experiment.state(cell)
        if state is not CellState.TRAINED:
            self._say(f"{cell.name}: {'goes on from its last checkpoint' if state is CellState.HALF else 'begins'}")
            resume = ["--resume"] if state is CellState.HALF else []
            command = [*GAGAR, "train", str(config_file(experiment, cell)), *resume]
            if await self.timed(cell.name, "train", command, watch=cell):
                return False
        return not await self.timed(cell.name, "eval", _eval_command(experiment, cell.name, cell.checkpoint))

    async def timed(self, name: str, phase: str, command: Sequence[str], watch: Cell | None = None) -> int:
        """Run one child and keep how long it took; says why where it failed."""
        start_s = time.monotonic()
        telling = asyncio.create_task(self._tell(watch)) if watch is not None else None
        code: int | None = None
        try:
            code = await self._run(command, self.log(name), self._say)
        finally:
            if telling is not None:
                telling.cancel()
            seconds = time.monotonic() - start_s
            self._times.append({"cell": name, "phase": phase, "seconds": round(seconds, 1), "exit_code": code})
        if code:
            self._say(f"{name}: {phase} failed with exit code {code}: {last_line(self.log(name))}")
        else:
            self._say(f"{name}: {phase} took {seconds / 60:.1f} min")
        return code

    async def _tell(self, cell: Cell) -> None:
        """One line now and then about how far a cell is."""
        while True:
            await asyncio.sleep(TELL_S)
            try:
                steps = read_jsonl(cell.run_dir / METRICS)
            except StorageError:
                continue
            if steps:
                rate = steps[-1].get("trajectories/pass_rate")
                said = "" if rate is None else f", pass rate {rate:.0%}"
                self._say(f"{cell.name}: step {steps[-1]['step']}/{cell.config.steps}{said}")


GAGAR = (sys.executable, "-m", "orchestrator.cli")


def _eval_command(experiment: Experiment, label: str, checkpoint: Path | None) -> list[str]:
    command = [*GAGAR, "eval", str(experiment.folder / JUDGE), "--label", label]
    command += ["--output", str(experiment.evaluation_file(label).parent)]
    return [*command, *(["--checkpoint", str(checkpoint)] if checkpoint is not None else [])]


async def child(command: Sequence[str], log: Path, say: Say) -> int:
    """Run a command in a session of its own, so that the keyboard's interrupt reaches it through here only."""
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            return await process.wait()
        except asyncio.CancelledError:
            say("stopping; what runs ends at its last checkpoint")
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
            raise


def last_line(log: Path) -> str:
    """The last words of a child."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return f"see {log}"
    return lines[-1][:300] if lines else f"it said nothing ({log})"


def run_until_stopped(work: Coroutine[Any, Any, list[str]]) -> list[str]:
    """asyncio.run; SIGTERM and the keyboard end it tidily.

    Raises:
        KeyboardInterrupt: it was stopped either way.
        GagarError: what `work` raised, alone.
    """

    async def go() -> list[str]:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(go())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        from infra.errors import first_error

        error = first_error(group, GagarError)
        if error is None:
            raise
        raise error from group
