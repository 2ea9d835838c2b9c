"""One picklable error hierarchy, named by the boundary at which a failure happened.

A failure is data: it is attributed to exactly one boundary, recorded on the trajectory or group it hit, and counted.
"""

from __future__ import annotations

from enum import StrEnum


class Boundary(StrEnum):
    """Where a failure happened."""

    SANDBOX = "sandbox"
    ENGINE = "engine"
    VERIFIER = "verifier"
    GRADER = "grader"
    LEARNER = "learner"
    STORAGE = "storage"
    CONFIG = "config"
    DRIVER = "driver"


class GagarError(Exception):
    """Base of all errors raised by this project. `str(error)` is the message a user should read."""

    boundary: Boundary = Boundary.DRIVER

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SandboxError(GagarError):
    """A sandbox could not be started, was lost, or did not answer (never: a command that failed)."""

    boundary = Boundary.SANDBOX


class EngineError(GagarError):
    """An inference engine was lost or refused a request."""

    boundary = Boundary.ENGINE


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


class ConfigError(GagarError):
    """A configuration that cannot run. The message names file, key path, value and remedy."""

    boundary = Boundary.CONFIG
