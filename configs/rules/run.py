"""A run: its evaluation, telemetry, cluster, folder and mirror."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from configs.problems import Problem
from configs.rules.findings import hidden, idle, problem
from configs.schema import RunConfig
from configs.secrecy import is_secret


def evaluation(config: RunConfig) -> Iterator[Problem]:
    """Held-out evaluation needs a source, and keys of a switched-off one do nothing."""
    if config.eval is None:
        return
    if config.eval.source not in config.sources:
        names = ", ".join(config.sources) or "none"
        yield problem(
            config,
            "eval.source",
            f"is not among the sources ({names}); choose one, add it with groups_per_step: 0, or set eval: null",
        )
    if not config.eval.before and not config.eval.after and config.eval.every_steps is None:
        yield problem(
            config,
            "eval",
            "has no effect, because before and after are false and every_steps is null; set eval: null, or one of them",
        )


def telemetry(config: RunConfig) -> Iterator[Problem]:
    """Keys of a switched-off sink, and an archive of what does not happen."""
    if config.grader is None:
        yield from idle(config, "telemetry.archive", "there is no grader, and only graded groups are kept")
    if config.telemetry.wandb.mode == "disabled":
        for key in ("project", "entity"):
            yield from idle(config, f"telemetry.wandb.{key}", "telemetry.wandb.mode = disabled")
    elif len(config.telemetry.wandb.project) > 128 or re.search(r"[/\\#?%:]", config.telemetry.wandb.project):
        yield problem(
            config,
            "telemetry.wandb.project",
            "is not a name that W&B takes; write at most 128 characters, without any of / \\ # ? % :",
        )


def ray_cluster(config: RunConfig) -> Iterator[Problem]:
    """A running cluster has an address, and its own object store."""
    address = config.ray.address
    if address is None:
        return
    if address == "local":
        yield problem(config, "ray.address", "starts a Ray of its own, as null does; write address: null")
    elif address != "auto" and not _is_ray_address(address):
        yield problem(
            config,
            "ray.address",
            "is not the address of a cluster; write auto, HOST:PORT (e.g. 10.0.0.1:6379; ports are 1024 to 65535) or "
            "ray://HOST:PORT, or null for a local Ray",
        )
    yield from idle(
        config, "ray.object_store_mib", f"ray.address = {address} joins a running cluster, whose nodes fix it"
    )


def _is_ray_address(text: str) -> bool:
    found = re.fullmatch(
        r"(?:ray://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):([0-9]{1,5})", text
    )
    return found is not None and 1024 <= int(found[1]) <= 65535


def run_folder(config: RunConfig) -> Iterator[Problem]:
    """Where the run's folder cannot be made, whatever the rights."""
    path = Path(config.output).absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    if not os.path.isdir(path):
        yield problem(config, "output", f"cannot be made, because {path} is no folder; give another one")


def mirror(config: RunConfig) -> Iterator[Problem]:
    """The address stands in the run folder, so it holds no key; and no node takes it for a folder of its own."""
    address, key = config.checkpoint.mirror, "checkpoint.mirror"
    if address is None:
        return
    scheme, found, rest = address.partition("://")
    if not found or not scheme.isalnum() or not rest.strip("/"):
        yield problem(config, key, "is no address; give e.g. s3://bucket/runs or file:///shared/runs")
    elif "@" in rest.partition("/")[0] or "?" in rest or is_secret(address):
        yield hidden(key, "may hold a secret, which would stand in the run folder; give it by the environment")
