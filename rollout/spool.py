"""Finished rollouts on disk, written by the worker that made them, so that they outlive the driver.

    rollouts/<group_id>/<slot>.<attempt>.npz    the payload's arrays, and metadata and transcript as JSON

A file appears under its name only when it is whole. It is gone once a checkpoint covers the end of its group.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from infra.errors import StorageError
from rollout.trajectory import Payload, Trajectory, Transcript

_TRAJECTORY = TypeAdapter(Trajectory)
_TRANSCRIPT = TypeAdapter(Transcript)
_ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions")


def group_folder(folder: Path, group_id: str) -> Path:
    """Where the rollouts of a group are kept."""
    return folder / quote(group_id, safe="", errors="surrogatepass")


def rollout_file(folder: Path, group_id: str, trajectory_id: str) -> Path:
    """Where one finished rollout is kept."""
    return group_folder(folder, group_id) / f"{trajectory_id.rpartition('/')[2]}.npz"


def write_rollout(folder: Path, trajectory: Trajectory, payload: Payload, transcript: Transcript) -> Path:
    """Keep one finished rollout.

    Raises:
        StorageError: it could not be written.
    """
    path = rollout_file(folder, trajectory.group_id, trajectory.trajectory_id)
    part = path.with_name(f".{path.name}.part")
    arrays = {name: getattr(payload, name) for name in _ARRAYS}
    if len(payload.contexts) > 1:
        arrays["contexts"] = np.asarray(payload.contexts, dtype=np.int64)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(
                file,
                **arrays,
                trajectory=_text(_TRAJECTORY.dump_python(trajectory, mode="json")),
                transcript=_text(_TRANSCRIPT.dump_python(transcript, mode="json")),
            )
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space, or set checkpoint.rollouts to false") from e
    return path


def read_rollout(path: Path) -> tuple[Trajectory, Payload, Transcript]:
    """Bring one back.

    Raises:
        StorageError: it is missing, damaged, or not what was sampled (its digest differs).
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            contexts = tuple(file["contexts"].tolist()) if "contexts" in file else (0,)
            payload = Payload(**{name: file[name] for name in _ARRAYS}, contexts=contexts)
            trajectory = _TRAJECTORY.validate_python(json.loads(file["trajectory"].tobytes()))
            transcript = _TRANSCRIPT.validate_python(json.loads(file["transcript"].tobytes()))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, ValidationError) as e:
        raise StorageError(f"{path}: not a kept rollout ({type(e).__name__}: {e})") from e
    if trajectory.payload_sha256 != payload.sha256():
        raise StorageError(f"{path}: its tokens are not those that were sampled")
    return trajectory, payload, transcript


def kept_slots(folder: Path, group_id: str) -> dict[int, Path]:
    """Slot -> the file of its last attempt, of one group."""
    found: dict[int, tuple[int, Path]] = {}
    for path in group_folder(folder, group_id).glob("*.npz"):
        slot, _, attempt = path.stem.partition(".")
        if slot.isdigit() and attempt.isdigit():
            found[int(slot)] = max(found.get(int(slot), (-1, path)), (int(attempt), path))
    return {slot: path for slot, (_, path) in found.items()}


def _text(value: Any) -> npt.NDArray[np.uint8]:
    # The policy's text may hold lone surrogates; JSON's escapes carry them, UTF-8 would not.
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode("ascii"), dtype=np.uint8)
