"""The command `gagar convert`. `register` adds it to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="Example: gagar convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2")(convert)


def convert(
    source: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="Model file of llama.cpp.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
) -> None:
    """Write a GGUF file as a Hugging Face folder that transformers, vLLM and the learner load; weights become fp32."""
    from learner.gguf_file import convert_gguf

    done = convert_gguf(source, out)
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    typer.echo(
        f"{out}: {done.parameters / 1e6:.1f} million parameters, {done.vocabulary} tokens, {size / 2**20:.1f} MiB"
    )
    if not done.chat_template:
        typer.echo(f"{out} has no chat template: add chat_template.jinja before it becomes a policy", err=True)
