"""Memory and time of what the learner does to long rows, against the plain ways, in one run.

    python -m tests.bench.logprobs --tokens 2048 --vocab 50000 --hidden 256 --chunks 256 1024 --rounds 3
    python -m tests.bench.logprobs --tokens 32000 --vocab 150000 --hidden 64 --chunks 1024 --rounds 1 --batch 0

First the log-probabilities of one packed row, chunk by chunk against the logits of the whole row: forward and backward
of the output layer and the loss. Logits of a whole row that would not fit the memory at hand are not tried: their size
is computed, and the peak from it, at as many times the logits as a row that fits measured (three: the logits, their
log-softmax and a gradient).

Then a batch of sequences of skewed lengths through a whole model (--layers, of the same hidden size and vocabulary),
packed against padded to the longest: forward and backward, with chunked log-probabilities both times. Padding is tokens
without loss. --batch 0 leaves this part out.

All is fp32 on the CPU. Each measurement has its own process, so that its peak is its own: the largest resident size
above what the inputs take, as the kernel counted it. Time is the process's CPU time, which hardly depends on what else
the machine does. The ways take turns; a ratio is taken round by round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.attention import PACKED, register
from learner.chunked import replace_head, target_logprobs
from learner.packing import Sample, build_row, plan
from orchestrator.bench.learner import payload, skewed

WHOLE_ROW = 0
"""In place of a chunk's size."""
PEAK_OF_LOGITS = 3
"""Peak over the size of the logits, where a whole row fits."""


class Shape(NamedTuple):
    """What one measurement runs on."""

    tokens: int
    vocab: int
    hidden: int
    threads: int
    layers: int


class Cost(NamedTuple):
    """What one forward and backward pass took."""

    peak_mib: float
    cpu_s: float


def _status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _cost(work: Callable[[], None]) -> Cost:
    """In a process of its own."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start_s = _status_mib("VmRSS"), time.process_time()
    work()
    return Cost(_status_mib("VmHWM") - before, time.process_time() - start_s)


# ---- log-probabilities of one row -----------------------------------------------------------------------------------


def _whole_row(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_probs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    with torch.no_grad():
        _entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1)


def _logprobs(shape: Shape, chunk: int) -> Cost:
    torch.set_num_threads(shape.threads)
    hidden = torch.randn(shape.tokens, shape.hidden).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden) / shape.hidden**0.5).requires_grad_()
    targets = torch.randint(0, shape.vocab, (shape.tokens,))

    def work() -> None:
        if chunk == WHOLE_ROW:
            logps = _whole_row(hidden, weight, targets)
        else:
            logps = target_logprobs(hidden, weight, None, targets, 1.0, chunk)[0]
        logps.mean().backward()

    return _cost(work)


# ---- a batch through a model ----------------------------------------------------------------------------------------


def _batch(shape: Shape, lengths: Sequence[int], padded: bool, chunk: int) -> Cost:
    torch.set_num_threads(shape.threads)
    register()
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.hidden // 64),
        tie_word_embeddings=True,
        attn_implementation=PACKED,
    )
    model: Any = LlamaForCausalLM(config)
    head = replace_head(model, 1.0, chunk)
    for parameter in model.parameters():  # both ways need them, so they are no part of the peak
        parameter.grad = torch.zeros_like(parameter)
    run = [max(lengths)] * len(lengths) if padded else list(lengths)
    samples = [
        Sample(payload=payload(length, total), advantage=1.0, weight=1.0 / sum(lengths))
        for length, total in zip(lengths, run, strict=True)
    ]
    layout = plan(run, 1, shape.tokens)[0]

    def work() -> None:
        for indices in layout:
            row = build_row([samples[i] for i in indices])
            head.targets = torch.from_numpy(row.targets)
            found = model(
                input_ids=torch.from_numpy(row.token_ids)[None],
                position_ids=torch.from_numpy(row.position_ids)[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(row.predictors),
                cu_seq_lens_q=row.boundaries,
            ).logits[0, :, 0]
            (found * torch.from_numpy(row.weights)).sum().backward()

    return _cost(work)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _apart(measure: Callable[..., Cost], *arguments: Any) -> Cost:
    """In a process of its own; torch is imported once, since this one never computes."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, arguments)


def _measured(ways: Iterable[str], rounds: int, run: Callable[[str], Cost]) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {}
    for _ in range(rounds):
        for way in ways:
            costs.setdefault(way, []).append(run(way))
    return costs


def _print(costs: Mapping[str, Sequence[Cost]], plain: str) -> None:
    """One line a way, held against the plain one where that was measured."""
    for name, found in costs.items():
        memory = speed = ""
        if plain in costs:
            pairs = list(zip(costs[plain], found, strict=True))
            memory = f" (1/{statistics.median(p.peak_mib / f.peak_mib for p, f in pairs):.1f})"
            speed = f" (x {statistics.median(f.cpu_s / p.cpu_s for p, f in pairs):.2f})"
        peak, cpu_s = (statistics.median(getattr(f, field) for f in found) for field in Cost._fields)
        print(f"  {name:<18} peak {peak:8.1f} MiB{memory}   CPU {cpu_s:7.2f} s{speed}", flush=True)


def row_table(shape: Shape, chunks: Sequence[int], rounds: int) -> None:
    """Chunks against the whole row."""
    logits_mib = shape.tokens * shape.vocab * 4 / 2**20
    peak_mib = PEAK_OF_LOGITS * logits_mib
    sizes = {f"chunks of {chunk}": chunk for chunk in chunks}
    print(f"{shape.tokens} tokens x {shape.vocab} words, hidden {shape.hidden}, fp32, {rounds} rounds, medians")
    if peak_mib < psutil.virtual_memory().available / 2**20:
        sizes = {"whole row": WHOLE_ROW, **sizes}
    else:
        print(f"  whole row          not run: logits of {logits_mib:.0f} MiB, computed peak {peak_mib:.0f} MiB")
    _print(_measured(sizes, rounds, lambda way: _apart(_logprobs, shape, sizes[way])), "whole row")


def batch_table(shape: Shape, lengths: Sequence[int], chunk: int, rounds: int) -> None:
    """Packed against padded."""
    padded = len(lengths) * max(lengths)
    print(
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens ({sum(lengths)}, padded {padded}), "
        f"rows of {shape.tokens}, {shape.layers} layers"
    )
    ways = {"padded": True, "packed": False}
    _print(_measured(ways, rounds, lambda way: _apart(_batch, shape, lengths, ways[way], chunk)), "padded")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="loss-bearing tokens of the row")
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batch", type=int, default=16, help="sequences of the batch; 0: none")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest of them")
    parser.add_argument("--layers", type=int, default=4, help="of the model that the batch goes through")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for tokens in options.tokens:
        shape = Shape(tokens, options.vocab, options.hidden, options.threads, options.layers)
        row_table(shape, options.chunks, options.rounds)
    if options.batch:
        batch_table(shape, skewed(options.batch, options.longest), options.chunks[-1], options.rounds)


if __name__ == "__main__":
    main()
