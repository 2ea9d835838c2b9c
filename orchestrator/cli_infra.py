"""The command `gagar infra render`. `register` adds it to the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import ConfigError
from infra.errors import StorageError

if TYPE_CHECKING:
    from configs.schema import RunConfig

TARGETS = "kuberay, rayjob, ray, slurm or docker"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    infra = typer.Typer(
        help="Files that start a configuration on a cluster; starts nothing itself.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    infra.command(
        epilog="Example: gagar infra render configs/cluster.yaml --target kuberay --out deploy output=/shared/runs"
    )(render)
    infra.callback()(lambda: None)  # a group, though it has one command
    app.add_typer(infra, name="infra")


def render(
    config: Annotated[Path, typer.Argument(help="Configuration file, e.g. configs/cluster.yaml.")],
    target: Annotated[str, typer.Option(help=f"What to render for: {TARGETS}.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to single keys, as of `gagar train`.")
    ] = None,
    arm: Annotated[list[Path] | None, typer.Option("--arm", help="File merged over CONFIG.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; without it they are printed.")] = None,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs of the largest node.")] = 32,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of the largest node.")] = 8,
    memory_gib: Annotated[int, typer.Option(min=4, help="Memory of the largest node, in GiB.")] = 128,
    image: Annotated[str | None, typer.Option(help="Container image; default: as infra/docker names it.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Restarts with --resume after a failure.")] = 6,
    host: Annotated[
        list[str] | None, typer.Option(metavar="TYPE=ADDRESS,...", help="Target ray: hosts of a node type, and head=.")
    ] = None,
) -> None:
    """Render the files that run this configuration on a cluster: node types, pools, labels and storage come from it."""
    from infra.nodes import NodeSize
    from infra.render import Choices, Target
    from infra.render import render as render_files

    if target not in set(Target):
        raise ConfigError(f"--target {target}: is none of {TARGETS}")
    files = render_files(
        _load(config, overrides or [], arm or [], name),
        Target(target),
        Choices(
            command=command_line(sys.argv[1:]),
            size=NodeSize(cpus=cpus, gpus=gpus, memory_gib=memory_gib),
            image=image,
            restarts=restarts,
            hosts=parse_hosts(host or []),
        ),
    )
    for file, text in files.items():
        if out is None:
            typer.echo(text if len(files) == 1 else f"{text}\n# ---- end of {file}")
            continue
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{out / file}: cannot be written ({error}); give another --out") from error
        typer.echo(str(out / file))


def parse_hosts(given: list[str]) -> dict[str, tuple[str, ...]]:
    """TYPE=ADDRESS,... as a mapping. Raises ConfigError."""
    hosts: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, addresses = text.partition("=")
        if not (name and equals and addresses):
            raise ConfigError(f"--host {text}: write TYPE=ADDRESS,ADDRESS, e.g. head=10.0.0.1")
        hosts[name] = (*hosts.get(name, ()), *(a.strip() for a in addresses.split(",")))
    return hosts


def command_line(arguments: list[str]) -> str:
    """The command as one line of a comment, without what looks like a secret."""
    from configs.secrecy import redact

    return redact(shlex.join(["gagar", *arguments])).replace("\n", " ")


def _load(config: Path, overrides: list[str], arms: list[Path], name: str | None) -> RunConfig:
    """A configuration that can run. Folders of models may be missing here: they lie on the cluster's storage."""
    import json

    from configs.check import find_problems
    from configs.load import load
    from configs.schema import RunConfig

    named = [] if name is None else [f"name={json.dumps(name)}"]
    loaded = load(RunConfig, config, [*overrides, *named], arms)
    problems = [p for p in find_problems(loaded.config) if not ("model" in p.path and "no such folder" in p.message)]
    if problems:
        raise loaded.refuse(problems)
    return loaded.config
