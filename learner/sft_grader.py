"""Supervised examples of the grader: groups of experts' solutions, and the verdict known by construction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import EngineConfig, GraderConfig, MinirepoSource, VllmGraderBackend
from configs.sft_schema import GraderData, SftRecipe
from envs.source import make_source
from envs.task import Split
from grader.examples import GraderExample, evaluate_grader, grader_example
from learner.sft_sampling import sample
from learner.sft_train import Example
from rollout.chat import ChatFormat

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_BATCH = 16


class GraderExamples:
    """Example i depends on the recipe and on i alone."""

    def __init__(self, data: GraderData) -> None:
        self._data = data
        self._source = make_source(data.source, MinirepoSource(type="minirepo", groups_per_step=0, seed=data.seed))
        # Only what shapes the prompt matters here: the backend is named, never started.
        backend = VllmGraderBackend(type="vllm", engine=EngineConfig(model="the checkpoint in training"))
        self._config = GraderConfig(backend=backend, style="compact", prompt_chars=data.prompt_chars)

    def group(self, index: int, split: Split = Split.TRAIN) -> GraderExample:
        """Example `index` >= 0."""
        return grader_example(
            self._source, split, index, self._data.seed, self._config, group_size=self._data.group_sizes
        )

    def texts(self, index: int) -> Iterator[str]:
        """Question and answer of example `index`."""
        example = self.group(index)
        yield example.prompt.user
        yield example.target

    def examples(self, chat: ChatFormat, *, max_tokens: int, split: Split = Split.TRAIN) -> Iterator[Example]:
        """Endless examples; those above `max_tokens` are passed over."""
        index = 0
        while True:
            example = render(chat, self.group(index, split))
            if len(example.token_ids) <= max_tokens:
                yield example
            index += 1

    def figures(self, model: LlamaForCausalLM, chat: ChatFormat, recipe: SftRecipe, pad_id: int) -> Mapping[str, str]:
        """Validity, tier and rank agreement of greedy verdicts without any grammar, on the held-out split."""
        groups = [self.group(index, Split.HELDOUT) for index in range(recipe.eval.examples)]
        answers: list[tuple[GraderExample, str]] = []
        for start in range(0, len(groups), _BATCH):
            part = groups[start : start + _BATCH]
            prompts = [chat.initial(group.prompt.system, group.prompt.user) for group in part]
            written = sample(
                model,
                prompts,
                max_new_tokens=recipe.eval.max_new_tokens,
                temperature=0.0,
                stop_id=chat.end_id,
                pad_id=pad_id,
                seed=0,
            )
            answers += [(group, chat.decode(ids)) for group, ids in zip(part, written, strict=True)]
        metrics = evaluate_grader(answers)
        shown = {
            "valid verdicts (greedy, no grammar)": metrics.validity_rate,
            "tier agreement": metrics.tier_agreement,
            "score agreement": metrics.score_agreement,
            "Kendall tau-b": metrics.kendall_tau_b,
        }
        return {
            name: "none" if value is None else f"{value:.3f} over {metrics.groups} held-out groups"
            for name, value in shown.items()
        }


def render(chat: ChatFormat, group: GraderExample) -> Example:
    """Question, then the verdict with loss on it."""
    prompt = chat.initial(group.prompt.system, group.prompt.user)
    reply = chat.reply(group.target)
    return Example(
        token_ids=np.array([*prompt, *reply], dtype=np.int32),
        loss_mask=np.array([False] * len(prompt) + [True] * len(reply), dtype=np.bool_),
    )
