"""The command `gagar scale`. `register` adds it to the command line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import ConfigError, GagarError

if TYPE_CHECKING:
    from orchestrator.control import ScaleAnswer, ScaleRequest

POLL_S = 0.2
SILENT_S = 30.0
"""A driver looks every second; one that is silent for so long is told of."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="Example: gagar scale runs/learn rollout=12 grader=3")(scale)


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is running.")],
    sizes: Annotated[list[str], typer.Argument(metavar="POOL=SIZE", help="rollout, grader or engine, and its size.")],
    drain: Annotated[
        float | None,
        typer.Option(help="Seconds that drained workers get to finish what they have; default: scaling.drain_s."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the effect; 0: do not wait.")] = 600.0,
) -> None:
    """Grow or drain pools of a running run; no work is lost or done twice."""
    from orchestrator.control import ask
    from orchestrator.runfiles import require_run
    from orchestrator.status import run_state

    wanted = parse(sizes)
    require_run(run)
    state = run_state(run)
    if state != "running":
        raise GagarError(f"{run} is not running ({state or 'no status yet'}): there is nothing to scale")
    request = ask(run, wanted, drain)
    if timeout > 0.0:
        wait(run, request, timeout)
    else:
        typer.echo(f"asked for {', '.join(f'{name}={size}' for name, size in wanted.items())}")


def parse(sizes: list[str]) -> dict[str, int]:
    """POOL=SIZE, ... as numbers. Raises ConfigError."""
    wanted: dict[str, int] = {}
    for text in sizes:
        name, equals, number = text.partition("=")
        if not (name and equals and number.isascii() and number.isdigit()):
            raise ConfigError(f"{text!r}: write POOL=SIZE with a whole number, e.g. rollout=12")
        if name in wanted:
            raise ConfigError(f"{name} is given twice; give each pool once")
        if int(number) < 1:
            raise ConfigError(f"{text}: a pool needs at least one actor; stop the run to have none")
        wanted[name] = int(number)
    return wanted


def wait(run: Path, request: ScaleRequest, timeout_s: float) -> None:
    """Print progress until the effect is there. Raises GagarError where it does not come."""
    from orchestrator.control import ANSWER, ScaleAnswer, read
    from orchestrator.status import run_state

    started_s = time.monotonic()
    shown, silence_told = "", False
    while True:
        waited_s = time.monotonic() - started_s
        answer = read(run / ANSWER, ScaleAnswer)
        if answer is not None and answer.id == request.id:
            line = text_of(answer)
            if line and line != shown:
                shown = line
                typer.echo(f"[{waited_s:5.1f} s] {line}")
            if answer.state in ("refused", "failed", "superseded"):
                raise GagarError(f"{answer.state}: {answer.text}")
            if answer.state == "done":
                typer.echo(f"in effect after {waited_s:.1f} s ({answer.effect_s:.1f} s in the run)")
                return
        elif waited_s > SILENT_S and not silence_told:
            silence_told = True
            typer.echo(f"[{waited_s:5.1f} s] no answer yet: a run that still starts answers when its pools are ready")
        if (state := run_state(run)) != "running":
            raise GagarError(f"{run} ended meanwhile ({state})")
        if waited_s > timeout_s:
            raise GagarError(f"not in effect after {timeout_s:g} s; it goes on, see `gagar status {run}`")
        time.sleep(POLL_S)


def text_of(answer: ScaleAnswer) -> str:
    """One line about where it stands; empty where nothing was begun."""
    parts = []
    for name, pool in answer.pools.items():
        counts = {
            "ready": pool.live,
            "starting": pool.starting,
            "draining": pool.draining,
            "calls handed back": pool.handed_back,
        }
        notes = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        parts.append(f"{name} {pool.was} -> {pool.target}: {notes}")
    return "; ".join(parts)
