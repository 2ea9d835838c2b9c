"""`gagar export`: the policy of a checkpoint as a folder of its own, which transformers and vLLM load. A copy of files
that were held against the checkpoint's manifest: no torch, and no run that has to stand still."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from configs.errors import ConfigError
from configs.models import missing_files
from infra.errors import StorageError
from orchestrator.manifest import MANIFEST, FileFacts, read_manifest, sync, verify

POLICY = "policy"
_PIECE_BYTES = 2**22


def export_policy(source: Path, out: Path, *, step: int | None, force: bool, say: Callable[[str], None]) -> Path:
    """Copy the policy of a checkpoint, or of a run's newest one that is whole, or of that of `step`, to `out`; returns
    the checkpoint. `out` appears under its name only when all of it is on the disk; `say` is told of checkpoints that
    are passed over.

    Raises:
        ConfigError: `source` is neither, has no such step, or `out` is there already and `force` is not given or
            would replace a run, a checkpoint, or what is no folder.
        StorageError: a file is not as it was written, or `out` cannot be written.
    """
    out = Path(os.path.abspath(out))
    if out.exists() or out.is_symlink():
        if not force:
            raise ConfigError(f"{out}: is there already; give another folder, or --force to replace it")
        if not _replaceable(out, source):
            raise ConfigError(
                f"{out}: cannot be replaced (a link, no folder, a run, part of a checkpoint, or what is to be exported "
                "lies in it); give another"
            )
    checkpoint = _find(source, step, say)
    part = out.with_name(f".{out.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name, facts in read_manifest(checkpoint).items():
            folder, _, inside = name.partition("/")
            if folder == POLICY:
                _copy(checkpoint / name, part / inside, facts)
        for path in [*(p for p in part.rglob("*") if p.is_dir()), part]:
            sync(path)
        if out.exists():
            shutil.rmtree(out)
        part.rename(out)
        sync(out.parent)
    except OSError as e:
        shutil.rmtree(part, ignore_errors=True)
        raise StorageError(f"{out}: cannot be written ({e}); free space or give another folder") from e
    except StorageError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return checkpoint


def checked_policy(folder: Path) -> Path | None:
    """The Hugging Face folder that `folder` is, or holds as a checkpoint's policy; None if neither.

    Raises:
        StorageError: it is that of a checkpoint, and a file of it is not as it was written.
    """
    for policy, checkpoint in ((folder / POLICY, folder), (folder, folder.absolute().parent)):
        is_policy = policy.absolute().name == POLICY and _is_checkpoint(checkpoint)
        if policy.is_dir() and is_policy:
            verify(checkpoint, under=POLICY)
        if policy.is_dir() and not missing_files(policy):
            return policy.absolute()
    return None


def _find(source: Path, step: int | None, say: Callable[[str], None]) -> Path:
    """The checkpoint that is meant, its policy verified."""
    if _is_checkpoint(source):
        if step is not None:
            raise ConfigError(f"--step {step}: {source} is a checkpoint already; give it without --step, or the run")
        verify(source, under=POLICY)
        return source
    found = sorted(
        (p for p in (source / "checkpoints").glob("step-*") if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:])
    )
    if not found:
        raise ConfigError(
            f"{source}: neither a run with checkpoints nor a checkpoint; give runs/NAME or runs/NAME/checkpoints/step-N"
        )
    if step is not None:
        chosen = [p for p in found if int(p.name[5:]) == step]
        if not chosen:
            there = ", ".join(str(int(p.name[5:])) for p in found)
            raise ConfigError(f"--step {step}: {source} has no such checkpoint; it has those of steps {there}")
        verify(chosen[0], under=POLICY)
        return chosen[0]
    for path in reversed(found):
        try:
            verify(path, under=POLICY)
        except StorageError as e:
            say(f"checkpoint {path.name} is refused: {e}")
        else:
            return path
    raise StorageError(f"{source}: no checkpoint of this run can be used; the messages above name what is damaged")


def _replaceable(out: Path, source: Path) -> bool:
    if out.is_symlink() or not out.is_dir() or out.resolve() in (p.resolve() for p in (source, *source.parents)):
        return False
    return not (out / "checkpoints").exists() and not any(_is_checkpoint(folder) for folder in (out, out.parent))


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in (MANIFEST, "state.json"))


def _copy(source: Path, target: Path, facts: FileFacts) -> None:
    """Copy one file in pieces; what arrives is what the manifest says, whatever happens to the source meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as reading, target.open("xb") as writing:
        while piece := reading.read(_PIECE_BYTES):
            digest.update(piece)
            writing.write(piece)
        writing.flush()
        os.fsync(writing.fileno())
    if digest.hexdigest() != facts.sha256:
        raise StorageError(f"{source}: its content is not what was written (SHA-256 differs); use another checkpoint")
