"""Checkpoints of a run: complete or absent, never half written.

A checkpoint is a folder `checkpoints/step-000010/` with the learner's state (`learner/`), the policy as an HF folder
(`policy/`) and `state.json` (counters, mixer, sizes of the append-only logs). It is written under a temporary name and
renamed when everything is on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import StorageError
from learner.group import LearnerGroup

LOGS = ("metrics.jsonl", "groups.jsonl", "spans.jsonl", "eval.jsonl", "canaries.jsonl")
"""Append-only files of a run that a resume cuts back to where they were at the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: Mapping[str, Any]

    @property
    def learner(self) -> Path:
        return self.path / "learner"

    @property
    def policy(self) -> Path:
        """HF folder that transformers and vLLM load."""
        return self.path / "policy"


def log_sizes(run_dir: Path) -> dict[str, int]:
    """Bytes of each append-only log now."""
    return {name: (run_dir / name).stat().st_size for name in LOGS if (run_dir / name).exists()}


def cut_logs(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cut the logs back to recorded sizes, so that what a resumed run repeats is not in them twice."""
    for name in LOGS:
        path = run_dir / name
        if path.exists():
            with path.open("r+b") as file:
                # A log that lost its end with the machine's power must not be filled up with zeros.
                file.truncate(min(sizes.get(name, 0), path.stat().st_size))


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._run_dir = run_dir
        self._root = run_dir / "checkpoints"
        self._keep = keep

    async def save(
        self,
        step: int,
        learner: LearnerGroup,
        state: Mapping[str, Any],
        *,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> Path:
        """Write the checkpoint after optimiser step `step`, then prune the oldest.

        The logs are measured before the first wait, so `state` and what a resume keeps of them are of one moment: a
        group that ends while the weights are written is in neither, and ends again after a resume. `before` is awaited
        before the checkpoint counts as complete.

        Raises:
            StorageError: it could not be written; earlier checkpoints are untouched.
        """
        final = self._root / f"step-{step:06d}"
        part = self._root / f".step-{step:06d}.part"
        try:
            logs = log_sizes(self._run_dir)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            await learner.save(part / "learner")
            await learner.export_hf(part / "policy")
            text = json.dumps({**state, "step": step, "logs": logs}, indent=1)
            (part / "state.json").write_text(text, encoding="utf-8")
            _sync_tree(part)
            if before is not None:
                await before()
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            _sync(self._root)
        except OSError as e:
            raise StorageError(f"{final}: checkpoint not written ({e}); free space and resume the run") from e
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None.

        Raises:
            StorageError: its state cannot be read.
        """
        complete = self._complete()
        if not complete:
            return None
        path = complete[-1]
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise StorageError(
                f"{path}/state.json: unreadable ({e}); remove this checkpoint to use the one before"
            ) from e
        return Checkpoint(path=path, step=int(state["step"]), state=state)

    def _complete(self) -> Sequence[Path]:
        return sorted(p for p in self._root.glob("step-*") if (p / "state.json").exists())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _sync(path)
