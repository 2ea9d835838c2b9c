"""The `minirepo` source: an endless stream of generated code-repair tasks with scripted solutions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache, lru_cache

from configs.schema import MinirepoSource
from envs.minirepo.build import Plan, build
from envs.minirepo.experts import experts
from envs.minirepo.shape import Shape
from envs.minirepo.templates import KINDS, SHAPES
from envs.task import ExpertTrace, Split, Task, TaskKind
from infra.errors import ConfigError


class MinirepoTasks:
    """Tasks in order of their index; every stretch of as many tasks as there are bug kinds holds each kind once."""

    kind = TaskKind.CODE

    def __init__(self, name: str, config: MinirepoSource) -> None:
        """Raises ConfigError for a bug kind that does not exist."""
        unknown = sorted(set(config.kinds) - set(KINDS))
        if unknown:
            raise ConfigError(f"sources.{name}.kinds: unknown bug kind {unknown[0]!r}; choose from {', '.join(KINDS)}")
        self.name = name
        self._seed = config.seed
        self._kinds = tuple(kind for kind in KINDS if not config.kinds or kind in config.kinds)
        self._plan = lru_cache(maxsize=256)(self._make)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` >= 0 of a split."""
        return self._plan(split, index).task

    def experts(self, task: Task) -> Iterator[ExpertTrace]:
        """Every scripted solution of a task of this source."""
        _, split, _, index = task.task_id.rsplit("/", 3)
        return experts(self._plan(Split(split), int(index)), random.Random(f"experts/{self._seed}/{split}/{index}"))

    def _make(self, split: Split, index: int) -> Plan:
        if index < 0:
            raise ValueError(f"task index {index} is negative")
        block, place = divmod(index, len(self._kinds))
        order = list(self._kinds)
        random.Random(f"minirepo/order/{self._seed}/{split}/{block}").shuffle(order)
        rng = random.Random(f"minirepo/{self._seed}/{split}/{index}")
        shape = rng.choice(_shapes(split, order[place]))
        return build(shape, split, f"{self.name}/{split}/{self._seed}/{index}", self.name, rng)


@cache
def _shapes(split: Split, kind: str) -> tuple[Shape, ...]:
    return tuple(shape for shape in SHAPES[split] if shape.kind == kind)
