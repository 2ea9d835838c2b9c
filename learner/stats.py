"""What one optimiser step did, from what its ranks return. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.phases import BACKWARD, FORWARD, OPTIMIZER, PACK
from learner.rank import Applied, TokenSums

Result = tuple[TokenSums, Applied, dict[str, float]]
"""What a rank returns of a step: sums, what the optimiser did, seconds by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One optimiser step. Means and shares are over the batch's response tokens."""

    loss: float
    grad_norm: float
    """Global norm before clipping; inf or nan where the step was skipped."""
    lr: float
    skipped: bool
    """The gradient was not finite: weights, optimiser and warm-up are as they were before."""
    entropy: float
    """Mean entropy where a token was sampled, in nats, at the sampling temperature."""
    ratio_mean: float
    ratio_masked_share: float
    """Share of tokens without gradient: outside the bounds, or clipped (M5.1)."""
    logprob_gap_mean: float | None
    """Mean |log pi_theta - log mu| over tokens that the weights trained here sampled themselves, where the two should
    be equal; None if the batch has none."""
    logprob_gap_max: float | None
    tokens: int
    """All tokens that were run, prompts and observations included."""
    response_tokens: int
    sequences: int
    microbatches: int
    """Rows of one rank."""
    row_fill: float
    """Tokens in the rows / room in them."""
    rank_balance: float
    """Mean tokens of a rank / tokens of the fullest one; 1 is even."""
    padded_factor: float
    """Tokens that padding every sequence to the longest would have run / tokens that packing ran."""
    step_s: float
    pack_s: float | None = None
    """This and the following: parts of the step, summed over micro-batches, of the slowest rank (learner/phases.py)."""
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None


def step_stats(
    results: Sequence[Result],
    layout: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    max_tokens: int,
    step_s: float,
) -> StepStats:
    """`results` by rank; `layout` is the plan of learner/packing.py over sequences of these lengths."""
    sums = [result[0] for result in results]
    applied = results[0][1]
    counted = max(1, sum(part.tokens for part in sums))
    fresh = sum(part.fresh for part in sums)
    tokens = sum(lengths)
    loads = [sum(lengths[index] for row in rows for index in row) for rows in layout]
    used = sum(1 for rows in layout for row in rows if row)
    slowest = {part: max(r[2].get(part, 0.0) for r in results) for part in (PACK, FORWARD, BACKWARD, OPTIMIZER)}
    return StepStats(
        loss=sum(part.loss for part in sums),
        grad_norm=applied.grad_norm,
        lr=applied.lr,
        skipped=applied.skipped,
        entropy=sum(part.entropy for part in sums) / counted,
        ratio_mean=sum(part.ratio for part in sums) / counted,
        ratio_masked_share=sum(part.masked for part in sums) / counted,
        logprob_gap_mean=sum(part.gap for part in sums) / fresh if fresh else None,
        logprob_gap_max=max(part.gap_max for part in sums) if fresh else None,
        tokens=tokens,
        response_tokens=sum(part.tokens for part in sums),
        sequences=len(lengths),
        microbatches=len(layout[0]),
        row_fill=tokens / (used * max_tokens),
        rank_balance=tokens / (len(loads) * max(loads)),
        padded_factor=len(lengths) * max(lengths) / tokens,
        step_s=step_s,
        pack_s=slowest[PACK],
        forward_s=slowest[FORWARD],
        backward_s=slowest[BACKWARD],
        optimizer_s=slowest[OPTIMIZER],
    )
