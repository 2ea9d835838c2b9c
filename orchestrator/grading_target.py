"""Which stored groups `gagar grade` is asked about: those of a run, of a folder, or built-in ones with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import RunConfig
from grader.canary import builtin_canaries
from grader.stored import StoredGroup
from grader.stored_folder import read_groups
from infra.errors import ConfigError, StorageError
from orchestrator.archive import read_archived
from orchestrator.runfiles import ARCHIVE, GROUPS, read_jsonl

BUILTIN = "minirepo:heldout:N[:SEED]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Groups to be graded."""

    groups: Sequence[StoredGroup]
    order_seeds: Mapping[str, int]
    """Group id -> the seed of the candidates' order that a run used; others get one from the configuration's seed."""
    missing: int = 0
    """Graded groups of a run that are not in its archive."""


def load_target(text: str, config: RunConfig, limit: int | None = None) -> Target:
    """The groups that PATH names, the first `limit` of them.

    Raises:
        ConfigError: it names nothing that could hold groups.
        StorageError: a group cannot be read, or there is none.
    """
    if text.startswith("minirepo:"):
        return _builtin(text, config, limit)
    path = Path(text)
    if not path.is_dir():
        raise ConfigError(f"{text}: no such folder; give a run, a folder of stored groups, or {BUILTIN}")
    if (path / GROUPS).is_file():
        return _of_run(path, limit)
    return Target(groups=read_groups(path)[:limit], order_seeds={})


def _builtin(text: str, config: RunConfig, limit: int | None) -> Target:
    _, split, *numbers = text.split(":")
    if split != "heldout" or len(numbers) not in (1, 2) or not all(n.isascii() and n.isdigit() for n in numbers):
        raise ConfigError(f"{text}: not built-in groups; write {BUILTIN}, e.g. minirepo:heldout:24")
    count, seed = int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0
    if count == 0:
        raise ConfigError(f"{text}: no group at all; give a number above 0")
    supply = builtin_canaries(seed, config.algorithm.rubric)
    return Target(groups=[supply(i) for i in range(min(count, limit or count))], order_seeds={})


def _of_run(run_dir: Path, limit: int | None) -> Target:
    groups: list[StoredGroup] = []
    seeds: dict[str, int] = {}
    missing = 0
    # A resumed run can sample a group again that had ended after its checkpoint: the later line is about what is kept.
    for record in {record["group_id"]: record for record in read_jsonl(run_dir / GROUPS)}.values():
        if record.get("grader") is None:
            continue
        if limit is not None and len(groups) == limit:
            break
        group = read_archived(run_dir / ARCHIVE, record)
        if group is None:
            missing += 1
            continue
        groups.append(group)
        seeds[group.group_id] = int(record["grader"]["order_seed"])
    if not groups:
        raise StorageError(
            f"{run_dir}: none of its graded groups is archived ({missing} are not); a run keeps them with "
            "telemetry.archive: graded"
        )
    return Target(groups=groups, order_seeds=seeds, missing=missing)
