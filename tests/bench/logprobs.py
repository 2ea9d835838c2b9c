"""Memory and time of the log-probabilities of one packed row, chunk by chunk against the logits of the whole row.

    python -m tests.bench.logprobs --tokens 2048 --vocab 50000 --hidden 256 --chunks 256 1024 --rounds 3

Forward and backward of the output layer and the loss, fp32 on the CPU. Each measurement has its own process, so that
its peak is its own: the largest resident size above what the inputs take, as the kernel counted it. Time is the
process's CPU time, which hardly depends on what else the machine does. The ways take turns; a ratio is taken round by
round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from learner.chunked import target_logprobs

WHOLE_ROW = 0
"""In place of a chunk's size."""


class Shape(NamedTuple):
    """What one measurement runs on."""

    tokens: int
    vocab: int
    hidden: int
    threads: int


class Cost(NamedTuple):
    """What one forward and backward pass took."""

    peak_mib: float
    cpu_s: float


def _status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _whole_row(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_probs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    with torch.no_grad():
        _entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1)


def _measure(shape: Shape, chunk: int) -> Cost:
    torch.set_num_threads(shape.threads)
    hidden = torch.randn(shape.tokens, shape.hidden).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden) / shape.hidden**0.5).requires_grad_()
    targets = torch.randint(0, shape.vocab, (shape.tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start_s = _status_mib("VmRSS"), time.process_time()
    if chunk == WHOLE_ROW:
        logps = _whole_row(hidden, weight, targets)
    else:
        logps = target_logprobs(hidden, weight, None, targets, 1.0, chunk)[0]
    logps.mean().backward()
    return Cost(_status_mib("VmHWM") - before, time.process_time() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="loss-bearing tokens of the row")
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    fork = multiprocessing.get_context("fork")  # torch is imported once; this process never computes
    for tokens in options.tokens:
        shape = Shape(tokens, options.vocab, options.hidden, options.threads)
        costs: dict[int, list[Cost]] = {}
        for _ in range(options.rounds):
            for chunk in (WHOLE_ROW, *options.chunks):
                with fork.Pool(1) as pool:
                    costs.setdefault(chunk, []).append(pool.apply(_measure, (shape, chunk)))
        whole = costs[WHOLE_ROW]
        print(
            f"{tokens} tokens x {options.vocab} words, hidden {options.hidden}, fp32, {options.rounds} rounds, medians"
        )
        for chunk, found in costs.items():
            name = "whole row" if chunk == WHOLE_ROW else f"chunks of {chunk}"
            memory = statistics.median(w.peak_mib / f.peak_mib for w, f in zip(whole, found, strict=True))
            speed = statistics.median(f.cpu_s / w.cpu_s for w, f in zip(whole, found, strict=True))
            print(
                f"  {name:<15} peak {statistics.median(f.peak_mib for f in found):8.1f} MiB (1/{memory:.1f})   "
                f"CPU {statistics.median(f.cpu_s for f in found):7.2f} s (x {speed:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
