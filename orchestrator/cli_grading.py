"""The commands about grades: `gagar grade` and `gagar show group`. `register` adds them to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from configs.errors import ConfigError

EXIT_INTERRUPTED = 130

show_app = typer.Typer(
    help="Look at what a run did.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: gagar show group runs/learn minirepo-000012",
)

GRADE_EXAMPLE = "gagar grade minirepo:heldout:24 --grader configs/quickstart.yaml --repeat 2 --permute"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(epilog=f"Example: {GRADE_EXAMPLE}")(grade)
    app.add_typer(show_app, name="show")


def grade(
    path: Annotated[
        str,
        typer.Argument(help="A run, a folder of stored groups, one stored group, or minirepo:heldout:N[:SEED]."),
    ],
    grader: Annotated[Path, typer.Option(help="Configuration of a run; its grader section is used.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to single keys, e.g. grader.backend.engine.model=my-grader."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="How often each group is graded in one order.")] = 1,
    permute: Annotated[bool, typer.Option("--permute", help="Grade each group once more in another order.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many groups.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Keep every grade in this file, one line a group; groups it has are not graded again."),
    ] = None,
) -> None:
    """Grade stored groups and say how far the grader can be trusted; trains nothing."""
    from configs.check import load_run

    config = load_run(grader, overrides or []).config
    if config.grader is None:
        raise ConfigError(f"{grader}: grader = null: there is nobody to grade; give a configuration with a grader")
    from orchestrator.grading import run_grading
    from orchestrator.grading_target import load_target

    target = load_target(path, config, limit)
    try:
        run_grading(config, target, repeat=repeat, permute=permute, output=output, source=path)
    except KeyboardInterrupt:
        how = "give --output to be able to go on" if output is None else "the same command goes on with the rest"
        typer.echo(f"gagar: stopped by the keyboard; {how}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


@show_app.command(epilog="Example: gagar show group runs/learn minirepo-000012 --html group.html")
def group(
    run: Annotated[Path, typer.Argument(help="Folder of a run, running or ended.")],
    group_id: Annotated[str, typer.Argument(metavar="ID", help="Group, as in groups.jsonl and report.html.")],
    html: Annotated[Path | None, typer.Option(help="Write one page instead; it opens without a network.")] = None,
) -> None:
    """Show one group: the task, its candidates side by side, their grades, evidence and advantages."""
    from orchestrator.show import show_group

    show_group(run, group_id, html)
