"""The root of the error hierarchy and the error of configurations; the other boundaries' errors are in `infra.errors`.

It lies here because a package imports only what stands to its right, and `configs` stands rightmost.
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
    WORKER = "worker"
    NETWORK = "network"
    CONFIG = "config"
    DRIVER = "driver"


class GagarError(Exception):
    """Base of all errors raised by this project. `str(error)` is the message a user should read."""

    boundary: Boundary = Boundary.DRIVER
    exit_code: int = 1
    """Of a command that ends with this error."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(GagarError):
    """A configuration that cannot run. The message names file, key path, value and remedy."""

    boundary = Boundary.CONFIG
    exit_code = 2
