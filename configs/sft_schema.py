"""A warm-up recipe: from which traces `gagar sft` trains which small model, and how.

Like `configs.schema`: unknown keys are errors, every number says its unit, checks across keys are pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section


class SftModel(Section):
    """Shape of the Llama that is trained from random weights (fp32, tied embeddings)."""

    layers: PositiveInt = 4
    hidden: PositiveInt = 128
    heads: PositiveInt = 4
    ffn: PositiveInt = 384
    max_positions: PositiveInt = 2048
    """Longest sequence, in tokens; longer examples are passed over."""
    rope_theta: PositiveFloat = 1e6
    copying_heads: NonNegativeInt = 3
    """Attention heads of the first two layers that start as a circuit for copying from the context; 0 for none."""

    @model_validator(mode="after")
    def _heads(self) -> SftModel:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden={self.hidden} must be a multiple of 2 x heads={self.heads} (rotary halves); change one of them"
            )
        if self.copying_heads > self.heads or (self.copying_heads and self.layers < 2):
            raise ValueError(
                f"copying_heads={self.copying_heads} needs as many heads (heads={self.heads}) and two layers "
                f"(layers={self.layers}); lower copying_heads"
            )
        if self.copying_heads * (self.hidden // self.heads) >= self.hidden:
            raise ValueError(
                f"copying_heads={self.copying_heads} leaves no head free (heads={self.heads}); lower copying_heads"
            )
        return self


class SftTokenizer(Section):
    """Byte-level BPE, trained on the texts of the train split only."""

    vocab_size: Annotated[int, Field(ge=300)] = 512
    """Tokens in all: 5 of chat markup, 256 bytes, the rest merges."""
    max_piece_chars: PositiveInt = 8
    """Longest token in characters. Short pieces make unseen names look like seen ones."""
    merge_punctuation: bool = False
    """Whether runs of punctuation may share a token: shortens JSON by about 40 %, which verdicts are; for sed commands
    single characters copy better."""
    examples: PositiveInt = 600
    """Examples of the recipe's data whose texts it is trained on."""


class SftSource(Section):
    """One task family in the data."""

    type: Literal["minirepo", "files", "arith"]
    share: PositiveFloat
    """Relative share of the examples."""
    seed: int = 0
    """Seed of the task stream."""
    strategies: dict[str, PositiveFloat]
    """Expert strategy -> relative share. A name that a task's experts do not offer is passed over for that task."""

    @model_validator(mode="after")
    def _some(self) -> SftSource:
        if not self.strategies:
            raise ValueError("strategies is empty; name at least one expert strategy with its share")
        return self


class PolicyData(Section):
    """Conversations of scripted experts at tasks of the train split."""

    type: Literal["policy"]
    sources: Annotated[dict[str, SftSource], Field(min_length=1)]
    system_prompt: str | None = None
    observation_chars: PositiveInt = 1600
    """As rollout.limits.observation_chars of the runs that start from this checkpoint."""


class GraderShares(Section):
    """Relative shares of the ways to grade."""

    agent: PositiveFloat = 4.0
    """The whole group with tools: grader.mode agent, grader.scope group."""
    candidate: NonNegativeFloat = 1.0
    """One candidate by itself with tools: grader.scope candidate."""
    single: NonNegativeFloat = 1.0
    """The patches in one prompt, without tools: grader.mode single."""


class GraderData(Section):
    """Gradings of groups of experts' solutions, whose quality is known by construction, through the grader's tools."""

    type: Literal["grader"]
    source: Literal["minirepo"] = "minirepo"
    seed: int = 0
    group_sizes: tuple[Annotated[int, Field(ge=2)], Annotated[int, Field(ge=2)]] = (4, 8)
    """Smallest and largest group."""
    shares: GraderShares = GraderShares()
    prompt_chars: PositiveInt = 6000
    """As grader.prompt_chars of the runs that use this checkpoint."""
    tool_output_chars: PositiveInt = 4000
    """As grader.tool_output_chars of those runs."""

    @model_validator(mode="after")
    def _sizes(self) -> GraderData:
        if self.group_sizes[0] > self.group_sizes[1]:
            raise ValueError(f"group_sizes={list(self.group_sizes)} falls; write the smaller size first")
        return self


SftData = Annotated[PolicyData | GraderData, Field(discriminator="type")]


class SftTraining(Section):
    """AdamW with warm-up, a constant stretch and a linear decay to zero (WSD)."""

    tokens: PositiveInt
    """Tokens read in all, context and response together."""
    batch_tokens: PositiveInt = 2048
    """Tokens of one optimiser step."""
    lr: PositiveFloat = 1.5e-3
    warmup_share: Probability = 0.03
    decay_share: Probability = 0.3
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.05
    grad_clip: PositiveFloat = 1.0
    context_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Weight of the loss on tokens that are read, against 1 on tokens to be written. It teaches copying sooner."""
    context_share: Probability = 0.7
    """Share of the training after which context_weight no longer applies."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward passes; weights and optimiser are fp32 either way."""
    threads: PositiveInt = 2
    """Torch threads."""
    worker: bool = True
    """Whether a process of its own writes the examples while the model trains; the result is the same."""
    seed: int = 0
    """Seed of the weights and of the order of the examples."""

    @model_validator(mode="after")
    def _schedule(self) -> SftTraining:
        if self.warmup_share + self.decay_share > 1.0:
            raise ValueError(
                f"warmup_share={self.warmup_share:g} and decay_share={self.decay_share:g} exceed 1 together; lower one"
            )
        if self.tokens < self.batch_tokens:
            raise ValueError(f"tokens={self.tokens} is below batch_tokens={self.batch_tokens}; raise tokens")
        return self


class SftEval(Section):
    """Closing figures on the held-out split."""

    examples: NonNegativeInt = 64
    """Examples for the loss; for a grader also groups to be graded for validity, tier agreement and tau-b."""


class SftRecipe(Section):
    """One warm-up checkpoint."""

    output: str
    """Folder of the checkpoint (relative: against the folder of the recipe)."""
    data: SftData
    tokenizer: SftTokenizer = SftTokenizer()
    model: SftModel = SftModel()
    training: SftTraining
    eval: SftEval = SftEval()
    log_every_s: PositiveFloat = 10.0
    """Interval of the progress lines."""
