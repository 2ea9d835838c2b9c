"""Tokens a second of the learner: packed rows against sequences padded to the longest, on lengths as rollouts have.

Both go through the same code and kernels; padding is tokens without loss at the end of a sequence.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import LearnerConfig
from learner.packing import Sample, plan
from orchestrator.bench.figures import Figure, Options, figure, ratios, timed
from rollout.trajectory import Payload

if TYPE_CHECKING:
    from learner.rank import RankCore

SEQUENCES = 16
LONGEST = 512


def run(options: Options) -> list[Figure]:
    """One rank with the learner's model of --config; a repetition is one optimiser step each way. Tokens of padding do
    not count as work done."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as LearnerRank does, and before torch is loaded
    from learner.rank import RankCore

    config = options.load()
    learner = config.learner.model_copy(update={"world_size": 1, "zero_stage": 0})
    core = RankCore(learner, config.loss, config.rollout.sampling.temperature)
    lengths = skewed(SEQUENCES, LONGEST)
    packed_rows = _rows(lengths, lengths, learner)
    padded_rows = _rows(lengths, [max(lengths)] * SEQUENCES, learner)
    tokens = sum(lengths)
    # On a CPU the time of all its threads, which says the same whoever else runs there.
    unit, clock = ("tokens/s", time.perf_counter) if learner.device == "cuda" else ("tokens/CPU s", time.process_time)
    packed, padded = [], []
    for repetition in range(options.times(5) + 1):  # the first one allocates
        fast = tokens / timed(lambda: _step(core, packed_rows), clock=clock)
        slow = tokens / timed(lambda: _step(core, padded_rows), clock=clock)
        if repetition:
            packed.append(fast)
            padded.append(slow)
    mix = f"{SEQUENCES} sequences of {min(lengths)} to {max(lengths)} tokens"
    with_packing, with_padding = figure(f"packed, {mix}", unit, packed), figure("padded", unit, padded)
    return [
        with_packing,
        with_padding,
        ratios("packed over padded", with_packing, with_padding),
        figure("tokens run padded over packed", "x", [SEQUENCES * max(lengths) / tokens]),
    ]


def skewed(count: int, longest: int) -> list[int]:
    """Log-normal lengths: many short ones and a long tail, cut at `longest`, which one of them has."""
    draw = random.Random(0)
    lengths = [min(max(int(draw.lognormvariate(5.0, 0.8)), 16), longest) for _ in range(count - 1)]
    return [*lengths, longest]


def _step(core: RankCore, rows: list[list[Sample]]) -> None:
    core.step(rows, version=0)


def _rows(lengths: list[int], padded: list[int], learner: LearnerConfig) -> list[list[Sample]]:
    samples = [
        Sample(payload=payload(length, total), advantage=1.0 if i % 2 else -1.0, weight=1.0 / sum(lengths))
        for i, (length, total) in enumerate(zip(lengths, padded, strict=True))
    ]
    layout = plan(padded, 1, learner.max_tokens_per_microbatch)[0]
    return [[samples[i] for i in row] for row in layout]


def payload(length: int, total: int) -> Payload:
    """`length` tokens, the second half of which was generated, and padding up to `total`."""
    ids = np.random.default_rng(length).integers(0, 64, total, dtype=np.int32)
    generated = np.zeros(total, dtype=np.bool_)
    generated[length // 2 : length] = True
    logprobs = np.where(generated, -1.0, 0.0).astype(np.float32)
    versions = np.where(generated, 0, -1).astype(np.int32)
    return Payload(token_ids=ids, loss_mask=generated, logprobs=logprobs, versions=versions)
