"""Files that start one configuration on a cluster: `gagar infra render`. Pure but for reading its own templates.

    configuration -> node types (infra/nodes.py) -> templates/*.j2 -> {file name: text}

Nothing rendered holds a secret: keys and Ray's token come from Kubernetes Secrets or from files of the environment that
the rendered files name. Every file begins with the command that rendered it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from configs.check import resolved
from configs.errors import ConfigError
from configs.schema import RayConfig, RunConfig, VllmGraderBackend
from infra.nodes import NodeSize, NodeType, demands, dns_label, node_types

IMAGE_ROOT = "/opt/gagar"
"""Where the images of infra/docker keep the project."""
RAY_PORT = 6379
HEAD_MEMORY_GIB = 16
SHM_SHARE = 0.35
"""Of a node's memory: its object store, and what torch and NCCL put beside it."""
STORE_SHARE = 0.30
"""Of a node's memory, as Ray itself takes."""
_PROJECT = Path(__file__).parents[1]
_OF_ONE_HOST = {"bin", "boot", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "tmp"}
_OF_ONE_HOST |= {"usr", "var"}


class Target(StrEnum):
    """What the files are for."""

    KUBERAY = "kuberay"
    RAYJOB = "rayjob"
    RAY = "ray"
    SLURM = "slurm"
    DOCKER = "docker"


FILES: Mapping[Target, tuple[str, ...]] = {
    Target.KUBERAY: ("kuberay.yaml", "storage.yaml"),
    Target.RAYJOB: ("rayjob.yaml", "storage.yaml"),
    Target.RAY: ("ray-cluster.yaml", "start.sh", "run.sh", "config.yaml"),
    Target.SLURM: ("job.sbatch", "config.yaml"),
    Target.DOCKER: ("docker.sh", "run.sh", "config.yaml"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a configuration does not say."""

    command: str
    """The command line that asks for the files."""
    size: NodeSize
    image: str | None = None
    """null: gagar:VERSION-cuda or gagar:VERSION-cpu, as infra/docker builds them."""
    restarts: int = 6
    """Times that a driver that failed or was lost is started again with --resume."""
    storage_gib: int = 500
    """Of each shared folder that Kubernetes is asked for."""
    hosts: Mapping[str, tuple[str, ...]] | None = None
    """Target ray: node type -> addresses; "head" -> one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder that every node sees."""

    path: str
    name: str
    """Part of Kubernetes names."""
    read_only: bool


def render(config: RunConfig, target: Target, choices: Choices) -> dict[str, str]:
    """File name -> text.

    Raises:
        ConfigError: the configuration cannot run on several machines as it is (a folder of one host, a pool that asks
            for nothing, an actor larger than a node), or hosts are missing. Names key, value and remedy.
    """
    if target is not Target.DOCKER:
        config = config.model_copy(update={"ray": RayConfig(address="auto")})
    elif config.ray.address is not None:
        raise ConfigError(
            f"ray.address={config.ray.address}: a container by itself starts its own Ray; give ray.address=null"
        )
    mounts = shared_folders(config)
    types = [] if target is Target.DOCKER else node_types(demands(config), choices.size)
    gpu = any(d.gpus for d in demands(config))
    name = dns_label(config.name)
    if not name:
        raise ConfigError(f"name={config.name}: no letter or digit is left of it for Kubernetes; give another --name")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # YAML and shell; every value goes through `json` or `sh`
    )
    environment.filters |= {"json": json.dumps, "sh": lambda value: shlex.quote(str(value))}
    version = metadata.version("gagar")
    values: dict[str, Any] = {
        "command": choices.command,
        "name": name,
        "run_dir": str(PurePosixPath(config.output) / config.name),
        "image": choices.image or f"gagar:{version}-{'cuda' if gpu else 'cpu'}",
        "ray_version": metadata.version("ray"),
        "port": RAY_PORT,
        "mounts": mounts,
        "types": types,
        "head": _head(target, types),
        "variables": _variables(types, config),
        "wandb": config.telemetry.wandb.mode in ("auto", "online"),
        "restarts": choices.restarts,
        "storage_gib": choices.storage_gib,
        "gpu": gpu,
        "jails": any(d.jails for d in demands(config)),
        "shm_gib": shm_gib(choices.size.memory_gib),
        "size": choices.size,
        "store_bytes": store_bytes,
        "shm": shm_gib,
        "head_memory_gib": HEAD_MEMORY_GIB,
        "labels": _labels,
        "hosts": _hosts(types, choices) if target is Target.RAY else {},
        "rayjob": target is Target.RAYJOB,
        "slurm_time": "2-00:00:00",
    }
    values["config_yaml"] = _config_text(config, choices.command)
    values["run_sh"] = environment.get_template("run.sh.j2").render(values)
    return {
        file: values["config_yaml"] if file == "config.yaml" else environment.get_template(f"{file}.j2").render(values)
        for file in FILES[target]
    }


def shared_folders(config: RunConfig) -> list[Mount]:
    """The top folders of `output` and of all models that are not part of the image.

    Raises:
        ConfigError: one of them is relative, or lies where each host has its own files.
    """
    keys = {"output": config.output, "engine.model": config.engine.model, "learner.model": config.learner.model}
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        keys["grader.backend.engine.model"] = config.grader.backend.engine.model
    if config.grader is not None and config.grader.canaries.path is not None:
        keys["grader.canaries.path"] = config.grader.canaries.path
    written: dict[str, bool] = {}
    for key, value in keys.items():
        if key != "output" and _in_image(value) != value:
            continue
        parts = PurePosixPath(value).parts
        if not value.startswith("/") or len(parts) < 2 or parts[1] in _OF_ONE_HOST:
            raise ConfigError(
                f"{key}={value}: is a folder of one host, and every node must see it; give one on shared storage, e.g. "
                f"{key}=/shared/{'runs' if key == 'output' else 'models/policy'}"
            )
        written[parts[1]] = written.get(parts[1], False) or key == "output"
    return [
        Mount(path=f"/{top}", name=dns_label(top, 20) or "shared", read_only=not output)
        for top, output in sorted(written.items())
    ]


def shm_gib(memory_gib: int) -> int:
    """/dev/shm of a node with this memory, in GiB."""
    return max(1, int(memory_gib * SHM_SHARE))


def store_bytes(memory_gib: int) -> int:
    """Ray's object store on a node with this memory; smaller than its /dev/shm."""
    return int(memory_gib * STORE_SHARE * 2**30)


def _in_image(path: str) -> str:
    """A folder of this project as the image has it; others as they are."""
    absolute = Path(path).absolute()
    return f"{IMAGE_ROOT}/{absolute.relative_to(_PROJECT)}" if absolute.is_relative_to(_PROJECT) else path


def _config_text(config: RunConfig, command: str) -> str:
    data = resolved(config)
    data["engine"]["model"] = _in_image(config.engine.model)
    data["learner"]["model"] = _in_image(config.learner.model)
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        data["grader"]["backend"]["engine"]["model"] = _in_image(config.grader.backend.engine.model)
    if config.grader is not None and config.grader.canaries.path is not None:
        data["grader"]["canaries"]["path"] = _in_image(config.grader.canaries.path)
    return f"# Rendered by: {command}\n" + yaml.safe_dump(data, sort_keys=False)


def _head(target: Target, types: Sequence[NodeType]) -> NodeType | None:
    """The node type whose first node is the head too: under Slurm, where a node for the head alone would stand idle."""
    return types[0] if target is Target.SLURM else None


def _variables(types: Sequence[NodeType], config: RunConfig) -> list[str]:
    """Variables with keys that some part of the run reads; W&B's apart, because a run works without it."""
    found = dict.fromkeys(variable for node in types for variable in node.variables)
    for demand in demands(config):
        found |= dict.fromkeys(demand.variables)
    return list(found)


def _labels(node: NodeType) -> str:
    """As `ray start --labels` takes them."""
    return ",".join(f"{key}={value}" for key, value in node.labels.items())


def _hosts(types: Sequence[NodeType], choices: Choices) -> dict[str, tuple[str, ...]]:
    given = dict(choices.hosts or {})
    for name, count in [("head", 1), *((node.name, node.count) for node in types)]:
        addresses = given.get(name, ())
        if len(addresses) != count:
            raise ConfigError(
                f"--host {name}=...: {count} addresses are needed and {len(addresses)} are given; write "
                f"--host {name}=10.0.0.1{',10.0.0.2,...' if count > 1 else ''}"
            )
        for address in addresses:
            if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9.:-]*[A-Za-z0-9])?", address):
                raise ConfigError(f"--host {name}={address}: is no address of a host; write e.g. 10.0.0.1")
    if unknown := set(given) - {"head", *(node.name for node in types)}:
        names = ", ".join(["head", *(node.name for node in types)])
        raise ConfigError(f"--host {unknown.pop()}=...: there is no such node type; there are {names}")
    return given
