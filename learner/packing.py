"""Which sequence goes to which rank and row, and the rows themselves. Pure (numpy).

A row holds several sequences back to back, without padding; position ids restart at 0 with each sequence, and with each
context of a trajectory that has several. Given
`attention_mask=None`, Hugging Face models read the restarts as sequence boundaries and attend block-diagonally, with
sdpa and FlashAttention alike, so a row of one batch entry is one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from rollout.trajectory import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence on its rank, ready to be trained on."""

    payload: Payload
    advantage: float
    weight: float
    """w_i of `loss.token_weights`: the batch's aggregation, denominators included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One micro-batch: L packed tokens, K of which bear loss."""

    token_ids: npt.NDArray[np.int64]
    """[L]"""
    position_ids: npt.NDArray[np.int64]
    """[L] from 0 in each context."""
    boundaries: tuple[int, ...]
    """Where the contexts of the sequences begin, and L at the end."""
    predictors: npt.NDArray[np.int64]
    """[K] index of the token whose logits predict the target (the one before it)."""
    targets: npt.NDArray[np.int64]
    """[K] token id that was sampled."""
    logprobs: npt.NDArray[np.float32]
    """[K] log mu of the target."""
    advantages: npt.NDArray[np.float32]
    """[K]"""
    weights: npt.NDArray[np.float32]
    """[K]"""
    versions: npt.NDArray[np.int32]
    """[K] policy version that sampled the target."""


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the sequences of each rank: longest first, each to the rank with the fewest tokens so far."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each row, first fit decreasing; no row holds more than `max_tokens`.

    Raises ValueError if a sequence alone is longer than that.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > max_tokens:
            raise ValueError(f"a sequence of {length} tokens does not fit a row of {max_tokens}")
        row = next((r for r, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(max_tokens)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= length
    return rows


def plan(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """[rank][row] -> indices of sequences. Every rank gets the same number of rows (at least one).

    The ranks meet in collectives in every backward pass (ZeRO 2 and 3), so a rank with less work gets empty rows.
    Raises ValueError as `pack` does.
    """
    shares = balance(lengths, ranks)
    packed = [[[share[i] for i in row] for row in pack([lengths[i] for i in share], max_tokens)] for share in shares]
    most = max(1, *(len(rows) for rows in packed))
    return [rows + [[] for _ in range(most - len(rows))] for rows in packed]


def build_row(samples: Sequence[Sample]) -> Row:
    """Lays sequences out one after the other. An empty row becomes one token without loss, so that it can be run.

    Raises ValueError where the first token of a context bears loss: nothing predicts it.
    """
    if not samples:
        return _EMPTY
    payloads = [sample.payload for sample in samples]
    for payload in payloads:
        if payload.loss_mask[list(payload.contexts)].any():
            raise ValueError("the first token of a sequence bears loss, but nothing before it predicts it")
    begins = accumulate((len(payload.token_ids) for payload in payloads), initial=0)
    boundaries = [begin + at for begin, payload in zip(begins, payloads, strict=False) for at in payload.contexts]
    boundaries.append(sum(len(payload.token_ids) for payload in payloads))
    masks = [payload.loss_mask for payload in payloads]
    counts = [int(mask.sum()) for mask in masks]
    targets = np.flatnonzero(np.concatenate(masks))
    token_ids = np.concatenate([payload.token_ids for payload in payloads]).astype(np.int64)
    return Row(
        token_ids=token_ids,
        position_ids=np.concatenate([np.arange(end - begin) for begin, end in pairwise(boundaries)]),
        boundaries=tuple(boundaries),
        predictors=targets - 1,
        targets=token_ids[targets],
        logprobs=np.concatenate([payload.logprobs[mask] for payload, mask in zip(payloads, masks, strict=True)]),
        advantages=np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), counts),
        weights=np.repeat(np.array([sample.weight for sample in samples], dtype=np.float32), counts),
        versions=np.concatenate([payload.versions[mask] for payload, mask in zip(payloads, masks, strict=True)]),
    )


_ZERO = np.zeros(1, dtype=np.int64)
_EMPTY = Row(
    token_ids=_ZERO,
    position_ids=_ZERO,
    boundaries=(0, 1),
    predictors=_ZERO[:0],
    targets=_ZERO[:0],
    logprobs=_ZERO[:0].astype(np.float32),
    advantages=_ZERO[:0].astype(np.float32),
    weights=_ZERO[:0].astype(np.float32),
    versions=_ZERO[:0].astype(np.int32),
)
