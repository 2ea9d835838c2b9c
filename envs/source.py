"""Task sources by configuration."""

from __future__ import annotations

from configs.schema import MinirepoSource, SourceConfig
from envs.minirepo.family import MinirepoTasks
from envs.task import ExpertSource


def make_source(name: str, config: SourceConfig) -> ExpertSource:
    """The source named `name` in the mix. Raises ConfigError for a setting that it cannot serve."""
    if isinstance(config, MinirepoSource):
        return MinirepoTasks(name, config)
    raise NotImplementedError(config.type)
