"""The commands that answer whether something works: `gagar eval`, `experiment`, `audit`, `report`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import ConfigError, GagarError

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from orchestrator.experiment import Cell, Experiment

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    example = "gagar eval configs/learn.yaml --checkpoint runs/learn/checkpoints/step-000030 --samples 3"
    app.command(name="eval", epilog=f"Example: {example}")(evaluate)
    app.command(epilog="Example: gagar experiment configs/ablation.yaml --only outcome:0")(experiment)
    app.command(epilog="Example: gagar report runs/ablation --output ablation.html")(report)
    runs = "runs/ablation/redistribute runs/ablation/outcome"
    app.command(epilog=f"Example: gagar audit {runs} --grader judge.yaml")(audit)


def evaluate(
    config: Annotated[Path, typer.Argument(help="Configuration file, e.g. configs/quickstart.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to single keys, e.g. eval.tasks=120.")
    ] = None,
    arm: Annotated[list[Path] | None, typer.Option("--arm", help="File merged over CONFIG.")] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            help="Checkpoint of a run, or any folder in Hugging Face format; several for one table. Without it, "
            "engine.model."
        ),
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Name of each checkpoint in the table and in files.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Trajectories of each task; short for eval.samples.")
    ] = None,
    pass_at: Annotated[
        int | None, typer.Option(min=1, help="k of pass@k, where it is not the number of samples.")
    ] = None,
    grade: Annotated[bool, typer.Option(help="Have the configured grader judge what passes.")] = True,
    output: Annotated[
        Path | None, typer.Option(help="Folder that keeps every trajectory's result and what passed, for gagar audit.")
    ] = None,
) -> None:
    """Measure policies on held-out tasks: avg@k, pass@k, turns, tokens and tiers, with 95 % intervals."""
    import json

    from orchestrator.cli_config import load_config

    sampled = [] if samples is None else [f"eval.samples={json.dumps(samples)}"]
    loaded = load_config(config, [*(overrides or []), *sampled], arm)
    if loaded.eval is None:
        raise ConfigError(f"{config}: eval = null: nothing says what to evaluate on; give e.g. eval.source=minirepo")
    if pass_at is not None and pass_at > loaded.eval.samples:
        raise ConfigError(
            f"--pass-at {pass_at}: needs as many samples of each task; eval.samples is {loaded.eval.samples}"
        )
    policies = _policies(loaded, checkpoint or [], label or [])
    from orchestrator.eval_command import run_eval

    run_eval(loaded, policies, k=pass_at, grade=grade, output=output)


def _policies(config: RunConfig, checkpoints: list[Path], labels: list[str]) -> list[tuple[str, Path]]:
    """(label, folder) of each policy, every one verified before anything starts."""
    from orchestrator.evaluation import labels_of

    if labels and len(labels) != max(len(checkpoints), 1):
        raise ConfigError(f"--label: {len(labels)} names for {max(len(checkpoints), 1)} policies; give one for each")
    if bad := [name for name in labels if not name.replace("-", "").replace("_", "").replace(".", "").isalnum()]:
        raise ConfigError(f"--label {bad[0]}: is no name of a file; use letters, digits, '.', '_' and '-'")
    if len(set(labels)) < len(labels):
        raise ConfigError("--label: one name is given twice; give another one")
    if not checkpoints:
        return [(labels[0] if labels else "start", Path(config.engine.model))]
    return list(zip(labels or labels_of(checkpoints), map(policy_folder, checkpoints), strict=True))


def policy_folder(checkpoint: Path) -> Path:
    """The Hugging Face folder of a checkpoint, which is the folder itself or its `policy`; of a run's checkpoint, after
    it was held against its manifest."""
    from configs.models import missing_files
    from orchestrator.export import checked_policy

    if (policy := checked_policy(checkpoint)) is not None:
        return policy
    lacking = f"it lacks {', '.join(missing_files(checkpoint))}" if checkpoint.is_dir() else "it is no folder"
    raise ConfigError(
        f"--checkpoint {checkpoint}: not a checkpoint ({lacking}); give runs/NAME/checkpoints/step-N or a Hugging Face "
        "folder"
    )


def experiment(
    file: Annotated[Path, typer.Argument(help="Experiment file, e.g. configs/ablation.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to keys of the experiment, e.g. seeds=[0].")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ARM[:SEED]", help="Only these cells; may be given several times.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All arms, not only those under `run`.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every cell, print what is left and for how long; start nothing.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Only write the table anew, and print it.")] = False,
) -> None:
    """Run arms x seeds of one configuration, evaluate each, and hold them against each other. The same command goes on
    after a stop."""
    from configs.experiment_schema import ExperimentConfig
    from configs.load import load
    from orchestrator.experiment import load_experiment, refuse_other
    from orchestrator.experiment_table import markdown, write_table

    loaded = load_experiment(load(ExperimentConfig, file, overrides or []))
    cells = loaded.chosen(only or [], everything=everything)
    if dry_run:
        _print_plan(loaded, cells)
        return
    if not table:
        from orchestrator.experiment_run import run_experiment, run_until_stopped

        began_s = time.monotonic()

        def say(text: str) -> None:
            from orchestrator.progress import clock_text

            typer.echo(f"[{clock_text(time.monotonic() - began_s)}] {text}")

        try:
            failed = run_until_stopped(run_experiment(loaded, cells, say=say))
        except KeyboardInterrupt:
            typer.echo("gagar: stopped; the same command goes on where this one was", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        typer.echo((loaded.folder / "table.md").read_text(encoding="utf-8"))
        if failed:
            raise GagarError(
                f"{len(failed)} of {len(cells)} cells failed ({', '.join(failed)}); {loaded.folder / 'logs'} says why; "
                "the same command tries them again"
            )
        return
    if not loaded.folder.is_dir():
        raise ConfigError(f"{loaded.folder}: no such experiment yet; run it without --table first")
    refuse_other(loaded)
    typer.echo(markdown(write_table(loaded)))


def _print_plan(loaded: Experiment, cells: list[Cell]) -> None:
    from orchestrator.experiment import remaining

    typer.echo(f"{loaded.folder}: {len(cells)} cells, {cells[0].config.steps} steps each")
    for cell in cells:
        typer.echo(f"  {cell.name:36} {loaded.state(cell).value}")
    left = remaining(loaded, cells)
    said = "unknown" if left.hours is None else f"about {left.hours:.1f} h"
    at_once = f", {loaded.config.parallel} at once" if loaded.config.parallel > 1 else ""
    typer.echo(f"{left.cells} to go{at_once}: {said} ({left.basis})")


def audit(
    run_a: Annotated[
        str, typer.Argument(help="An evaluated run, an arm of an experiment (runs/ablation/redistribute), or a file.")
    ],
    run_b: Annotated[str, typer.Argument(help="What it is held against, evaluated on the same held-out tasks.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to single keys of the grader's file.")
    ] = None,
    grader: Annotated[
        Path | None, typer.Option(help="Configuration of a run; its grader judges. Not the one that they trained with.")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks, drawn whatever became of them.")] = 30,
    per_run: Annotated[int, typer.Option(min=1, help="Trajectories of each run and task at most.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    export: Annotated[
        Path | None, typer.Option(help="Write the same cases as an HTML sheet that people fill in.")
    ] = None,
    answers: Annotated[
        list[Path] | None, typer.Option("--import", help="Answers that the sheet saved; may be given several times.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the cases, the key and the figures; by default beside RUN_A.")
    ] = None,
) -> None:
    """Judge two runs blind: the same tasks, candidates anonymous and shuffled, by another grader or by people."""
    from configs.check import load_run
    from orchestrator.audit_command import run_audit
    from orchestrator.blind_audit import short_name

    if grader is None and export is None and not answers:
        raise ConfigError(
            "nobody is asked to judge; give --grader CONFIG, --export SHEET.html or --import ANSWERS.json"
        )
    if overrides and grader is None:
        raise ConfigError(f"{overrides[0]}: there is no --grader whose keys it could change")
    config = None if grader is None else load_run(grader, overrides or []).config
    if config is not None and config.grader is None:
        raise ConfigError(f"{grader}: grader = null: there is nobody to judge; give a configuration with a grader")
    folder = output or Path(run_a).parent / f"audit-{short_name(run_a)}-against-{short_name(run_b)}"
    run_audit(
        (run_a, run_b),
        tasks=tasks,
        most=per_run,
        seed=seed,
        output=folder,
        grader=config,
        export=export,
        answers=answers or [],
    )


def report(
    runs: Annotated[list[Path], typer.Argument(help="Runs, running or ended; the folder of an experiment: its cells.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default report.html in the folder that is given first.")
    ] = None,
) -> None:
    """Write one page about one run, or hold several against each other; it opens without a network."""
    from orchestrator.report import write_report
    from orchestrator.report_compare import runs_of, write_comparison

    if len(runs) == 1 and not (runs[0] / "experiment.yaml").is_file():
        typer.echo(write_report(runs_of(runs)[0], output))
        return
    typer.echo(write_comparison(runs, output or runs[0] / ("report.html" if len(runs) == 1 else "comparison.html")))
