"""Attention inside packed rows: each sequence on its own, without a mask.

With sdpa, Transformers turns a packed row into one dense block-diagonal mask, so a row of L tokens costs L^2 although
its sequences cost the sum of their squares (on a CPU, rows of 4,096 tokens trained five times slower than this does).
FlashAttention knows packed rows itself; this does the same with sdpa's causal kernel, sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKED = "packed_sdpa"
"""Name of this implementation for `attn_implementation`."""

_PLAIN_CAUSAL = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
"""Model types whose attention is causal softmax and nothing else, once no sliding window is set."""


def implementation(model_config: Any, *, flash: bool) -> str:
    """What to load a model with: FlashAttention 2 where it is installed, this where attention is plain, else sdpa.

    All three keep the sequences of a packed row apart; the last at the cost of a dense mask.
    """
    if flash:
        return "flash_attention_2"
    plain = model_config.model_type in _PLAIN_CAUSAL and getattr(model_config, "sliding_window", None) is None
    return PACKED if plain else "sdpa"


def register() -> None:
    """Makes the implementation known to Transformers, through its own registries. Safe to repeat."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_sdpa)
    AttentionMaskInterface.register(PACKED, _no_mask)


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Sequence[int],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: `query` [1, H, L, D], `key` and `value` [1, H_kv, L, D] -> [1, L, H, D].

    `cu_seq_lens_q` holds the boundaries of the row's sequences, from 0 to L; it comes through the model's keyword
    arguments.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    grouped = query.shape[1] != key.shape[1]
    parts = [
        scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        for start, end in pairwise(cu_seq_lens_q)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
