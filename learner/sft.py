"""`gagar sft RECIPE`: train a warm-up checkpoint from scripted experts and write it with its model card.

The result depends on the recipe alone (to the rounding of the machine's arithmetic): data, weights and order come from
its seeds. Nothing of the held-out split is read before the closing figures.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import yaml

from configs.load import load
from configs.sft_schema import GraderData, SftRecipe
from envs.task import Split
from infra.errors import StorageError
from learner.sft_data import PolicyExamples
from learner.sft_grader import GraderExamples
from learner.sft_train import Example, TrainFigures, mean_nll, new_model, train
from learner.tokenizer_training import save_tokenizer, train_tokenizer
from rollout.chat import ChatFormat

Figures = Mapping[str, str]
"""Name -> value with its unit, as printed and as written into the model card."""


class Examples(Protocol):
    """Supervised data of one kind."""

    def texts(self, index: int) -> Iterator[str]:
        """Every message of example `index` of the train split, without markup."""
        ...

    def examples(self, chat: ChatFormat, *, max_tokens: int, split: Split = Split.TRAIN) -> Iterator[Example]:
        """Endless examples of at most `max_tokens` tokens."""
        ...

    def figures(self, folder: Path, recipe: SftRecipe) -> Figures:
        """What only this kind of data can measure with the checkpoint in `folder`, on the held-out split."""
        ...


def run_sft(recipe_path: Path, overrides: Sequence[str]) -> int:
    """Train what the recipe says, print progress to stderr, write the checkpoint folder, and return 0.

    Raises:
        ConfigError: the recipe cannot be used.
        StorageError: the output folder cannot be written.
    """
    recipe = load(SftRecipe, recipe_path, overrides).config
    output = (recipe_path.absolute().parent / recipe.output).resolve()
    data = make_examples(recipe)
    staging = output.with_name(f".{output.name}.new")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"{staging} cannot be written ({error}); choose another `output`") from error
    try:
        _build(recipe, data, staging, card_name=recipe_path.name, overrides=overrides)
        shutil.rmtree(output, ignore_errors=True)
        staging.rename(output)
    except OSError as error:
        raise StorageError(f"{output} cannot be written ({error}); choose another `output`") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _say(f"wrote {output}")
    return 0


def make_examples(recipe: SftRecipe) -> Examples:
    """The data of a recipe. Raises ConfigError for a strategy that no expert offers."""
    if isinstance(recipe.data, GraderData):
        return GraderExamples(recipe.data)
    return PolicyExamples(recipe.data)


def _build(recipe: SftRecipe, data: Examples, folder: Path, *, card_name: str, overrides: Sequence[str]) -> None:
    """Tokenizer, model, training and figures, all written into `folder`."""
    started = time.monotonic()
    shape, training = recipe.model, recipe.training
    tokenizer = train_tokenizer(
        (text for index in range(recipe.tokenizer.examples) for text in data.texts(index)),
        vocab_size=recipe.tokenizer.vocab_size,
        max_piece_chars=recipe.tokenizer.max_piece_chars,
        model_max_length=shape.max_positions,
        merge_punctuation=recipe.tokenizer.merge_punctuation,
    )
    save_tokenizer(tokenizer, folder)
    chat, pad_id = ChatFormat.load(str(folder)), tokenizer.pad_token_id
    model = new_model(shape, vocab_size=len(tokenizer), pad_id=pad_id, end_id=chat.end_id, seed=training.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _say(f"{len(tokenizer)} tokens, {parameters:,} parameters, {training.tokens:,} tokens to read")
    figures = train(
        model,
        data.examples(chat, max_tokens=shape.max_positions),
        training,
        pad_id=pad_id,
        log_every_s=recipe.log_every_s,
        log=_say,
    )
    model.save_pretrained(str(folder))
    measured: dict[str, str] = {
        "parameters": f"{parameters:,}",
        **_training_figures(figures, time.monotonic() - started),
    }
    if recipe.eval.examples:
        held = data.examples(chat, max_tokens=shape.max_positions, split=Split.HELDOUT)
        few = [next(held) for _ in range(recipe.eval.examples)]
        measured["held-out loss"] = f"{mean_nll(model, few, pad_id):.4f} nats a token, {len(few)} examples"
        measured |= data.figures(folder, recipe)
    for name, value in measured.items():
        _say(f"{name}: {value}")
    (folder / "README.md").write_text(model_card(recipe, measured, card_name, overrides), encoding="utf-8")


def _training_figures(figures: TrainFigures, wall_s: float) -> Figures:
    return {
        "optimiser steps": f"{figures.steps:,}",
        "tokens read": f"{figures.tokens:,}, of which {figures.response_tokens:,} to be written by the model",
        "final training loss": f"{figures.loss:.4f} nats a token (the last tenth of the steps)",
        "wall time": f"{wall_s:.0f} s with {figures.threads} torch thread(s)",
    }


def model_card(recipe: SftRecipe, figures: Figures, card_name: str, overrides: Sequence[str]) -> str:
    """README.md of a checkpoint: what it is, how it was made, what was measured when it was made."""
    kind = recipe.data.type
    changed = [f"'{override}'" for override in overrides if not override.startswith("output=")]  # where, not what
    command = " ".join(["gagar sft", f"configs/sft/{card_name}", *changed])
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    resolved = yaml.safe_dump(recipe.model_dump(mode="json", exclude={"output"}), sort_keys=False, allow_unicode=True)
    return f"""---
library_name: transformers
license: apache-2.0
---
# Warm-up checkpoint: {kind}

A small Llama with a byte-level BPE tokenizer, trained from random weights on the scripted experts of the built-in task
families (train split only). It is where training starts, not a model for anything else.

Made by `{command}`; the same command makes it again. Data seeds are in the recipe below.

| figure | value |
| --- | --- |
{rows}

## Recipe

```yaml
{resolved}```
"""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
