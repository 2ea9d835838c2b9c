"""The supervised loop: examples in, a trained small Llama out.

One plain loop in one process. The ranks that train the policy weigh sequences, not tokens, and know no loss on what was
only read; warm-up of a model of a million parameters needs the latter and gains nothing from sharding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from configs.sft_schema import SftModel, SftTraining
from learner.sft_init import copying_init

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

POOL_BATCHES = 24
"""Batches' worth of examples that are sorted by length together, so that little is padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One conversation of T tokens."""

    token_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T] true for tokens the model has to write, the closing `<|end|>` of each message included (M1.9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFigures:
    """What a training took and where it ended."""

    steps: int
    tokens: int
    response_tokens: int
    loss: float
    """Mean loss on response tokens over the last tenth of the steps, nats a token."""
    wall_s: float
    threads: int


def new_model(shape: SftModel, *, vocab_size: int, pad_id: int, end_id: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random fp32 weights, tied embeddings and, if asked for, a start at copying."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if shape.copying_heads:
        copying_init(model, heads=shape.copying_heads, seed=seed)
    return model


def beside(examples: Iterator[Example]) -> Iterator[Example]:
    """The same examples in the same order, written by a process of its own while the model trains."""
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset[Example]):
        def __iter__(self) -> Iterator[Example]:
            return examples

    loader = DataLoader(Stream(), batch_size=None, num_workers=1, prefetch_factor=256)
    return iter(loader)


def learning_rate(done: float, training: SftTraining) -> float:
    """WSD at share `done` in [0, 1] of the tokens: linear rise, constant, linear decay to 0."""
    if done < training.warmup_share:
        return training.lr * max(done / training.warmup_share, 0.01)
    left = 1.0 - done
    if left < training.decay_share:
        return training.lr * left / training.decay_share
    return training.lr


def batches(examples: Iterator[Example], *, batch_tokens: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches of similar lengths, `batch_tokens` with padding at most (one longer example goes alone)."""
    rng = np.random.default_rng(seed)
    while True:
        pool: list[Example] = []
        tokens = 0
        while tokens < POOL_BATCHES * batch_tokens:
            pool.append(next(examples))
            tokens += len(pool[-1].token_ids)
        pool.sort(key=lambda example: len(example.token_ids))
        cut: list[list[Example]] = [[]]
        for example in pool:
            if cut[-1] and len(example.token_ids) * (len(cut[-1]) + 1) > batch_tokens:
                cut.append([])
            cut[-1].append(example)
        for index in rng.permutation(len(cut)):
            yield cut[index]


def collate(batch: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded `ids` [B, T] int64, and for each *next* token [B, T-1] whether it is written / read (bool)."""
    import torch

    width = max(len(example.token_ids) for example in batch)
    ids = np.full((len(batch), width), pad_id, dtype=np.int64)
    written = np.zeros((len(batch), width), dtype=np.bool_)
    real = np.zeros((len(batch), width), dtype=np.bool_)
    for row, example in enumerate(batch):
        length = len(example.token_ids)
        ids[row, :length] = example.token_ids
        written[row, :length] = example.loss_mask
        real[row, :length] = True
    read = real & ~written
    return torch.from_numpy(ids), torch.from_numpy(written[:, 1:]), torch.from_numpy(read[:, 1:])


def token_losses(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each next token, [B, T-1] nats. Causal: padding on the right is harmless."""
    import torch

    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return flat.view(ids.shape[0], ids.shape[1] - 1)


def mean_nll(model: LlamaForCausalLM, examples: Sequence[Example], pad_id: int) -> float:
    """Mean loss on written tokens over `examples`, nats a token."""
    import torch

    total = count = 0.0
    with torch.inference_mode():
        for start in range(0, len(examples), 8):
            ids, written, _ = collate(examples[start : start + 8], pad_id)
            total += float(token_losses(model, ids)[written].sum())
            count += float(written.sum())
    return total / count


def parameter_groups(model: LlamaForCausalLM, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; vectors (norms) do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def train(
    model: LlamaForCausalLM,
    examples: Iterator[Example],
    training: SftTraining,
    *,
    pad_id: int,
    log_every_s: float,
    log: Callable[[str], None],
) -> TrainFigures:
    """Train `model` in place until `training.tokens` tokens were read."""
    import torch

    torch.set_num_threads(training.threads)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, training.weight_decay), lr=training.lr, betas=training.betas, fused=True
    )
    model.train()
    stream = beside(examples) if training.worker else examples
    tokens = response = steps = 0
    losses: list[float] = []
    started = logged = time.monotonic()
    for batch in batches(stream, batch_tokens=training.batch_tokens, seed=training.seed):
        done = tokens / training.tokens
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, training)
        ids, written, read = collate(batch, pad_id)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.dtype == "bfloat16"):
            nll = token_losses(model, ids)
        loss = nll[written].mean()
        losses.append(float(loss.detach()))
        if training.context_weight and done < training.context_share:
            loss = loss + training.context_weight * nll[read].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        tokens += sum(len(example.token_ids) for example in batch)
        response += int(written.sum())
        now = time.monotonic()
        if now - logged >= log_every_s or tokens >= training.tokens:
            logged = now
            rate = tokens / (now - started)
            log(
                f"{min(tokens / training.tokens, 1.0):6.1%}  step {steps}  tokens {tokens:,}  "
                f"loss {float(np.mean(losses[-20:])):.4f}  {rate:,.0f} tokens/s  "
                f"{max(training.tokens - tokens, 0) / rate:.0f} s left"
            )
        if tokens >= training.tokens:
            break
    model.eval()
    return TrainFigures(
        steps=steps,
        tokens=tokens,
        response_tokens=response,
        loss=float(np.mean(losses[-max(len(losses) // 10, 1) :])),
        wall_s=time.monotonic() - started,
        threads=training.threads,
    )
