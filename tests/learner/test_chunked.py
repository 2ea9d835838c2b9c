"""Log-probabilities chunk by chunk: the plain path's values and gradients, and no tensor as large as a row's logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CohereConfig, CohereForCausalLM, LlamaConfig, LlamaForCausalLM

from configs.schema import PpoClipLoss, RatioMaskLoss
from infra.errors import LearnerError
from learner.chunked import replace_head, target_logprobs
from learner.loss import nll, ppo_clip, ratio_mask

VOCAB = 61
TOKENS = 40
TEMPERATURE = 0.7
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ratio_mask": lambda logp, old, advantage: ratio_mask(logp, old, advantage, RatioMaskLoss()).loss,
    "ppo_clip": lambda logp, old, advantage: ppo_clip(logp, old, advantage, PpoClipLoss(name="ppo_clip")).loss,
    "nll": lambda logp, old, advantage: nll(logp).loss,
}


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def small_model(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def test_at_temperature_by_hand() -> None:
    hidden, weight = torch.eye(2), torch.tensor([[0.0, 1.0], [math.log(9.0), 1.0]])
    logp, entropy = target_logprobs(hidden, weight, None, torch.tensor([0, 1]), 2.0, 1)
    assert logp.exp().tolist() == pytest.approx([1 / 4, 1 / 2])  # sqrt: odds 1 to 3
    assert entropy.tolist() == pytest.approx([-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)])


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_the_plain_ones(chunk: int, biased: bool) -> None:
    torch.manual_seed(1)
    leaves = [torch.randn(TOKENS, 16), torch.randn(VOCAB, 16), *([torch.randn(VOCAB)] if biased else [])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    bias = leaves[2] if biased else None
    targets, upstream = torch.randint(0, VOCAB, (TOKENS,)), torch.randn(TOKENS)
    want, want_entropy = plain(torch.nn.functional.linear(leaves[0], leaves[1], bias), targets, TEMPERATURE)
    wanted = torch.autograd.grad((want * upstream).sum(), leaves)
    logp, entropy = target_logprobs(leaves[0], leaves[1], bias, targets, TEMPERATURE, chunk)
    assert relative(logp.detach(), want.detach()) < 1e-6
    assert relative(entropy, want_entropy.detach()) < 1e-6
    assert not entropy.requires_grad
    for got, expected in zip(torch.autograd.grad((logp * upstream).sum(), leaves), wanted, strict=True):
        assert relative(got, expected) < 1e-6


def test_bfloat16_sums_the_weights_gradient_in_fp32() -> None:
    """1,024 chunks of one token: added up in bfloat16, the sum stands still long before its end."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = target_logprobs(hidden, weight, None, torch.zeros(1024, dtype=torch.long), 1.0, 1)
    logp.sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [512.0, -512.0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_parameters_gradient_is_the_plain_paths(tied: bool, loss: str) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (1, TOKENS + 1), generator=generator)
    predictors, targets = torch.arange(0, TOKENS, 2), ids[0, 1::2]
    advantages = torch.randn(len(targets), generator=generator)

    model = small_model(tied=tied)
    want, want_entropy = plain(model(ids, logits_to_keep=predictors).logits[0], targets, TEMPERATURE)
    old = want.detach() + torch.randn(len(targets), generator=generator)  # some ratios outside every bound
    LOSSES[loss](want, old, advantages).sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}

    chunked = small_model(tied=tied)
    head = replace_head(chunked, TEMPERATURE, 6)
    head.targets = targets
    found = chunked(ids, logits_to_keep=predictors).logits[0]
    LOSSES[loss](found[:, 0], old, advantages).sum().backward()
    assert relative(found[:, 1].detach(), want_entropy.detach()) < 1e-6
    got = {name: parameter.grad for name, parameter in chunked.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        assert gradient is not None and wanted[name] is not None
        assert relative(gradient, wanted[name]) < 1e-6, name


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives back."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_no_tensor_is_larger_than_a_chunks_logits() -> None:
    tokens, vocab, width, chunk = 512, 300, 8, 32
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    with Largest() as largest:
        logp, _ = target_logprobs(hidden, weight, None, torch.zeros(tokens, dtype=torch.long), 1.0, chunk)
        logp.sum().backward()
    assert largest.elements == chunk * vocab
    with Largest() as largest:
        plain(hidden @ weight.T, torch.zeros(tokens, dtype=torch.long), 1.0)[0].sum().backward()
    assert largest.elements == tokens * vocab


def test_no_tokens_at_all() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.zeros(5, 4, requires_grad=True)
    logp, entropy = target_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.long), 1.0, 8)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert weight.grad.shape == (5, 4) and not weight.grad.any()


def test_a_probability_that_is_not_a_number_reaches_every_gradient() -> None:
    """The step is refused for it (test_group); it must not be lost on the way."""
    hidden, weight = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    logp, _ = target_logprobs(hidden, weight, None, torch.zeros(4, dtype=torch.long), 1.0, 2)
    (logp * torch.tensor([1.0, 1.0, math.nan, 1.0])).sum().backward()
    assert weight.grad is not None and weight.grad.isnan().all()


def test_a_model_that_changes_its_logits_is_refused() -> None:
    config = CohereConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    with pytest.raises(LearnerError, match=r"cohere model are not .* \{'logit_scale': 0\.0625\}"):
        replace_head(CohereForCausalLM(config), 1.0, 8)
