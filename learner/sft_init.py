"""Starting weights that can already copy.

Nearly every token of a good action stands somewhere in the context: a path, a name, a line number. A model finds such
tokens with two attention heads in a row (one that looks at the previous token, one that looks for places where the
current token was followed by something), and a model of a million parameters spends millions of tokens discovering that
pair. Here the first two layers start with it, built from random projections; training is free to change all of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_PREVIOUS_SHARPNESS = 7.0
"""Scale of queries and keys of the previous-token heads."""
_MATCH_SCORE = 12.0
"""Attention score of an exact match, in nats."""
_SLOW = 0.008
"""Rotary frequencies below this (radians a token) hardly turn within an episode and can carry content."""
_FAST_PAIRS = 6
"""Rotary pairs, fastest first, that mark position for the previous-token heads."""


def copying_init(model: LlamaForCausalLM, *, heads: int, seed: int) -> None:
    """Overwrite the embeddings and `heads` attention heads of the first two layers, in place.

    One embedding dimension is the same constant for all tokens, which gives the previous-token heads something to point
    with; with tied embeddings it shifts all logits alike and so changes no probability.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def orthonormal(columns: int) -> torch.Tensor:
        basis: torch.Tensor = torch.linalg.qr(torch.randn(hidden - 1, columns, generator=generator))[0]
        return basis

    config = model.config
    hidden, dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    half = dim // 2
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    slow = [pair for pair in range(half) if frequencies[pair] < _SLOW]
    content = torch.tensor(slow + [pair + half for pair in slow])
    width = len(content)
    sigma, constant = 0.05, 0.15
    rms = math.sqrt((sigma**2 * (hidden - 1) + constant**2) / hidden)
    first, second = (model.model.layers[index].self_attn for index in (0, 1))
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.normal_(0, sigma, generator=generator)
        embeddings[:, hidden - 1] = constant
        basis = orthonormal(hidden - 1)
        for head in range(heads):
            rows = slice(head * dim, (head + 1) * dim)
            query, key = torch.zeros(dim, hidden), torch.zeros(dim, hidden)
            gain = _PREVIOUS_SHARPNESS * rms / constant
            for pair in range(min(_FAST_PAIRS, half)):  # the score peaks where the key is one position back
                key[pair, hidden - 1] = gain
                query[pair, hidden - 1] = gain * math.cos(frequencies[pair])
                query[pair + half, hidden - 1] = -gain * math.sin(frequencies[pair])
            first.q_proj.weight[rows], first.k_proj.weight[rows] = query, key
            read, write = torch.zeros(dim, hidden), torch.zeros(hidden, dim)
            read[:width, : hidden - 1] = orthonormal(width).T
            write[: hidden - 1, :width] = orthonormal(width)
            first.v_proj.weight[rows], first.o_proj.weight[:, rows] = read, rms * write
            query, key = torch.zeros(dim, hidden), torch.zeros(dim, hidden)
            scale = math.sqrt(_MATCH_SCORE * math.sqrt(dim) / width)
            query[content], key[content] = scale * read[:width], scale * write[:, :width].T
            second.q_proj.weight[rows], second.k_proj.weight[rows] = query, key
            copy = torch.zeros(dim, hidden)
            copy[:, : hidden - 1] = basis[:, rows].T
            second.v_proj.weight[rows], second.o_proj.weight[:, rows] = copy, 3 * sigma * copy.T
