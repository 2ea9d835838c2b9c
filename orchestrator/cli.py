"""The command `gagar`. Reads arguments and configurations, calls one function, turns errors into one message.

Heavy imports happen inside the commands, so that help and `gagar config check` answer at once.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from configs.errors import ConfigError, GagarError
from orchestrator import (
    cli_bench,
    cli_convert,
    cli_experiment,
    cli_export,
    cli_grading,
    cli_infra,
    cli_scale,
    cli_simulate,
    cli_tasks,
)
from orchestrator.cli_config import load_config

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="gagar",
    help="Train code agents by reinforcement learning with groupwise grading and advantage redistribution.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(
    help="Check or show a configuration; runs nothing.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: gagar config check configs/quickstart.yaml",
)
app.add_typer(config_app, name="config")

Config = Annotated[Path, typer.Argument(help="Configuration file, e.g. configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to single keys, e.g. learner.optimizer.lr=1e-4; ~key.path goes back to the default.",
    ),
]
Arms = Annotated[
    list[Path] | None,
    typer.Option("--arm", help="File merged over CONFIG, e.g. configs/arms/outcome.yaml; may be given several times."),
]


@app.command(epilog="Example: gagar train configs/learn.yaml --arm configs/arms/discount.yaml --name discount steps=8")
def train(
    config: Config,
    overrides: Overrides = None,
    arm: Arms = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; short for the override name=...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of this run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and the plan, start nothing.")
    ] = False,
) -> None:
    """Train a policy with everything a configuration says."""
    from configs.check import resolved

    loaded = load_config(config, overrides, arm, name, advise=True)
    if dry_run:
        import yaml

        from orchestrator.plan import make_plan, render

        typer.echo(yaml.safe_dump(resolved(loaded), sort_keys=False))
        typer.echo(render(make_plan(loaded, resume=resume)))
        return
    from orchestrator import supervise

    if loaded.supervision.driver_restarts and not supervise.supervised():
        raise typer.Exit(
            supervise.supervise(
                supervise.command_of(config, overrides or [], arm or [], name, resume),
                Path(loaded.output) / loaded.name,
                restarts=loaded.supervision.driver_restarts,
                silent_after_s=loaded.supervision.silent_after_s,
                say=lambda text: typer.echo(f"gagar: {text}", err=True),
            )
        )
    from orchestrator.training import run_training

    try:
        code = run_training(loaded, config_file=config, resume=resume)
    except KeyboardInterrupt:
        typer.echo(
            f"gagar: stopped by the keyboard; the same command with --resume goes on from the last checkpoint of "
            f"{Path(loaded.output) / loaded.name}",
            err=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(code)


@app.command(epilog="Example: gagar sft configs/sft/policy.yaml")
def sft(
    recipe: Annotated[Path, typer.Argument(help="Recipe of a warm-up checkpoint.")],
    overrides: Overrides = None,
) -> None:
    """Train a warm-up checkpoint on scripted solutions."""
    from learner.sft import run_sft

    raise typer.Exit(run_sft(recipe, overrides or []))


@app.command(epilog="Example: gagar status runs/quickstart")
def status(
    run: Annotated[Path, typer.Argument(help="Folder of a run, running or ended.")],
) -> None:
    """Say where a run stands and who waits for whom."""
    from orchestrator.status import print_status

    raise typer.Exit(print_status(run))


@app.command(epilog="Example: gagar doctor configs/quickstart.yaml")
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Judge by what this configuration asks for.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, for programs.")] = False,
) -> None:
    """Look whether this machine, and the servers that a configuration names, have what a run needs."""
    from dataclasses import asdict

    from infra.doctor import diagnose
    from infra.findings import Level
    from orchestrator.probe import probe_limits, probe_sandbox

    loaded = None if config is None else load_config(config, overrides, None, None)
    findings = [*diagnose(loaded), probe_sandbox(loaded), probe_limits(loaded)]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    for finding in findings if not as_json else ():
        typer.echo(f"{finding.level.value:4}  {finding.name:14} {finding.detail}")
        if finding.remedy:
            typer.echo(f"{'':21}-> {finding.remedy}")
    failed = sum(finding.level is Level.FAIL for finding in findings)
    if failed:
        raise GagarError(f"{failed} of {len(findings)} checks failed; the arrows say what to do")


cli_experiment.register(app)
cli_grading.register(app)
cli_convert.register(app)
cli_export.register(app)
cli_infra.register(app)
cli_scale.register(app)
cli_simulate.register(app)
cli_bench.register(app)
cli_tasks.register(app)


@config_app.command(epilog="Example: gagar config check configs/learn.yaml steps=40")
def check(config: Config, overrides: Overrides = None, arm: Arms = None) -> None:
    """Find unknown keys, wrong values, impossible combinations and keys without effect; warn of pools that may idle."""
    loaded = load_config(config, overrides, arm, None, advise=True)
    typer.echo(f"{config}: ok ({loaded.steps} steps, sources {', '.join(loaded.sources)})")


@config_app.command(epilog="Example: gagar config show configs/quickstart.yaml algorithm.group_size=4")
def show(config: Config, overrides: Overrides = None, arm: Arms = None) -> None:
    """Print it with every default filled in; can be run again."""
    import yaml

    from configs.check import resolved

    typer.echo(yaml.safe_dump(resolved(load_config(config, overrides, arm, None)), sort_keys=False), nl=False)


def main() -> NoReturn:
    """Entry point: exit code 0, 2 for a configuration or command line that cannot run, 3 for a run that ended because
    nothing moved, 1 for any other failure."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"gagar: {_visible(str(error))}", err=True)
        sys.exit(error.exit_code)
    except GagarError as error:
        typer.echo(f"gagar: {error.boundary.value}: {_visible(str(error))}", err=True)
        sys.exit(error.exit_code)
    except Exception:  # a fault of this program; Python's own report would show every secret that it holds
        typer.echo(_visible(traceback.format_exc()), err=True)
        sys.exit(EXIT_FAILURE)
    sys.exit(0)


def _visible(text: str) -> str:
    """What went wrong, without secrets and without characters that move a cursor: messages name what stands in files
    and answers from elsewhere."""
    from infra.scrub import scrub
    from infra.unseen import visible

    return visible(scrub(text))


if __name__ == "__main__":
    main()
