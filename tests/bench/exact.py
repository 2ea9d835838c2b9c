"""Whether what the learner gets is what the engine was sent and sampled (M5.1), token by token.

Works on a record that the engine's own process wrote: one line a request, of what it answered. What a payload should
be follows from those lines alone, by no code of the gateway or of the agent loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rollout.trajectory import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One request as the engine answered it: a prompt and T sampled tokens."""

    request_id: str
    """ "<trajectory id>/<number>"."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """[T]"""
    logprobs: tuple[float, ...]
    """[T]"""
    versions: tuple[int, ...]
    """[T]"""


def read_calls(folder: Path) -> dict[str, list[EngineCall]]:
    """Trajectory id -> what the engines answered it, in order; of all files that engines wrote to `folder`."""
    found: dict[str, list[EngineCall]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            call = EngineCall(**{name: _tuple(value) for name, value in json.loads(line).items()})
            found.setdefault(call.request_id.rpartition("/")[0], []).append(call)
    return found


def differences(payload: Payload, calls: Sequence[EngineCall]) -> list[str]:
    """What of a payload is not what the engine was sent and sampled; empty where all is.

    Every call stands in the payload once: in some context that begins with its prompt as it was sent and goes on with
    what was sampled, with its probabilities and versions; and nothing else bears loss.
    """
    found: list[str] = []
    unseen = payload.loss_mask.copy()
    ends = (*payload.contexts[1:], len(payload.token_ids))
    spans = [slice(begin, end) for begin, end in zip(payload.contexts, ends, strict=True)]
    for call in calls:
        whole = np.asarray((*call.prompt_ids, *call.token_ids), dtype=payload.token_ids.dtype)
        places = []
        for span in spans:
            at = slice(span.start + len(call.prompt_ids), span.start + len(whole))
            if np.array_equal(payload.token_ids[span][: len(whole)], whole) and unseen[at].all():
                places.append(at)
        if not places:
            found.append(f"{call.request_id}: is the beginning of no context, or bears no loss in it")
            continue
        at = places[0]
        if not np.array_equal(payload.logprobs[at], np.asarray(call.logprobs, dtype=np.float32)):
            found.append(f"{call.request_id}: other log-probabilities")
        if not np.array_equal(payload.versions[at], np.asarray(call.versions, dtype=np.int32)):
            found.append(f"{call.request_id}: other policy versions")
        unseen[at] = False
    if unseen.any():
        found.append(f"{int(unseen.sum())} tokens bear loss and were never sampled")
    if (payload.versions[~payload.loss_mask] != -1).any() or (payload.logprobs[~payload.loss_mask] != 0).any():
        found.append("tokens that were not sampled have a probability or a version")
    return found


def appended(calls: Sequence[EngineCall]) -> Payload | None:
    """The payload of a trajectory whose every call went on where the last one ended; None where one did not."""
    shown: tuple[int, ...] = ()
    for call in calls:
        if call.prompt_ids[: len(shown)] != shown:
            return None
        shown = (*call.prompt_ids, *call.token_ids)
    mask = np.zeros(len(shown), dtype=np.bool_)
    logprobs = np.zeros(len(shown), dtype=np.float32)
    versions = np.full(len(shown), -1, dtype=np.int32)
    for call in calls:
        at = slice(len(call.prompt_ids), len(call.prompt_ids) + len(call.token_ids))
        mask[at], logprobs[at], versions[at] = True, call.logprobs, call.versions
    ids = np.asarray(shown, dtype=np.int32)
    return Payload(token_ids=ids, loss_mask=mask, logprobs=logprobs, versions=versions)


def write_payload(path: Path, payload: Payload) -> None:
    """Keep a payload. Raises OSError."""
    np.savez(
        path,
        token_ids=payload.token_ids,
        loss_mask=payload.loss_mask,
        logprobs=payload.logprobs,
        versions=payload.versions,
        contexts=np.asarray(payload.contexts),
    )


def read_payload(path: Path) -> Payload:
    """Bring it back. Raises OSError."""
    with np.load(path) as file:
        arrays = dict(file)
    return Payload(**{**arrays, "contexts": tuple(arrays["contexts"].tolist())})


def logprob_gap(payload: Payload, models: Mapping[int, str], temperature: float) -> dict[str, float]:
    """Largest |recorded - recomputed| log-probability of the sampled tokens, each under the weights of its version by a
    plain forward pass over its context: "same" in contexts of one version, "mixed" in the others, absent where there
    are none.

    `models`: version -> folder of its checkpoint.
    """
    import torch

    gaps: dict[str, float] = {}
    ends = (*payload.contexts[1:], len(payload.token_ids))
    for begin, end in zip(payload.contexts, ends, strict=True):
        span = slice(begin, end)
        mask, versions = payload.loss_mask[span], payload.versions[span]
        present = sorted(set(versions[mask].tolist()))
        kind = "same" if len(present) == 1 else "mixed"
        ids = torch.as_tensor(payload.token_ids[span].astype(np.int64))[None]
        for version in present:
            at = np.flatnonzero(mask & (versions == version))
            with torch.inference_mode():
                logits = _model(models[version])(ids).logits[0].float() / temperature
            wanted = logits.log_softmax(-1)[at - 1, ids[0, at]].numpy()
            gap = float(np.abs(wanted - payload.logprobs[span][at]).max())
            gaps[kind] = max(gaps.get(kind, 0.0), gap)
    return gaps


@cache
def _model(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # a small model: threads would only wait for each other
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
