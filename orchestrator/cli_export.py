"""The command `gagar export`. `register` adds it to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="Example: gagar export runs/learn models/learned --step 30")(export)


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run, or of one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    step: Annotated[
        int | None, typer.Option(help="Checkpoint after this step; default: the newest that is whole.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder that transformers and vLLM load."""
    from orchestrator.export import export_policy

    used = export_policy(source, out, step=step, force=force, say=lambda text: typer.echo(text, err=True))
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    typer.echo(f"{out}: the policy of {used} ({size / 2**20:.1f} MiB)")
