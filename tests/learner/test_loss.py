"""M5.1 and M5.2: token losses by hand, and aggregations against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Aggregation, PpoClipLoss, RatioMaskLoss
from learner.loss import nll, ppo_clip, ratio_mask, token_weights


def log(values: list[float]) -> torch.Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def test_weights_by_hand() -> None:
    tokens, groups = [2, 6, 4], ["a", "a", "b"]
    assert token_weights(Aggregation.TOKEN_MEAN, tokens, groups) == pytest.approx([1 / 12] * 3)
    assert token_weights(Aggregation.SEQUENCE_MEAN, tokens, groups) == pytest.approx([1 / 6, 1 / 18, 1 / 12])
    assert token_weights(Aggregation.PROMPT_MEAN, tokens, groups) == pytest.approx([1 / 16, 1 / 16, 1 / 8])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[str]]:
    losses = draw(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=8))
    groups = draw(st.lists(st.sampled_from("abc"), min_size=len(losses), max_size=len(losses)))
    return losses, groups


def by_definition(aggregation: Aggregation, losses: list[list[float]], groups: list[str]) -> float:
    if aggregation is Aggregation.TOKEN_MEAN:
        flat = [x for sequence in losses for x in sequence]
        return math.fsum(flat) / len(flat)
    if aggregation is Aggregation.SEQUENCE_MEAN:
        return math.fsum(math.fsum(sequence) / len(sequence) for sequence in losses) / len(losses)
    prompts = []
    for name in sorted(set(groups)):
        flat = [x for sequence, group in zip(losses, groups, strict=True) if group == name for x in sequence]
        prompts.append(math.fsum(flat) / len(flat))
    return math.fsum(prompts) / len(prompts)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@given(batch=batches())
def test_weighted_sum_is_the_mean_by_definition(
    aggregation: Aggregation, batch: tuple[list[list[float]], list[str]]
) -> None:
    losses, groups = batch
    weights = token_weights(aggregation, [len(sequence) for sequence in losses], groups)
    total = math.fsum(w * math.fsum(sequence) for w, sequence in zip(weights, losses, strict=True))
    assert total == pytest.approx(by_definition(aggregation, losses, groups), abs=1e-9)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_sequence_without_tokens_weighs_nothing(aggregation: Aggregation) -> None:
    weights = token_weights(aggregation, [0, 3], ["a", "a"])
    assert weights[0] == 0.0
    assert weights[1] > 0.0
    assert token_weights(aggregation, [0], ["a"]) == (0.0,)


def test_weights_refuse_lengths_that_differ() -> None:
    with pytest.raises(ValueError, match="per sequence"):
        token_weights(Aggregation.TOKEN_MEAN, [1, 2], ["a"])


def test_ratio_mask_uses_the_bounds_of_the_advantages_sign() -> None:
    config = RatioMaskLoss(bounds_positive=(0.5, 2.0), bounds_negative=(0.8, 4.0))
    logp = log([0.3, 0.12, 0.3, 0.12, 0.5]).requires_grad_()
    old = log([0.1, 0.2, 0.1, 0.2, 0.1])
    advantage = torch.tensor([2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    got = ratio_mask(logp, old, advantage, config)
    # r = 3, .6, 3, .6, 5. Positive: 3 is above 2, .6 inside. Negative: 3 inside, .6 below .8, 5 above 4.
    assert got.masked.tolist() == [True, False, False, True, True]
    assert got.ratio.tolist() == pytest.approx([3.0, 0.6, 3.0, 0.6, 5.0])
    assert got.loss.tolist() == pytest.approx([0.0, -1.2, 6.0, 0.0, 0.0])
    got.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, -1.2, 6.0, 0.0, 0.0])  # d(-A r)/d logp = -A r


def test_ratio_mask_keeps_the_bounds_themselves_and_an_infinite_ratio_without_nan() -> None:
    config = RatioMaskLoss(bounds_positive=(0.5, 2.0))
    logp = torch.tensor([math.log(2.0), math.log(0.5), -0.1], requires_grad=True)
    old = torch.tensor([0.0, 0.0, -math.inf])
    got = ratio_mask(logp, old, torch.ones(3), config)
    assert got.masked.tolist() == [False, False, True]
    got.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-2.0, -0.5, 0.0])


def test_a_probability_that_is_not_a_number_is_not_masked_away() -> None:
    """It must reach the gradient, where the step is refused, rather than vanish in a mask."""
    logp = torch.tensor([-0.1], requires_grad=True)
    ratio_mask(logp, torch.tensor([math.nan]), torch.ones(1), RatioMaskLoss()).loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.isnan().all()


def test_ppo_clip_by_hand() -> None:
    config = PpoClipLoss(name="ppo_clip", clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    ratios = [1.1, 1.5, 0.5, 0.5, 1.5, 4.0]
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    logp = log(ratios).requires_grad_()
    got = ppo_clip(logp, torch.zeros(6, dtype=torch.float64), advantage, config)
    # A > 0: min(r, clip r) = 1.1, 1.3 (clipped), .5.
    # A < 0: min(-.5, -.8) = -.8 (clipped), -1.5, max(-4, -3) = -3 (dual).
    assert got.loss.tolist() == pytest.approx([-1.1, -1.3, -0.5, 0.8, 1.5, 3.0])
    assert got.masked.tolist() == [False, True, False, True, False, True]
    got.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-1.1, 0.0, -0.5, 0.0, 1.5, 0.0])


def test_nll() -> None:
    logp = log([0.5, 0.25]).requires_grad_()
    got = nll(logp)
    assert got.loss.tolist() == pytest.approx([math.log(2), math.log(4)])
    assert not got.masked.any()
