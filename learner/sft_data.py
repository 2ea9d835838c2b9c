"""Supervised examples of the policy: scripted experts' conversations in the policy's own chat markup.

Deterministic: example i of a recipe depends on the recipe and on i alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from configs.schema import SourceConfig
from configs.sft_schema import PolicyData, SftRecipe, SftSource
from envs.replay import replay
from envs.source import make_source
from envs.task import ExpertSource, ExpertTrace, Split
from infra.errors import ConfigError
from learner.sft_train import Example
from rollout.chat import ChatFormat, render_observation

KNOWN_AFTER = 60
"""Tasks of a source that must offer every strategy of its mix at least once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One expert's episode as text."""

    statement: str
    turns: tuple[tuple[str, str], ...]
    """(action, observation) in order; the last observation is empty and is not part of the conversation."""

    def texts(self) -> Iterator[str]:
        """Every message, without markup."""
        yield self.statement
        for action, observation in self.turns:
            yield action
            yield observation


class PolicyExamples:
    """Draws source, task, strategy and trace of each example from the recipe's shares."""

    def __init__(self, data: PolicyData) -> None:
        """Raises ConfigError for a strategy that no expert of its source offers."""
        self._data = data
        self._names = tuple(data.sources)
        self._sources = {name: _source(name, config) for name, config in data.sources.items()}
        for name, config in data.sources.items():
            _check_strategies(name, config, self._sources[name])

    def source(self, name: str) -> ExpertSource:
        """One of the recipe's sources."""
        return self._sources[name]

    def conversation(self, index: int, split: Split = Split.TRAIN) -> Conversation:
        """Example `index` >= 0."""
        rng = random.Random(f"sft/{split}/{index}")
        name = rng.choices(self._names, [self._data.sources[name].share for name in self._names])[0]
        source, config = self._sources[name], self._data.sources[name]
        task = source.task(split, index)
        trace = choose(list(source.experts(task)), config.strategies, rng)
        return conversation_of(trace, observation_chars=self._data.observation_chars)

    def texts(self, index: int) -> Iterator[str]:
        """Every message of example `index`, without markup."""
        yield from self.conversation(index).texts()

    def examples(self, chat: ChatFormat, *, max_tokens: int, split: Split = Split.TRAIN) -> Iterator[Example]:
        """Endless examples; those above `max_tokens` are passed over."""
        index = 0
        while True:
            example = render(chat, self._data.system_prompt, self.conversation(index, split))
            if len(example.token_ids) <= max_tokens:
                yield example
            index += 1

    def figures(self, folder: Path, recipe: SftRecipe) -> Mapping[str, str]:
        """None: the pass rate needs sandboxes, which `gagar eval` has."""
        return {}


def choose(traces: list[ExpertTrace], shares: Mapping[str, float], rng: random.Random) -> ExpertTrace:
    """A strategy by its share among those offered, then one of its traces."""
    offered = sorted({trace.strategy for trace in traces} & set(shares))
    if not offered:
        raise ConfigError(
            f"task {traces[0].task.task_id} offers none of the strategies {sorted(shares)}; "
            "add one that its experts always write"
        )
    strategy = rng.choices(offered, [shares[name] for name in offered])[0]
    return rng.choice([trace for trace in traces if trace.strategy == strategy])


def conversation_of(trace: ExpertTrace, *, observation_chars: int) -> Conversation:
    """Replay the trace and write down what the agent loop would have shown."""
    shown = [
        render_observation(output, exit_code=code, timed_out=False, max_chars=observation_chars)
        for output, code in replay(trace.task, trace.actions)
    ]
    shown += [""] * (len(trace.actions) - len(shown))
    return Conversation(statement=trace.task.statement, turns=tuple(zip(trace.actions, shown, strict=True)))


def render(chat: ChatFormat, system: str | None, conversation: Conversation) -> Example:
    """Tokens exactly as a rollout would have built them, message by message."""
    ids = chat.initial(system, conversation.statement)
    mask = [False] * len(ids)
    last = len(conversation.turns) - 1
    for number, (action, observation) in enumerate(conversation.turns):
        reply = chat.reply(action)
        ids += reply
        mask += [True] * len(reply)
        if number < last:
            shown = chat.extend(observation, ended=True)
            ids += shown
            mask += [False] * len(shown)
    return Example(token_ids=np.array(ids, dtype=np.int32), loss_mask=np.array(mask, dtype=np.bool_))


def _source(name: str, config: SftSource) -> ExpertSource:
    fields = {"type": config.type, "groups_per_step": 0, "seed": config.seed}
    adapter: TypeAdapter[SourceConfig] = TypeAdapter(SourceConfig)
    return make_source(name, adapter.validate_python(fields))


def _check_strategies(name: str, config: SftSource, source: ExpertSource) -> None:
    offered: set[str] = set()
    for index in range(KNOWN_AFTER):
        offered.update(trace.strategy for trace in source.experts(source.task(Split.TRAIN, index)))
        if offered >= set(config.strategies):
            return
    unknown = sorted(set(config.strategies) - offered)[0]
    raise ConfigError(
        f"data.sources.{name}.strategies: no expert of {config.type} has a strategy {unknown!r}; "
        f"choose from {', '.join(sorted(offered))}"
    )
