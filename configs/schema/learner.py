"""The optimiser and the ranks that train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.fields import (
    Decay,
    Flag,
    Int,
    ModelFolder,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from configs.schema.pools import Resources


class OptimizerConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-4
    """Learning rate after warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Maximal global gradient norm."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""


class LoraConfig(Section):
    """Low-rank adapters: the model stays as it is, and the small matrices A and B beside some of its layers train.
    Engines and checkpoints' `policy` folders get whole weights, W + alpha / rank B A."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The adapters' part is scaled by alpha / rank."""
    target_modules: Annotated[tuple[NonEmpty, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that get adapters, in every block; not the output layer or the embeddings."""


class LearnerConfig(Section):
    """The DeepSpeed actor group."""

    model: ModelFolder
    """HF checkpoint folder the policy starts from."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in the learner; optimiser state is fp32."""
    world_size: PositiveInt = 1
    """Data-parallel ranks."""
    zero_stage: Annotated[Int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO: 1 shards optimiser state, 2 gradients too, 3 weights too."""
    offload_optimizer: Flag = False
    """ZeRO >= 1 on CUDA: optimiser state in host memory."""
    gradient_checkpointing: Flag = False
    """Recomputes activations in the backward pass to save memory."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Sequence packing: tokens in one packed row."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once, twice in fp32: 1024 of a vocabulary of 150,000 take 1.2 GB. The loss does not
    depend on it."""
    threads: PositiveInt = 2
    """CPU: torch threads of one rank."""
    lora: LoraConfig | None = None
    """null: all weights train."""
    optimizer: OptimizerConfig = OptimizerConfig()
    placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How several ranks share nodes: PACK on as few as possible, STRICT_PACK on one, SPREAD on many, STRICT_SPREAD on
    one each."""
    resources: Resources = Resources()
