"""Which loader reads what."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from configs.errors import ConfigError
from configs.schema import FolderSource, HarborSource, MimoSource, SwebenchSource
from envs.formats.folder import is_task_folder, read_folders
from envs.formats.harbor import is_harbor, read_harbor
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
    """Every record, right or wrong.

    Args:
        path: another place than the configuration's.

    Raises ConfigError if it cannot be read at all.
    """
    place = Path(path or config.path)
    rows = isinstance(config, SwebenchSource | MimoSource)
    if not (place.is_file() if rows else place.is_dir()):
        what = "file of JSON lines or parquet" if rows else "folder of tasks"
        raise ConfigError(f"{place}: no such {what}; tasks of type {config.type} are read from one")
    match config:
        case SwebenchSource():
            return read_swebench(place, config)
        case MimoSource():
            return read_mimo(place, config)
        case HarborSource():
            return read_harbor(place, config)
        case FolderSource():
            return read_folders(place, config)
        case _:
            assert_never(config)


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
        Needs(**config.resources.model_dump()),
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
