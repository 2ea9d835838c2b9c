"""`gagar sft` from recipe to checkpoint, small; and the parts of its training loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import configs
from configs.load import load
from configs.sft_schema import SftModel, SftRecipe, SftTraining
from infra.errors import ConfigError, StorageError
from learner.sft import make_examples, run_sft
from learner.sft_train import Example, batches, collate, learning_rate, mean_nll, new_model, token_losses
from rollout.chat import ChatFormat

SHIPPED = sorted((Path(configs.__file__).parent / "sft").glob("*.yaml"))
SMALL = SftModel(layers=2, hidden=64, heads=2, ffn=96, max_positions=512, copying_heads=1)

RECIPE = """
output: made
data:
  type: policy
  sources:
    arith: {type: arith, share: 1, seed: 5, strategies: {answer: 1}}
tokenizer: {vocab_size: 320, examples: 40}
model: {layers: 2, hidden: 64, heads: 2, ffn: 96, max_positions: 512, copying_heads: 1}
training: {tokens: 40000, batch_tokens: 1024, threads: 1}
eval: {examples: 16}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def _example(length: int, written: int, seed: int = 0) -> Example:
    rng = np.random.default_rng(seed)
    mask = np.zeros(length, dtype=np.bool_)
    mask[length - written :] = True
    return Example(token_ids=rng.integers(5, 300, length).astype(np.int32), loss_mask=mask)


def _small_model(seed: int = 0) -> LlamaForCausalLM:
    return new_model(SMALL, vocab_size=300, pad_id=0, end_id=4, seed=seed).eval()


def test_a_recipe_becomes_a_checkpoint_that_learned_something(recipe: Path) -> None:
    assert run_sft(recipe, ["output=elsewhere", "eval.examples=8"]) == 0
    folder = recipe.parent / "elsewhere"
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    assert isinstance(model, LlamaForCausalLM)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    chat = ChatFormat.load(str(folder))
    assert model.config.eos_token_id == chat.end_id
    parsed = load(SftRecipe, recipe).config
    stream = make_examples(parsed).examples(chat, max_tokens=512)
    few = list(itertools.islice(stream, 1000, 1030))
    fresh = new_model(parsed.model, vocab_size=model.config.vocab_size, pad_id=0, end_id=chat.end_id, seed=0)
    assert mean_nll(model, few, 0) < 0.5 * mean_nll(fresh.eval(), few, 0)
    card = (folder / "README.md").read_text()
    assert "gagar sft configs/sft/tiny.yaml 'eval.examples=8'" in card
    assert "seed: 5" in card
    assert "elsewhere" not in card
    assert "held-out loss" in card


def test_the_same_recipe_gives_the_same_weights(recipe: Path) -> None:
    for output in ("a", "b"):
        run_sft(recipe, [f"output={output}", "training.tokens=6000", "eval.examples=0"])
    a, b = ((recipe.parent / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b


def test_a_failed_recipe_leaves_the_old_checkpoint(recipe: Path) -> None:
    kept = recipe.parent / "made" / "README.md"
    kept.parent.mkdir()
    kept.write_text("old")
    with pytest.raises(ConfigError, match="no expert of arith"):
        run_sft(recipe, ["data.sources.arith.strategies={answr: 1}"])
    assert kept.read_text() == "old"


def test_an_output_that_cannot_be_written_is_named(recipe: Path) -> None:
    (recipe.parent / "file").write_text("")
    with pytest.raises(StorageError, match="choose another `output`"):
        run_sft(recipe, ["output=file/inside"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.tokenz=5", r"training\.tokenz.*unknown key.*did you mean training\.tokens\?"),
        ("training.warmup_share=0.9", r"training.*exceed 1 together; lower one"),
        ("training.tokens=100", r"tokens=100 is below batch_tokens=1024; raise tokens"),
        ("model.heads=3", r"hidden=64 must be a multiple of 2 x heads=3"),
        ("model.copying_heads=2", r"copying_heads=2 leaves no head free"),
        ("model.layers=1", r"copying_heads=1 needs .* two layers"),
        ("data.sources.arith.strategies={}", r"data\.sources\.arith.*strategies is empty"),
        ("data.type=polcy", r"did you mean policy\?"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_with_a_remedy(recipe: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_sft(recipe, [override])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_write_where_the_runs_look(path: Path) -> None:
    recipe = load(SftRecipe, path).config
    make_examples(recipe)
    checkpoints = Path(configs.__file__).parent / "checkpoints"
    assert (path.parent / recipe.output).resolve() == (checkpoints / path.stem).resolve()


@pytest.mark.parametrize("folder", ["policy", "grader"])
def test_shipped_checkpoints_carry_the_recipe_that_made_them(folder: str) -> None:
    """The card's recipe is the file's, up to keys that do not change the weights."""
    root = Path(configs.__file__).parent
    card = (root / "checkpoints" / folder / "README.md").read_text()
    made = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    now = load(SftRecipe, root / "sft" / f"{folder}.yaml").config.model_dump(mode="json")
    for recipe in (made, now):
        recipe["training"].pop("worker", None)  # who writes the examples does not change them
    for section in ("data", "tokenizer", "model", "training"):
        assert made[section] == now[section]


def test_the_schedule_rises_stays_and_falls_to_zero() -> None:
    training = SftTraining(tokens=10_000, batch_tokens=1000, lr=0.1, warmup_share=0.2, decay_share=0.4)
    rates = [learning_rate(done, training) for done in (0.0, 0.1, 0.2, 0.6, 0.8, 1.0)]
    assert rates == pytest.approx([0.001, 0.05, 0.1, 0.1, 0.05, 0.0])


def test_batches_hold_every_example_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(10, 200, 400)
    given = [_example(int(length), 3, seed) for seed, length in enumerate(lengths)]
    seen: list[Example] = []
    try:
        for batch in batches(iter(given), batch_tokens=600, seed=1):
            assert max(len(e.token_ids) for e in batch) * len(batch) <= 600
            seen += batch
    except RuntimeError:  # the finite stream ended
        pass
    numbers = [id(example) for example in seen]
    assert len(numbers) == len(set(numbers)) > 100


def test_padding_changes_no_loss() -> None:
    model, short, long = _small_model(), _example(20, 6), _example(50, 9, seed=1)
    ids, written, read = collate([short, long], pad_id=0)
    assert written.sum(1).tolist() == [6, 9]
    assert read.sum(1).tolist() == [20 - 6 - 1, 50 - 9 - 1]
    with torch.inference_mode():
        together = token_losses(model, ids)[0, :19]
        alone = token_losses(model, torch.from_numpy(short.token_ids.astype(np.int64))[None])[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_copying_start_copies_before_any_training() -> None:
    """Second half repeats the first: the start must predict it far better than chance, and a plain start must not."""
    rng = np.random.default_rng(3)
    half = rng.integers(5, 300, (8, 24))
    ids = torch.from_numpy(np.concatenate([half, half], axis=1))
    losses = {}
    for heads in (0, 3):
        shape = SftModel(layers=2, hidden=128, heads=4, ffn=96, copying_heads=heads)
        with torch.inference_mode():
            model = new_model(shape, vocab_size=300, pad_id=0, end_id=4, seed=0).eval()
            losses[heads] = float(token_losses(model, ids)[:, 24:].mean())
    chance = float(np.log(300))
    assert losses[0] > chance - 0.3
    assert losses[3] < chance - 1.0
