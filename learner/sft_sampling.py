"""Batched sampling from a small model in this process, for closing figures; rollouts use the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def sample(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_id: int,
    pad_id: int,
    seed: int,
) -> list[list[int]]:
    """Continue every prompt until `stop_id` (included) or `max_new_tokens`; temperature 0 is greedy."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    seen = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all rows go on in the same column
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        seen[row, width - len(prompt) :] = 1
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    results: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    cache = None
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            output = model(
                input_ids=ids,
                attention_mask=seen,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logits = output.logits[:, -1]
            if temperature == 0.0:
                chosen = logits.argmax(-1)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
            for row, token in enumerate(chosen.tolist()):
                if row in open_rows:
                    results[row].append(token)
                    if token == stop_id:
                        open_rows.discard(row)
            if not open_rows:
                break
            ids = chosen[:, None]
            seen = torch.cat([seen, torch.ones((len(prompts), 1), dtype=torch.long)], 1)
            positions = positions[:, -1:] + 1
    return results
