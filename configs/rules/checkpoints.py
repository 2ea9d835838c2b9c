"""Folders of models: complete, and fit for the engines that load them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from configs.models import ModelFacts, missing_files, read_facts
from configs.problems import Problem, show, value_at
from configs.rules.findings import engines_of, problem
from configs.schema import EngineConfig, RunConfig


def models(config: RunConfig) -> Iterator[Problem]:
    """Checkpoint folders must be complete before any actor starts, and the engines serve the policy that is trained."""
    engines = dict(engines_of(config))
    for key, engine in engines.items():
        yield from _folder(config, f"{key}.model", engine)
    if config.learner.model == config.engine.model:
        return
    yield from _folder(config, "learner.model", None)
    yield problem(
        config,
        "learner.model",
        f"differs from engine.model = {show(config.engine.model)}, but the engines sample from the policy that is "
        "trained; name the same folder",
    )


def _recipe_of(folder: Path) -> Path | None:
    """The recipe of a warm-up checkpoint, where one is shipped beside its place."""
    recipe = folder.parent.parent / "sft" / f"{folder.name}.yaml"
    return recipe if folder.parent.name == "checkpoints" and os.path.isfile(recipe) else None


def _folder(config: RunConfig, key: str, engine: EngineConfig | None) -> Iterator[Problem]:
    folder = Path(str(value_at(config, key)))
    if not os.path.isdir(folder):  # unlike Path.is_dir, false for a path that is too long
        made = f"; `gagar sft {recipe}` makes it" if (recipe := _recipe_of(folder)) is not None else ""
        wanted = "give a checkpoint in Hugging Face format (relative to the configuration file)"
        yield problem(config, key, f"no such folder{made or '; ' + wanted}")
        return
    if missing := missing_files(folder):
        yield problem(config, key, f"lacks {', '.join(missing)}; give a complete checkpoint folder")
        return
    try:
        facts = read_facts(folder)
    except (OSError, ValueError) as error:
        yield problem(config, key, f"cannot be read ({error}); give a complete checkpoint folder")
        return
    section = key.removesuffix(".model")
    if engine is not None and facts.max_positions is not None and engine.max_model_len > facts.max_positions:
        yield problem(
            config,
            f"{section}.max_model_len",
            f"is above the {facts.max_positions} positions of {folder.name} (max_position_embeddings); lower it",
        )
    yield from _kv_cache(config, section, engine, facts)
    if engine is not None and facts.attention_heads and facts.attention_heads % engine.tensor_parallel_size:
        yield problem(
            config,
            f"{section}.tensor_parallel_size",
            f"does not divide the {facts.attention_heads} attention heads of {folder.name}; change it",
        )


def _kv_cache(config: RunConfig, section: str, engine: EngineConfig | None, facts: ModelFacts) -> Iterator[Problem]:
    """vLLM starts only if one sequence of full length fits."""
    if engine is None or engine.device != "cpu" or facts.kv_values_per_token is None:
        return
    size = facts.kv_values_per_token * (4 if engine.dtype == "float32" else 2) * engine.max_model_len / 2**30
    if engine.kv_cache_gib < size:
        yield problem(
            config,
            f"{section}.kv_cache_gib",
            f"is less than the {size:.3g} GiB of one sequence of {section}.max_model_len = {engine.max_model_len}; "
            "raise it, or lower max_model_len",
        )
