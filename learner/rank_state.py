"""What a rank keeps beside the weights and DeepSpeed's own state, and how a disk that takes nothing is told apart."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import StorageError

_ERRNOS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
}
# torch's and safetensors' writers give no number, or only in their text.
_TEXTS = re.compile(
    r"No space left|Read-only file system|Disk quota|Input/output error|File too large|file write failed|unexpected pos"
    r"|\bos error (5|13|27|28|30|122)\b"
)


@contextmanager
def on_disk(folder: str) -> Iterator[None]:
    """Raises StorageError for what the disk did, and lets everything else through."""
    try:
        yield
    except Exception as error:
        if not _is_of_disk(error):
            raise
        raise StorageError(f"{folder}: cannot be written ({type(error).__name__}: {error}); free space") from error


def _is_of_disk(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _ERRNOS:
            return True
        if _TEXTS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__  # a writer that fails again while it closes hides the first error
    return False


def save_rng(folder: str, rank: int, *, cuda: bool) -> None:
    """Where the rank's random numbers stand: a model with dropout draws from them."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    torch.save(states, _rng_file(folder, rank))


def load_rng(folder: str, rank: int, *, cuda: bool) -> None:
    """Go on from there. A folder without it, of an earlier version, leaves them as they are."""
    import torch

    path = _rng_file(folder, rank)
    if not path.is_file():
        return
    states = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if cuda and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _rng_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rng-{rank}.pt"
