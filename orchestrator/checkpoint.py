"""Checkpoints of a run: complete or absent, never half written, and held against what was written before one is used.

A checkpoint is a folder `checkpoints/step-000010/` with the learner's state (`learner/`), the policy as an HF folder
(`policy/`), `state.json` (counters, mixer, sizes of the append-only logs) and `manifest.json` (size and SHA-256 of all
of these). It is written under a temporary name and renamed when everything is on disk.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from infra.errors import StorageError
from infra.storage import Storage
from learner.group import LearnerGroup
from orchestrator.manifest import read_manifest, sync, verify, write_manifest

LOGS = ("metrics.jsonl", "groups.jsonl", "spans.jsonl", "eval.jsonl", "canaries.jsonl")
"""Append-only files of a run that a resume cuts back to where they were at the checkpoint."""
STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")
_ASIDE = ".broken"


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


class Copies(Protocol):
    """Makes copies of checkpoints elsewhere, beside what the caller does (orchestrator/mirror.py)."""

    async def settle(self) -> None:
        """Until the copy that is being made is whole: only then may its checkpoint be removed."""
        ...

    async def follow(self, path: Path, run_dir: Path) -> None:
        """Begin to copy a checkpoint that is whole."""
        ...


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        storage: Storage | None = None,
        in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
        copies: Copies | None = None,
    ) -> None:
        """`storage`: waits there while the disk takes nothing; None: fails at once. `in_thread` runs what reads and
        writes; a loop with a virtual clock has no threads. `copies`: told of every checkpoint that is whole."""
        self._run_dir = run_dir
        self._root = run_dir / "checkpoints"
        self._keep = keep
        self._storage = storage
        self._in_thread = in_thread
        self._copies = copies

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
        before the checkpoint counts as complete. What a full disk interrupts is removed and written again.

        Raises:
            StorageError: it could not be written; earlier checkpoints are untouched.
        """
        logs = log_sizes(self._run_dir)
        text = json.dumps({**state, "step": step, "logs": logs}, indent=1)
        final = self._root / f"step-{step:06d}"
        if self._copies is not None:
            await self._copies.settle()

        async def attempt() -> None:
            part = self._root / f".step-{step:06d}.part"
            try:
                await self._in_thread(self._begin, part)
                await learner.save(part / "learner")
                await learner.export_hf(part / "policy")
                await self._in_thread(_complete, part, text)
                if before is not None:
                    await before()
                await self._in_thread(self._take_over, part, final)
            except (OSError, StorageError):
                await self._in_thread(shutil.rmtree, part, True)  # the space that others wait for
                raise

        if self._storage is not None:
            await self._storage.insist_async(final, attempt)
        else:
            try:
                await attempt()
            except OSError as e:
                raise StorageError(f"{final}: checkpoint not written ({e}); free space and resume the run") from e
        if self._copies is not None:
            await self._copies.follow(final, self._run_dir)
        return final

    def latest(self, *, say: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
        """The newest checkpoint that is as it was written, or None where there is none at all; `say` is told of every
        newer one that is not. Reads all of it.

        Raises:
            StorageError: there are checkpoints, and none of them can be used.
        """
        refused: list[str] = []
        for path in reversed(self._steps()):
            try:
                found = open_checkpoint(path)
            except StorageError as e:
                refused.append(str(e))
                say(f"checkpoint {path.name} is refused: {e}")
                continue
            if refused:
                say(f"going back to checkpoint {path.name}, the newest that is whole")
            return found
        if refused:
            raise StorageError(
                f"{self._root}: no checkpoint can be used ({refused[0]}{_more(refused)}); restore one from a copy, or "
                "start the run again without --resume (its folder is kept under another name)"
            )
        return None

    def set_aside(self, newest: int) -> None:
        """Rename the checkpoints after step `newest`: they were refused, and are not to be counted among those that
        are kept. The next ones that are written remove them. What a killed process left half written goes at once.
        Raises OSError."""
        for part in self._root.glob(".step-*.part"):
            shutil.rmtree(part, ignore_errors=True)
        for path in self._steps():
            if _step(path) > newest:
                aside = path.with_name(f"{path.name}{_ASIDE}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def oldest_mark(self) -> int:
        """The ledger's mark in the oldest checkpoint on disk: a resume may go back to there, so only what ended before
        it can be forgotten. 0 if there is none or it cannot be read: then nothing can."""
        for path in self._steps():
            try:
                return int(json.loads((path / STATE).read_bytes())["ledger"] or 0)
            except (OSError, ValueError, KeyError, TypeError):
                return 0
        return 0

    def _steps(self) -> Sequence[Path]:
        return sorted((p for p in self._root.glob("step-*") if _NAME.fullmatch(p.name)), key=_step)

    def _begin(self, part: Path) -> None:
        """An empty folder, and room for what the last checkpoint took: ranks that meet a full disk in the middle of
        their common work cannot always go on."""
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if done := self._steps():
            try:
                needed = sum(facts.bytes for facts in read_manifest(done[-1]).values())
            except StorageError:
                return
            free = shutil.disk_usage(part).free
            if free < needed:
                raise StorageError(
                    f"{part}: a checkpoint takes {needed / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free; free "
                    "space, or set checkpoint.keep lower"
                )

    def _take_over(self, part: Path, final: Path) -> None:
        """The new one gets its name; only then older ones go."""
        aside = final.with_name(f"{final.name}{_ASIDE}")
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        part.rename(final)
        sync(self._root)
        steps = self._steps()
        newer = [p for p in steps if _step(p) > _step(final)]  # of another history than this run
        kept = [p for p in steps if p not in newer]
        for old in [*kept[: -self._keep], *newer, *self._root.glob(f"step-*{_ASIDE}")]:
            going = old.with_name(f".{old.name}.part")  # half of it must not stand under a name of whole ones
            shutil.rmtree(going, ignore_errors=True)
            old.rename(going)
            shutil.rmtree(going, ignore_errors=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, after every file of it was held against its manifest. Reads all of it.

    Raises:
        StorageError: names the file that is not as it was written.
    """
    verify(path)
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Checkpoint(path=path, step=int(state["step"]), state=state)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StorageError(f"{path / STATE}: unreadable ({type(e).__name__}: {e}); use another checkpoint") from e


def _complete(part: Path, state: str) -> None:
    (part / STATE).write_text(state, encoding="utf-8")
    write_manifest(part)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _more(refused: Sequence[str]) -> str:
    return f", and {len(refused) - 1} more" if len(refused) > 1 else ""
