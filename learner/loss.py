"""Token losses, their aggregation, and what is counted beside them (M5). Pure; K is the number of loss-bearing tokens.

A loss function gives one *unweighted* loss per token. `token_weights` gives one weight per sequence such that

    loss = sum_i w_i * sum_t loss_it

is the chosen mean whatever the order, the packing, the micro-batches or the ranks: every denominator is global and is
in the weights already. Nothing here imports torch until it gets tensors: the driver asks for weights only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.schema import Aggregation, PpoClipLoss, RatioMaskLoss

if TYPE_CHECKING:
    import torch

_MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before exp, far outside any bounds: a masked token's infinite ratio would otherwise turn
its zero gradient into NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Losses of K tokens and what the objective did to them."""

    loss: torch.Tensor
    """[K] with gradient; 0 where masked."""
    ratio: torch.Tensor
    """[K] r_t = pi_theta / mu, without gradient."""
    masked: torch.Tensor
    """[K] bool: tokens without gradient (outside the bounds, or clipped); they stay in the denominators."""


def token_weights(
    aggregation: Aggregation, response_tokens: Sequence[int], group_ids: Sequence[str]
) -> tuple[float, ...]:
    """One weight per sequence of the whole batch, all ranks and micro-batches together (M5.2).

    `response_tokens` counts each sequence's loss-bearing tokens, masked by ratio or not; trajectories masked for
    infrastructure are not in the batch at all (M1.3). A sequence without tokens gets weight 0 but is still a sequence
    (and a prompt) of the mean. Raises ValueError if the lengths differ or a count is negative.
    """
    if len(response_tokens) != len(group_ids) or any(n < 0 for n in response_tokens):
        raise ValueError("token_weights needs one non-negative token count and one group id per sequence")
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            total = sum(response_tokens)
            return tuple(1.0 / total if n else 0.0 for n in response_tokens)
        case Aggregation.SEQUENCE_MEAN:
            return tuple(1.0 / (len(response_tokens) * n) if n else 0.0 for n in response_tokens)
        case Aggregation.PROMPT_MEAN:
            in_group: Counter[str] = Counter()
            for n, group in zip(response_tokens, group_ids, strict=True):
                in_group[group] += n
            return tuple(
                1.0 / (len(in_group) * in_group[group]) if n else 0.0
                for n, group in zip(response_tokens, group_ids, strict=True)
            )


def ratio_mask(logp: torch.Tensor, old_logp: torch.Tensor, advantage: torch.Tensor, config: RatioMaskLoss) -> TokenLoss:
    """Token policy gradient, -A r_t, inside sign-specific bounds of r_t; outside them 0 (M5.1).

    All tensors are [K]: log pi_theta (with gradient), log mu as recorded at sampling time, and the advantage.
    """
    ratio = _ratio(logp, old_logp)
    low, high = config.bounds_positive
    outside = (ratio < low) | (ratio > high)  # false for NaN: that must reach the gradient, where the step is refused
    low, high = config.bounds_negative
    masked = outside.where(advantage >= 0, (ratio < low) | (ratio > high))
    return TokenLoss(loss=(-advantage * ratio).masked_fill(masked, 0.0), ratio=ratio.detach(), masked=masked)


def ppo_clip(logp: torch.Tensor, old_logp: torch.Tensor, advantage: torch.Tensor, config: PpoClipLoss) -> TokenLoss:
    """PPO-clip with dual clip: -min(r A, clip(r) A), bounded by -c A where A < 0 (M5.1). Tensors as in `ratio_mask`."""
    ratio = _ratio(logp, old_logp)
    plain = ratio * advantage
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantage
    objective = plain.minimum(clipped)
    dual = objective.maximum(config.dual_clip * advantage)
    objective = dual.where(advantage < 0, objective)
    return TokenLoss(loss=-objective, ratio=ratio.detach(), masked=(objective != plain).detach())


def nll(logp: torch.Tensor) -> TokenLoss:
    """Negative log-likelihood, for supervised training: no recorded probabilities, no advantages, nothing masked."""
    constant = logp.detach()
    return TokenLoss(
        loss=-logp, ratio=constant.new_ones(constant.shape), masked=constant.new_zeros(constant.shape).bool()
    )


def _ratio(logp: torch.Tensor, old_logp: torch.Tensor) -> torch.Tensor:
    log_ratio = logp - old_logp
    bounded = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_ratio.where(log_ratio.isnan(), bounded).exp()  # clamp would drop the gradient of a NaN
