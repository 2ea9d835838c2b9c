"""Which loader reads what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import assert_never

from configs.errors import ConfigError
from configs.schema import FolderSource, HarborSource, MimoSource, SwebenchSource
from envs.formats.folder import is_task_folder, read_folders
from envs.formats.harbor import is_harbor, read_harbor
from envs.formats.hub import is_hub
from envs.formats.mimo import read_mimo
from envs.formats.records import Broken, Listing
from envs.formats.rows import read_rows
from envs.formats.stream import ListedTasks
from envs.formats.swebench import read_swebench
from envs.task import Needs

ListedConfig = SwebenchSource | MimoSource | HarborSource | FolderSource
FORMATS: dict[str, type[ListedConfig]] = {
    "swebench": SwebenchSource,
    "harbor": HarborSource,
    "mimo": MimoSource,
    "folder": FolderSource,
}


def read_listing(config: ListedConfig, path: str | None = None) -> Listing:
    """Every record, right or wrong, with what the source gives its sandboxes.

    Args:
        path: another place than the configuration's.

    Raises ConfigError if it cannot be read at all.
    """
    listing = _read(config, path or config.path)
    needs = Needs(**config.resources.model_dump())
    records = [replace(record, task=replace(record.task, needs=needs)) for record in listing.records]
    return replace(listing, records=records)


def _read(config: ListedConfig, where: str) -> Listing:
    if isinstance(config, SwebenchSource | MimoSource):
        rows = where if is_hub(where) else Path(where)
        if isinstance(rows, Path) and not rows.is_file():
            raise _nothing(config, where, "file of JSON lines or parquet")
        return read_swebench(rows, config) if isinstance(config, SwebenchSource) else read_mimo(rows, config)
    if is_hub(where) or not Path(where).is_dir():
        raise _nothing(config, where, "folder of tasks")
    match config:
        case HarborSource():
            return read_harbor(Path(where), config)
        case FolderSource():
            return read_folders(Path(where), config)
        case _:
            assert_never(config)


def _nothing(config: ListedConfig, where: str, what: str) -> ConfigError:
    return ConfigError(f"{where}: no such {what}; tasks of type {config.type} are read from one")


def make_listed(name: str, config: ListedConfig) -> ListedTasks:
    """The source over the listed tasks. Raises ConfigError that names the key, and the records that are wrong."""
    if config.heldout_path is not None and config.heldout_share:
        raise ConfigError(f"sources.{name}.heldout_share: has no effect beside heldout_path; remove one of them")
    train = _listed(f"sources.{name}.path", config, config.path)
    heldout = None
    if config.heldout_path is not None:
        heldout = _listed(f"sources.{name}.heldout_path", config, config.heldout_path)
        both = {record.record_id for record in train.records} & {record.record_id for record in heldout.records}
        if both:
            raise ConfigError(
                f"sources.{name}.heldout_path: {len(both)} of its tasks are in path, too (e.g. {min(both)}); take them "
                "out of one of the two"
            )
    return ListedTasks(
        name,
        config.seed,
        train.usable(f"sources.{name}.path"),
        None if heldout is None else heldout.usable(f"sources.{name}.heldout_path"),
        config.heldout_share,
    )


def _listed(key: str, config: ListedConfig, path: str) -> Listing:
    try:
        return read_listing(config, path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}") from None


def find_format(path: Path) -> str:
    """The format of a file or folder, by what is in it. Raises ConfigError."""
    if path.is_file():
        first = next((row for _, row in read_rows(path) if not isinstance(row, Broken)), {})
        return "mimo" if "instance_json" in first else "swebench"
    places = [path, *sorted(path.iterdir())] if path.is_dir() else []
    for place in places:
        if is_harbor(place):
            return "harbor"
        if is_task_folder(place):
            return "folder"
    raise ConfigError(
        f"{path}: no tasks of a known format; give a file of rows, or a folder of folders with task.toml and "
        "statement.md or instruction.md, or say which by --format"
    )


def default_config(name: str, path: Path, repos: Path | None = None, scripts: Path | None = None) -> ListedConfig:
    """A source of the named format over a path, all else by default."""
    values: dict[str, object] = {"type": name, "groups_per_step": 0, "path": str(path)}
    if repos is not None and name in ("swebench", "mimo"):
        values["repos"] = str(repos)
    if scripts is not None and name == "swebench":
        values["scripts"] = str(scripts)
    return FORMATS[name].model_validate(values)
