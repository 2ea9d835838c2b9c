"""A batch's payloads on their way to the ranks: fetched before the step, so that a lost one costs its group alone.

    references of a rank's share -> [Ray fetches all of them] -> `hold` keeps them on the rank -> the step
        |  one was lost with its node: `hold_what_is_left` looks at each
        one that is gone -> the file that its rollout worker wrote (rollout/spool.py) -> held too
                            |  no file, or nobody can read it: its trajectory is reported, and no rank has begun

Nothing here is collective: a rank that would miss a payload in the middle of a step would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import LearnerError, StorageError
from rollout.spool import read_rollout
from rollout.trajectory import Payload

if TYPE_CHECKING:
    from learner.rank import RankCore


class PayloadsLost(LearnerError):
    """Payloads of the batch are gone. No rank has begun the step: it can be done with other groups."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        """`reasons`: trajectory id -> what became of its payload."""
        super().__init__(
            f"the payloads of {len(reasons)} trajectories are gone; the first: {next(iter(reasons.items()))}"
        )
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reasons,)


def hold(core: RankCore, *payloads: Payload) -> None:
    """Runs on a rank, once Ray has fetched every argument: keeps them for the step."""
    core.payloads = payloads


def hold_what_is_left(core: RankCore, payloads: Sequence[Any], files: Sequence[Path | None]) -> dict[int, str]:
    """Runs on a rank: keeps the payloads if every one that is gone can be read from its file; else none, and returns
    which are gone for good, by position, and why."""
    import ray
    from ray.exceptions import ObjectLostError

    held: list[Payload] = []
    gone: dict[int, str] = {}
    for index, (payload, file) in enumerate(zip(payloads, files, strict=True)):
        try:
            held.append(ray.get(payload) if isinstance(payload, ray.ObjectRef) else payload)
        except ObjectLostError as error:
            try:
                held.append(_read(file))
            except StorageError as why:
                gone[index] = f"payload lost with its node ({type(error).__name__}); {why.message}"
    core.payloads = () if gone else tuple(held)
    return gone


def _read(file: Path | None) -> Payload:
    if file is None:
        raise StorageError("no rollouts are kept (checkpoint.rollouts)")
    return read_rollout(file)[1]


def is_loss(error: BaseException) -> bool:
    """Whether Ray says that an argument of a call is gone."""
    from ray.exceptions import ObjectLostError, RayTaskError

    return isinstance(error.cause if isinstance(error, RayTaskError) else error, ObjectLostError)
