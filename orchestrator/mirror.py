"""Copies of checkpoints in shared or object storage, so that a run goes on where its folder is gone.

MIRROR/NAME/step-000010/    files of the checkpoint
                  /run/     what else a resume needs: the logs as long as the checkpoint says, the ledger
                  /manifest.json, written last: a copy without it does not count, and is removed by the next one

Any URL that fsspec knows will do: file://, s3://, gs://, az://, memory:// in tests. A copy is made beside the training,
one at a time; the run's own folder stays what a resume looks at first.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from infra.errors import ConfigError, StorageError
from orchestrator.checkpoint import LOGS, STATE, open_checkpoint
from orchestrator.manifest import MANIFEST, read_manifest
from orchestrator.runfiles import CONFIG, LEDGER, QUARANTINE

RUN = "run"
AT_ONCE = 4
"""Files that are copied at once."""
FIRST_WAIT_S, LAST_WAIT_S = 5.0, 300.0
_NAME = re.compile(r"step-(\d+)")


class Mirror:
    """The copies of one run's checkpoints. Its methods block; `follow` and `settle` are for the driver's loop."""

    def __init__(self, url: str, name: str, *, keep: int, say: Callable[[str], None] = lambda _: None) -> None:
        """Args:
        url: parent folder of all runs' copies; `name`: of the run.
        keep: newest copies that stay.

        Raises ConfigError for a URL that nothing installed can open.
        """
        from fsspec.core import url_to_fs

        self._url = f"{url.rstrip('/')}/{name}"
        try:
            fs, root = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"checkpoint.mirror={url}: cannot be opened ({error}); install what it names (pip install s3fs for "
                "s3://, gcsfs for gs://, adlfs for az://), or give file:///a/shared/folder"
            ) from error
        self._fs: Any = fs
        self._root = str(root)
        self._keep = keep
        self._say = say
        self._copying: asyncio.Task[None] | None = None

    # ---- in the driver's loop --------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Until the copy that is being made is whole: only then may the checkpoint be removed."""
        if self._copying is not None:
            await self._copying
            self._copying = None

    async def follow(self, path: Path, run_dir: Path) -> None:
        """Begin to copy a checkpoint. Ends at once, or when the one before is whole."""
        await self.settle()
        self._copying = asyncio.create_task(self._insist(path, run_dir), name="mirror")

    async def _insist(self, path: Path, run_dir: Path) -> None:
        """Again and again: the training waits for this one when it has written the next."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                await asyncio.to_thread(self.upload, path, run_dir)
            except StorageError as error:
                self._say(f"{error}; trying again in {wait_s:.0f} s, and the next checkpoint waits for it")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_WAIT_S)
            else:
                return

    async def finish(self, limit_s: float) -> None:
        """The end of a run: until the last copy is whole. Raises StorageError if that takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self.settle()
        except TimeoutError:
            raise StorageError(
                f"{self._url}: the last checkpoint could not be copied within {limit_s:g} s; it is whole in the run's "
                "folder"
            ) from None

    # ---- copies ---------------------------------------------------------------------------------------------

    def upload(self, path: Path, run_dir: Path) -> None:
        """Copy a checkpoint that is whole, then remove what is older than the newest `keep`. Raises StorageError."""
        files = read_manifest(path)
        target = f"{self._root}/{path.name}"
        with self._named(f"{self._url}/{path.name}", "written"), tempfile.TemporaryDirectory(prefix="gagar-") as folder:
            self._remove(target)  # half of an earlier try
            pairs = [(path / name, f"{target}/{name}") for name in files]
            state = json.loads((path / STATE).read_bytes())
            pairs += [(file, f"{target}/{RUN}/{file.name}") for file in _run_files(run_dir, Path(folder), state)]
            self._each(pairs, self._put)
            self._put((path / MANIFEST, f"{target}/{MANIFEST}"))
            steps = self._steps()
            newest = _step(path.name)
            kept = [step for step in steps if step <= newest]  # larger ones are of another history
            for step in steps:
                if step > newest or step not in kept[-self._keep :]:
                    self._remove(f"{self._root}/step-{step:06d}")

    def restore(self, run_dir: Path) -> int | None:
        """Put the newest whole copy into a run's folder, with logs and ledger as they were then; its step, or None
        where there is none. Raises StorageError where there are some and none can be used."""
        refused: list[str] = []
        with self._named(self._url, "read"):
            steps = self._steps()
        for step in reversed(steps):
            try:
                self._fetch(step, run_dir)
            except StorageError as error:
                refused.append(str(error))
                self._say(f"the copy of checkpoint {step} is refused: {error}")
                continue
            self._say(f"checkpoint {step} was brought back from {self._url}")
            return step
        if refused:
            raise StorageError(f"{self._url}: no copy of a checkpoint can be used ({refused[0]})")
        return None

    def set_aside(self) -> str | None:
        """Before a new run of this name: keep the copies of the earlier one under another name, which is returned; None
        where there are none. Raises StorageError."""
        with self._named(self._url, "moved"):
            if not self._fs.exists(self._root) or not self._fs.ls(self._root, detail=False):
                return None
            aside = f"{self._root}.{datetime.now().strftime('%Y%m%d-%H%M%S')}"
            self._fs.mv(self._root, aside, recursive=True)
            self._fs.invalidate_cache()
            return aside

    def _fetch(self, step: int, run_dir: Path) -> None:
        name = f"step-{step:06d}"
        source, part = f"{self._root}/{name}", run_dir / "checkpoints" / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            with self._named(f"{self._url}/{name}", "read"):
                self._get((f"{source}/{MANIFEST}", part / MANIFEST))
                self._each([(f"{source}/{file}", part / file) for file in read_manifest(part)], self._get)
            open_checkpoint(part)  # holds all of it against the manifest
            with self._named(f"{self._url}/{name}/{RUN}", "read"):
                for file in (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm"):
                    (run_dir / file).unlink(missing_ok=True)  # parts of two would not fit together
                for place in self._fs.ls(f"{source}/{RUN}", detail=False):
                    self._get((place, run_dir / place.rsplit("/", 1)[-1]))
            final = part.with_name(name)
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _steps(self) -> list[int]:
        """Steps of the whole copies, ascending."""
        self._fs.invalidate_cache()
        found = []
        for place in self._fs.ls(self._root, detail=False) if self._fs.exists(self._root) else ():
            name = place.rstrip("/").rsplit("/", 1)[-1]
            if _NAME.fullmatch(name) and self._fs.exists(f"{self._root}/{name}/{MANIFEST}"):
                found.append(_step(name))
        return sorted(found)

    def _remove(self, target: str) -> None:
        if self._fs.exists(f"{target}/{MANIFEST}"):
            self._fs.rm_file(f"{target}/{MANIFEST}")  # first: half of it must not count
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)

    def _put(self, pair: tuple[Path, str]) -> None:
        file, target = pair
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(file), target)

    def _get(self, pair: tuple[str, Path]) -> None:
        source, file = pair
        file.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(source, str(file))

    def _each(self, pairs: Iterable[tuple[Any, Any]], copy: Callable[[Any], None]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as copies:
            list(copies.map(copy, pairs))

    @contextmanager
    def _named(self, place: str, what: str) -> Iterator[None]:
        """Every file system has errors of its own, and all of them are the storage's."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{place}: cannot be {what} ({type(error).__name__}: {error})") from error


def make_mirror(config: RunConfig, *, say: Callable[[str], None]) -> Mirror | None:
    """What `checkpoint.mirror` names. Raises ConfigError."""
    about = config.checkpoint
    return None if about.mirror is None else Mirror(about.mirror, config.name, keep=about.keep, say=say)


def _run_files(run_dir: Path, folder: Path, state: Mapping[str, Any]) -> Iterator[Path]:
    """Copies in `folder` of what a resume needs beside the checkpoint, as of the moment of its state."""
    sizes = {name: int(state["logs"].get(name, 0)) for name in LOGS}
    for name in (*LOGS, QUARANTINE, CONFIG):
        if (run_dir / name).is_file():
            with (run_dir / name).open("rb") as source, (folder / name).open("wb") as target:
                left = sizes.get(name)
                while chunk := source.read(2**20 if left is None else min(2**20, left)):
                    target.write(chunk)
                    left = None if left is None else left - len(chunk)
            yield folder / name
    if (run_dir / LEDGER).is_file():
        with (
            closing(sqlite3.connect(run_dir / LEDGER)) as ledger,
            closing(sqlite3.connect(folder / LEDGER)) as copy,
        ):
            ledger.backup(copy)
        yield folder / LEDGER


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
