"""Supervised examples of the grader: conversations about groups of experts' solutions, known by construction."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs.schema import EngineConfig, GraderConfig, MinirepoSource, RubricConfig, VllmGraderBackend
from configs.sft_schema import GraderData, SftRecipe
from envs.source import make_source
from envs.task import Split
from grader.agreement import Agreement, agreement, mean_tau_b
from grader.demonstration import Message, Way, demonstrate
from grader.examples import GraderExample, grader_example, varied_example
from grader.exchange import GradeRequest, base_state_of
from grader.worker import GraderWorker
from learner.sft_train import Example
from rollout.chat import ChatFormat
from rollout.trajectory import Transcript

_MAX_TOKENS = 400
"""Of one answer, as the default of a run."""


class GraderExamples:
    """Example i depends on the recipe and on i alone."""

    def __init__(self, data: GraderData) -> None:
        self._data = data
        self._source = make_source(data.source, MinirepoSource(type="minirepo", groups_per_step=0, seed=data.seed))
        self._rubric = RubricConfig()
        self._ways: dict[Way, float] = {
            "agent": data.shares.agent,
            "candidate": data.shares.candidate,
            "single": data.shares.single,
        }
        self._config = self._config_of("the checkpoint in training", max_model_len=1)  # named, never started

    def _config_of(self, model: str, *, max_model_len: int) -> GraderConfig:
        engine = EngineConfig(model=model, max_model_len=max_model_len)
        return GraderConfig(
            backend=VllmGraderBackend(type="vllm", engine=engine),
            prompt_chars=self._data.prompt_chars,
            tool_output_chars=self._data.tool_output_chars,
            max_tokens=_MAX_TOKENS,
            timeout_s=3600.0,
            groups_per_worker=16,
        )

    def group(self, index: int, split: Split = Split.TRAIN) -> GraderExample:
        """The group of example `index` >= 0."""
        return grader_example(
            self._source, split, index, self._data.seed, self._rubric, group_size=self._data.group_sizes
        )

    def conversation(self, index: int, split: Split = Split.TRAIN) -> list[Message]:
        """Example `index` >= 0."""
        ways = list(self._ways)
        way = random.Random(f"way/{split.value}/{index}").choices(ways, list(self._ways.values()))[0]
        return demonstrate(self.group(index, split), way, self._config, self._rubric)

    def texts(self, index: int) -> Iterator[str]:
        """Every message of example `index`, without markup."""
        yield from (text for _, text in self.conversation(index))

    def examples(self, chat: ChatFormat, *, max_tokens: int, split: Split = Split.TRAIN) -> Iterator[Example]:
        """Endless examples; those above `max_tokens` are passed over."""
        index = 0
        while True:
            example = render(chat, self.conversation(index, split))
            if len(example.token_ids) <= max_tokens:
                yield example
            index += 1

    def figures(self, folder: Path, recipe: SftRecipe) -> Mapping[str, str]:
        """Validity, tier and rank agreement of the checkpoint in `folder`, as a run would grade held-out groups."""
        groups = [
            varied_example(self._source, index, self._data.seed, self._rubric) for index in range(recipe.eval.examples)
        ]
        config = self._config_of(str(folder), max_model_len=recipe.model.max_positions)
        outcome = asyncio.run(_grade_all(groups, config, self._rubric))
        return outcome.shown()


@dataclass(slots=True)
class _Outcome:
    """What became of the groups."""

    groups: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    found: list[Agreement] = field(default_factory=list)

    def shown(self) -> Mapping[str, str]:
        over = f"over {self.groups} held-out groups"
        shown = {"valid verdicts": f"{len(self.found) / self.groups:.1%} {over}"}
        if self.invalid:
            shown["fallbacks"] = ", ".join(f"{reason} {count}" for reason, count in self.invalid.most_common())
        if self.found:
            tiers = sum(one.tiers_right for one in self.found) / sum(one.tiers for one in self.found)
            scores = sum(one.scores_right for one in self.found) / sum(one.scores for one in self.found)
            tau_b = mean_tau_b(self.found)
            shown["tier agreement"] = f"{tiers:.1%} of candidates, {over}"
            shown["score agreement"] = f"{scores:.1%} of scores, {over}"
            shown["Kendall tau-b"] = "none" if tau_b is None else f"{tau_b:.3f}, mean {over}"
        return shown


async def _grade_all(groups: list[GraderExample], config: GraderConfig, rubric: RubricConfig) -> _Outcome:
    """Through an engine in this process and the worker of a run."""
    from rollout.engine_actor import environment
    from rollout.vllm_engine import VllmEngine

    assert isinstance(config.backend, VllmGraderBackend)
    os.environ.update(environment(config.backend.engine))  # vLLM reads it when it is imported, which is now
    engine = VllmEngine(config.backend.engine)
    outcome = _Outcome(groups=len(groups))
    try:
        await engine.ready()
        worker = GraderWorker(config, rubric, engine=engine)
        replies = await asyncio.gather(*(worker.grade(_request(g), *_transcripts(g)) for g in groups))
    finally:
        engine.shutdown()
    for example, reply in zip(groups, replies, strict=True):
        if reply.grade is None:
            outcome.invalid[str(reply.fallback_reason)] += 1
            continue
        ids = {c.label: c.trajectory.trajectory_id for c in example.group.passing}
        known = {ids[name]: (label.scores, label.flags) for name, label in example.labels.items()}
        outcome.found.append(agreement(reply.grade, known, rubric))
    return outcome


def _request(example: GraderExample) -> GradeRequest:
    group = example.group
    return GradeRequest(
        group_id=group.group_id,
        task=group.task,
        base_state=base_state_of(group.task),
        trajectories=tuple(c.trajectory for c in group.candidates),
        order_seed=example.order_seed,
    )


def _transcripts(example: GraderExample) -> list[Transcript]:
    return [c.transcript for c in example.group.candidates]


def render(chat: ChatFormat, conversation: list[Message]) -> Example:
    """Tokens exactly as a grading would have built them, message by message, with loss on the model's own."""
    ids: list[int] = []
    mask: list[bool] = []
    for role, text in conversation:
        if role == "assistant":
            part = chat.reply(text)
        else:
            part = chat.extend(text, ended=True) if ids else chat.initial(None, text)
        ids += part
        mask += [role == "assistant"] * len(part)
    return Example(token_ids=np.array(ids, dtype=np.int32), loss_mask=np.array(mask, dtype=np.bool_))
