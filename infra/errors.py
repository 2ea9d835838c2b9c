"""One picklable error hierarchy, named by the boundary at which a failure happened.

A failure is data: it is attributed to exactly one boundary, recorded on the trajectory or group it hit, and counted.
"""

from __future__ import annotations

from typing import TypeVar

from configs.errors import Boundary, ConfigError, GagarError

E = TypeVar("E", bound=GagarError)

__all__ = [
    "Boundary",
    "BusyError",
    "ConfigError",
    "EngineError",
    "GagarError",
    "GraderError",
    "HarnessError",
    "ImageError",
    "LearnerError",
    "SandboxError",
    "StorageError",
    "VerifierError",
    "WorkspaceError",
    "first_error",
]


def first_error(group: BaseExceptionGroup[BaseException], kind: type[E]) -> E | None:
    """The first error of a kind in nested groups, as loops that fail together raise them; None if there is none."""
    for error in group.exceptions:
        found = first_error(error, kind) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, kind):
            return found
    return None


class SandboxError(GagarError):
    """A sandbox could not be started, was lost, or did not answer (never: a command that failed)."""

    boundary = Boundary.SANDBOX


class WorkspaceError(SandboxError):
    """A sandbox that answers could not be made what the task wants: the task or the sandbox is at fault."""


class ImageError(WorkspaceError):
    """The image that a sandbox should be made of does not exist, or may not be had: asking again gives the same."""


class BusyError(SandboxError):
    """No sandbox could be had now, for want of room or of an answer in time: asking again may give one."""


class EngineError(GagarError):
    """An inference engine was lost or refused a request."""

    boundary = Boundary.ENGINE


class HarnessError(GagarError):
    """A harness that is not ours failed by itself (never: one that gave up, or whose budget was used up)."""

    boundary = Boundary.WORKER


class VerifierError(GagarError):
    """The verifier could not run (never: tests that failed)."""

    boundary = Boundary.VERIFIER


class GraderError(GagarError):
    """No verdict could be had from the grader's model (never: a verdict that is invalid)."""

    boundary = Boundary.GRADER


class LearnerError(GagarError):
    """A learner rank was lost, or a step could not be completed."""

    boundary = Boundary.LEARNER


class StorageError(GagarError):
    """A run folder, checkpoint or object could not be read or written."""

    boundary = Boundary.STORAGE
