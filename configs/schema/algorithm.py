"""Groups, their advantages and the loss (M1, M3 to M5)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.fields import Float, Int, NonNegativeFloat, PositiveFloat, Probability, Section, at_most


class AdvantageMode(StrEnum):
    """How outcome advantages and quality factors become training advantages (M4)."""

    OUTCOME = "outcome"
    DOWNWEIGHT = "downweight"
    DISCOUNT = "discount"
    REDISTRIBUTE_EXACT = "redistribute_exact"
    REDISTRIBUTE = "redistribute"


class Aggregation(StrEnum):
    """How token losses become one number (M5.2)."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    PROMPT_MEAN = "prompt_mean"


class LengthPenaltyConfig(Section):
    """M5.4, applied to passing trajectories after the grader's corrections (M1.8)."""

    max_penalty: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.2
    """X: the largest deduction from a passing reward."""
    free_excess: NonNegativeFloat = 0.0
    """d: relative excess over l* that costs nothing."""
    full_excess: PositiveFloat = 1.0
    """s: relative excess over l* at which the whole penalty applies; must be above free_excess."""
    exponent: PositiveFloat = 1.5
    """g: shape of the ramp."""
    percentile: Annotated[Float, Field(ge=0.0, le=100.0)] = 30.0
    """B: the percentile of passing lengths that is l*."""
    min_pass_rate: Probability = 0.5
    """A: groups whose pass rate is not above this are left alone."""

    @model_validator(mode="after")
    def _ramp(self) -> LengthPenaltyConfig:
        if self.full_excess <= self.free_excess:
            raise ValueError(
                f"full_excess={self.full_excess} must be above free_excess={self.free_excess}; raise full_excess"
            )
        return self


Dimension = Literal["approach", "precision", "minimality", "side_effects", "consistency"]
"""What a candidate is scored on (M3.1)."""


class RubricConfig(Section):
    """M3 constants."""

    weight_approach: NonNegativeFloat = 0.30
    """Share of approach suitability in W; the five weights sum to 1 (M3.1)."""
    weight_precision: NonNegativeFloat = 0.25
    """Share of implementation precision."""
    weight_minimality: NonNegativeFloat = 0.20
    """Share of minimality of changes."""
    weight_side_effects: NonNegativeFloat = 0.15
    """Share of freedom from side effects."""
    weight_consistency: NonNegativeFloat = 0.10
    """Share of codebase consistency."""
    t1_first: Annotated[Float, Field(gt=0.0, le=1.0)] = 1.0
    """Factor of the first tied group in tier 1 (M3.4)."""
    t1_rest: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.9
    """Factor of the others in tier 1."""
    t2_high: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.85
    """Factor of the first tied group in tier 2."""
    t2_low: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.40
    """Factor of the last one in tier 2; between them it falls linearly."""
    t3: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.2
    """Factor of tier 3."""
    left_out: tuple[Dimension, ...] = ()
    """Ablation: dimensions that count as 5 for every candidate, so that they move neither a tier nor an order. What the
    grader gave them is still recorded, and flags still count."""

    @model_validator(mode="after")
    def _check(self) -> RubricConfig:
        weights = {key: value for key, value in self if key.startswith("weight_")}
        total = sum(weights.values())
        if abs(total - 1.0) > 1e-9:
            said = ", ".join(f"{key}={value:g}" for key, value in weights.items())
            raise ValueError(f"the weights sum to {total:g} ({said}); make them sum to 1")
        if not self.t1_first >= self.t1_rest >= self.t2_high >= self.t2_low >= self.t3:
            factors = ", ".join(
                f"{key}={getattr(self, key):g}" for key in ("t1_first", "t1_rest", "t2_high", "t2_low", "t3")
            )
            raise ValueError(f"factors must not rise in this order: {factors}; lower the later ones")
        return self


class AlgorithmConfig(Section):
    """Groups and their advantages (M1, M3, M4)."""

    mode: AdvantageMode = AdvantageMode.REDISTRIBUTE
    """How outcome advantages and quality factors become training advantages (M4.6)."""
    group_size: Annotated[Int, Field(ge=2), at_most(10**12)] = 6
    """n: trajectories sampled for one task."""
    min_valid: Annotated[Int, Field(ge=2), at_most(10**12)] = 2
    """A group with fewer valid trajectories (after masking, M1.3) is skipped and counted."""
    lambda_max: Annotated[Float, Field(ge=1.0)] = 1.5
    """Cap of the scale-up (M4.3); used by mode `redistribute` only."""
    rubric: RubricConfig = RubricConfig()
    length_penalty: LengthPenaltyConfig | None = None
    """null: none."""


class RatioMaskLoss(Section):
    """Token policy gradient; tokens whose ratio leaves the bounds are masked but stay in the denominator (M5.1)."""

    name: Literal["ratio_mask"] = "ratio_mask"
    bounds_positive: tuple[PositiveFloat, PositiveFloat] = (0.2, 5.0)
    """Kept ratios where the advantage is positive."""
    bounds_negative: tuple[PositiveFloat, PositiveFloat] = (0.2, 5.0)
    """Kept ratios where the advantage is negative."""

    @model_validator(mode="after")
    def _bounds(self) -> RatioMaskLoss:
        for key, (low, high) in (("bounds_positive", self.bounds_positive), ("bounds_negative", self.bounds_negative)):
            if not low < 1.0 < high:
                raise ValueError(f"{key}=[{low:g}, {high:g}] must contain 1; choose low < 1 < high")
        return self


class PpoClipLoss(Section):
    """PPO-clip with dual clip (M5.1)."""

    name: Literal["ppo_clip"]
    clip_low: Annotated[Float, Field(gt=0.0, lt=1.0)] = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: PositiveFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[Float, Field(gt=1.0)] = 3.0
    """Lower bound of the objective for negative advantages, as a multiple of the advantage."""


class LossConfig(Section):
    """M5."""

    objective: Annotated[RatioMaskLoss | PpoClipLoss, Field(discriminator="name")] = RatioMaskLoss()
    aggregation: Aggregation = Aggregation.PROMPT_MEAN
    """How token losses become one number (M5.2)."""
