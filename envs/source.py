"""Task sources by configuration."""

from __future__ import annotations

from typing import assert_never

from configs.schema import (
    ArithSource,
    FilesSource,
    FolderSource,
    HarborSource,
    MimoSource,
    MinirepoSource,
    SourceConfig,
    SwebenchSource,
)
from envs.arith import ArithTasks
from envs.files import FilesTasks
from envs.minirepo.family import MinirepoTasks
from envs.task import ExpertSource


def make_source(name: str, config: SourceConfig) -> ExpertSource:
    """The source named `name` in the mix. Raises ConfigError for a setting that it cannot serve."""
    match config:
        case MinirepoSource():
            return MinirepoTasks(name, config)
        case FilesSource():
            return FilesTasks(name, config)
        case ArithSource():
            return ArithTasks(name, config)
        case SwebenchSource() | MimoSource() | HarborSource() | FolderSource():
            from envs.formats.listing import make_listed

            return make_listed(name, config)
        case _:
            assert_never(config)
