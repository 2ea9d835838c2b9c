"""The commands about tasks: `gagar tasks check`, `validate` and `pull`. `register` adds them to the application."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import ConfigError, GagarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from configs.schema import SandboxConfig
    from envs.formats.listing import ListedConfig
    from envs.formats.records import Listing, Record
    from envs.formats.validate import Outcome

EXIT_INTERRUPTED = 130


class Format(StrEnum):
    """Formats that --format takes."""

    SWEBENCH = "swebench"
    HARBOR = "harbor"
    MIMO = "mimo"
    FOLDER = "folder"


tasks_app = typer.Typer(
    help="Look at tasks of your own before training on them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: gagar tasks validate configs/tasks/folder.yaml --times 3 --output outcomes.jsonl",
)

Target = Annotated[
    Path, typer.Argument(metavar="PATH", help="File or folder of tasks, or a configuration (.yaml) with such sources.")
]
Named = Annotated[Format | None, typer.Option("--format", help="Format of PATH; without it, by what is in it.")]
Repos = Annotated[Path | None, typer.Option(help="Folder of repositories of rows, as in sources.*.repos.")]
Scripts = Annotated[Path | None, typer.Option(help="Folder run_scripts of SWE-bench Pro, as in sources.*.scripts.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(tasks_app, name="tasks")


@tasks_app.command(epilog="Example: gagar tasks check my-tasks.jsonl --format swebench --repos repos")
def check(target: Target, form: Named = None, repos: Repos = None, scripts: Scripts = None) -> None:
    """Read every task and say what is wrong with it, and where; starts no sandbox."""
    wrong = 0
    for listing in _listings(target, form, repos, scripts)[0]:
        for finding in listing.findings:
            typer.echo(str(finding))
        wrong += len(listing.findings) + (not listing.records and not listing.findings)
        typer.echo(f"{listing.path}: {len(listing.records)} tasks can be used, {len(listing.findings)} cannot")
    if wrong:
        raise ConfigError(f"{target}: not all of its tasks can be used; mend them, or take them out")


@tasks_app.command(epilog="Example: gagar tasks validate my-tasks --times 3 --output outcomes.jsonl")
def validate(
    target: Target,
    form: Named = None,
    repos: Repos = None,
    scripts: Scripts = None,
    times: Annotated[int, typer.Option(min=1, help="How often each patch is verified.")] = 1,
    at_once: Annotated[int, typer.Option("--slots", min=1, help="Tasks at once.")] = 2,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks of each place.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Keep every outcome in this file; tasks that it has are not run again.")
    ] = None,
) -> None:
    """Run every task in real sandboxes: its start must fail, its reference must pass, each time alike."""
    from envs.formats import validate as validation

    listings, sandbox = _listings(target, form, repos, scripts)
    outcomes: list[Outcome] = []
    try:
        for listing in listings:
            records = listing.usable(listing.path)[:limit]
            outcomes += asyncio.run(_validate(records, sandbox, times, at_once, output))
    except KeyboardInterrupt:
        how = "give --output to be able to go on" if output is None else "the same command goes on with the rest"
        typer.echo(f"gagar: stopped by the keyboard; {how}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    for judgement in validation.Judgement:
        names = [outcome.record for outcome in outcomes if outcome.judgement is judgement]
        if names:
            listed = "" if judgement in validation.GOOD else f": {', '.join(names)}"
            typer.echo(f"{len(names)} of {len(outcomes)} {judgement.value}{listed}")
    bad = [outcome for outcome in outcomes if outcome.judgement not in validation.GOOD]
    if bad:
        raise GagarError(f"{len(bad)} of {len(outcomes)} tasks are not fit to train on; mend them, or take them out")


@tasks_app.command(epilog="Example: gagar tasks pull configs/cluster.yaml --limit 50")
def pull(
    target: Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration (.yaml) with sources of tasks.")],
    at_once: Annotated[int, typer.Option("--slots", min=1, help="Images at once.")] = 2,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the images of the first so many tasks.")] = None,
) -> None:
    """Pull the tasks' images: to this host (docker, podman), or to all nodes that sandboxes may run on (kubernetes)."""
    listings, sandbox = _listings(target, None, None, None)
    tasks = [record.task for listing in listings for record in listing.usable(listing.path)[:limit]]
    images = dict.fromkeys(task.image.name for task in tasks if task.image is not None)
    if not images:
        raise ConfigError(f"{target}: none of its tasks names an image, so there is nothing to pull")
    failed = asyncio.run(_pull(list(images), sandbox, at_once))
    if failed:
        raise GagarError(f"{failed} of {len(images)} images could not be pulled")


async def _pull(images: Sequence[str], sandbox: SandboxConfig, at_once: int) -> int:
    """How many could not be had."""
    from envs.deployment import ServiceProvider
    from envs.sandbox import make_provider
    from infra.errors import SandboxError

    provider = make_provider(sandbox.model_copy(update={"warm": 0}) if hasattr(sandbox, "warm") else sandbox)
    if not isinstance(provider, ServiceProvider):
        raise ConfigError(f"rollout.sandbox.type={sandbox.type}: has no images; choose docker or kubernetes")
    slots = asyncio.Semaphore(at_once)

    async def one(image: str) -> bool:
        async with slots:
            try:
                await provider.pull(image)
            except SandboxError as error:
                typer.echo(f"{image}: {error}")
                return False
        typer.echo(f"{image}: there")
        return True

    try:
        return sum(not done for done in await asyncio.gather(*map(one, images)))
    finally:
        await provider.close()


async def _validate(
    records: Sequence[Record], sandbox: SandboxConfig, times: int, at_once: int, output: Path | None
) -> list[Outcome]:
    from envs.formats.validate import GOOD, validate
    from envs.sandbox import make_provider
    from infra.unseen import visible

    def say(done: int, total: int, outcome: Outcome) -> None:
        typer.echo(f"{done}/{total} {outcome.record}: {outcome.judgement.value}")
        if outcome.judgement not in GOOD and outcome.detail:
            typer.echo("    " + visible(outcome.detail.strip()).replace("\n", "\n    "))

    provider = make_provider(sandbox)
    try:
        return await validate(records, provider, times=times, at_once=at_once, output=output, say=say)
    finally:
        await provider.close()


def _listings(
    target: Path, form: Format | None, repos: Path | None, scripts: Path | None
) -> tuple[list[Listing], SandboxConfig]:
    """What the target holds, and the sandboxes that a configuration names; jails for a bare path."""
    from configs.schema import JailSandbox
    from envs.formats.listing import default_config, find_format, read_listing

    if target.suffix not in (".yaml", ".yml"):
        if not target.exists():
            raise ConfigError(f"{target}: no such file or folder")
        name = find_format(target) if form is None else form.value
        return [read_listing(default_config(name, target.resolve(), repos, scripts))], JailSandbox()
    from configs.load import load
    from configs.schema import ListedSource, RunConfig

    config = load(RunConfig, target).config
    sources: list[ListedConfig] = [source for source in config.sources.values() if isinstance(source, ListedSource)]
    if not sources:
        raise ConfigError(f"{target}: sources: none of them reads tasks from files; give a file or folder of tasks")
    if form or repos or scripts:
        raise ConfigError(f"{target}: --format, --repos and --scripts stand in its sources already; leave them out")
    listings = []
    for source in sources:
        listings += [read_listing(source, path) for path in (source.path, source.heldout_path) if path is not None]
    return listings, config.rollout.sandbox
