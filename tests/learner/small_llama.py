"""A random Llama with tied embeddings, small enough for a learner rank in a test."""

from __future__ import annotations

from pathlib import Path

import torch

VOCAB = 48
LAYERS = 2


def save_small_llama(folder: Path) -> None:
    """Write it as an HF folder; always the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
