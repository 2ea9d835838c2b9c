"""Estimates with bootstrap intervals, over tasks and, where there are several, over seeds. Pure.

A quantity is a ratio of sums over a grid [S, T] of seeds and tasks: passes over trajectories, tier-1 passes over
passes, turns over trajectories. Every draw takes S seeds and T tasks with replacement, the same tasks for every seed.
So an interval says how much another choice of tasks and of seeds would have moved the figure; with one seed (S = 1),
tasks alone. Where a figure rests on one task or two, or in several seeds on one of them, draws say nothing of another
choice: it has no interval, rather than one of no width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRAWS = 4000
LEVEL = 0.95
MIN_TASKS = 3
"""That a figure rests on, for an interval."""
_SEED = 20261130
"""Of the draws: the same numbers give the same interval."""

Grid = npt.NDArray[np.float64]
"""[S, T] seeds x tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and the interval that holds 95 % of its bootstrap draws; the ends are None where fewer than MIN_TASKS
    have anything that the figure is of, or more than 5 % of the draws took nothing of it: one seed of two has it alone.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def clear_of_zero(self) -> bool:
        """Whether the interval is known and lies on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)


def ratio(parts: Grid, wholes: Grid) -> Estimate | None:
    """sum(parts) / sum(wholes); None of nothing. Both [S, T]."""
    if not (total := float(wholes.sum())):
        return None
    draws = _ratios(parts, wholes, *_weights(parts.shape))
    return _estimate(float(parts.sum()) / total, draws, tasks=_tasks(wholes))


def difference(parts: Grid, wholes: Grid, other_parts: Grid, other_wholes: Grid) -> Estimate | None:
    """The first ratio minus the other one, paired: seed by seed and task by task. All [S, T]; None where either is of
    nothing."""
    if not (wholes.sum() and other_wholes.sum()):
        return None
    weights = _weights(parts.shape)
    draws = _ratios(parts, wholes, *weights) - _ratios(other_parts, other_wholes, *weights)
    value = float(parts.sum()) / float(wholes.sum()) - float(other_parts.sum()) / float(other_wholes.sum())
    return _estimate(value, draws, tasks=min(_tasks(wholes), _tasks(other_wholes)))


def pass_at_k(passes: int, samples: int, k: int) -> float:
    """The chance that one of k samples passes, estimated without bias from `passes` of `samples` >= k:
    1 - C(samples - passes, k) / C(samples, k).

    Raises:
        ValueError: fewer samples than k, or k below 1.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} samples; it needs k samples at least")
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def kappa(first: Sequence[object], second: Sequence[object]) -> float | None:
    """Cohen's kappa of two raters' labels, pair by pair: agreement beyond what their own shares give by chance. None
    where nothing was rated, or chance alone makes them agree always."""
    n = len(first)
    if n == 0:
        return None
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    chance = sum((first.count(label) / n) * (second.count(label) / n) for label in {*first, *second})
    return None if chance >= 1.0 else (observed - chance) / (1.0 - chance)


def weighted_kappa(first: Sequence[int], second: Sequence[int]) -> float | None:
    """Cohen's kappa with quadratic weights, for scores 1..5: being off by one costs a sixteenth of being off by four.
    None where nothing was rated, or both raters gave one score only, the same."""
    if not first:
        return None
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    expected = float(((a[:, None] - b[None, :]) ** 2).mean())
    return None if expected == 0.0 else 1.0 - float(((a - b) ** 2).mean()) / expected


def _weights(shape: tuple[int, ...]) -> tuple[Grid, Grid]:
    """How often each draw takes each seed [D, S] and each task [D, T]."""
    rng = np.random.default_rng(_SEED)
    seeds, tasks = shape
    return (
        rng.multinomial(seeds, [1.0 / seeds] * seeds, size=DRAWS).astype(np.float64),
        rng.multinomial(tasks, [1.0 / tasks] * tasks, size=DRAWS).astype(np.float64),
    )


def _ratios(parts: Grid, wholes: Grid, seeds: Grid, tasks: Grid) -> npt.NDArray[np.float64]:
    """[D]; NaN where a draw's whole is nothing."""
    above = ((seeds @ parts) * tasks).sum(axis=1)
    below = ((seeds @ wholes) * tasks).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0.0, above / below, np.nan)


def _tasks(wholes: Grid) -> int:
    """How many tasks have anything."""
    return int((wholes.sum(axis=0) > 0.0).sum())


def _estimate(value: float, draws: npt.NDArray[np.float64], *, tasks: int) -> Estimate:
    known = draws[~np.isnan(draws)]
    if tasks < MIN_TASKS or known.size < LEVEL * draws.size:
        return Estimate(value=value, low=None, high=None)
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low, high = np.percentile(known, [tail, 100.0 - tail]).tolist()
    return Estimate(value=value, low=low, high=high)
