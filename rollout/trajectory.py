"""What a rollout produces: metadata for the driver, a payload for the learner, a transcript for the grader."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Status(StrEnum):
    """Terminal status of a trajectory. Those named infra_* are masked (M1.3); the others are verified as they are."""

    SUBMITTED = "submitted"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    """The budget of command time is used up."""
    INFRA_SANDBOX = "infra_sandbox"
    INFRA_ENGINE = "infra_engine"
    INFRA_VERIFIER = "infra_verifier"
    """The verifier could not run; the task's evaluation may be broken."""
    INFRA_SETUP = "infra_setup"
    """The sandbox answered, but could not be made what the task wants; the task may be broken."""
    INFRA_WORKER = "infra_worker"
    """The rollout worker died with its node or by itself, hung, or met a fault of ours."""
    INFRA_STORAGE = "infra_storage"
    """It ended, but what it left was lost from the object store."""
    INFRA_WALL = "infra_wall"
    INFRA_CANCELLED = "infra_cancelled"
    """Its task was quarantined, so it was not sampled, or not to its end. Nothing failed."""

    @property
    def masked(self) -> bool:
        """Whether the trajectory leaves the group, its statistics, its loss and every denominator."""
        return self.value.startswith("infra_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What the learner needs of one trajectory: T tokens, in one context or several. Crosses Ray's object store once.

    Contexts lie back to back. Each is a sequence of its own to the model (positions restart, nothing attends across).
    All of them are one trajectory to the loss: one advantage (M1.9), one share of the denominators (M5.2).
    """

    token_ids: npt.NDArray[np.int32]
    """[T] prompt, generated and observation tokens in order."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] true for tokens the policy generated (M1.9)."""
    logprobs: npt.NDArray[np.float32]
    """[T] log mu at sampling time for generated tokens (M5.1), 0 elsewhere."""
    versions: npt.NDArray[np.int32]
    """[T] policy version that sampled a generated token (M6.4), -1 elsewhere."""
    contexts: tuple[int, ...] = (0,)
    """Where each context begins, ascending from 0. The first token of a context is never a generated one."""

    def sha256(self) -> str:
        """Digest of all four arrays, hex; where there are several contexts, of their beginnings too."""
        digest = hashlib.sha256()
        for array in (self.token_ids, self.loss_mask, self.logprobs, self.versions):
            digest.update(np.ascontiguousarray(array).tobytes())
        if self.contexts != (0,):
            digest.update(np.asarray(self.contexts, dtype=np.int64).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One action of the policy and what came back."""

    action: str
    observation: str
    """As shown to the model (truncated); empty after the last action."""
    exit_code: int | None
    """None where no command ran (submit, unparsable action, single-turn answer) or it was killed for time."""
    duration_s: float
    response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What the grader reads of one trajectory. Goes through Ray's object store once. Written by the policy: hostile."""

    trajectory_id: str
    turns: tuple[Turn, ...]
    patch: str
    """Unified diff against the base commit; empty for tasks without a repository."""
    test_log: str
    """Output of the hidden tests, truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Metadata of one finished trajectory: all that the driver holds of it."""

    trajectory_id: str
    """ "<group_id>/<slot>.<attempt>"; the attempt counts re-sampling after infrastructure failures."""
    group_id: str
    task_id: str
    source: str
    status: Status
    reward: float | None
    """The verifier's outcome reward; None if masked."""
    passed: bool | None
    """The verifier's word; None if masked."""
    turns: int
    prompt_tokens: int
    response_tokens: int
    total_tokens: int
    policy_versions: tuple[int, ...]
    """Distinct versions that sampled its tokens, ascending."""
    payload_sha256: str | None
    engine_s: float
    """Seconds spent waiting for generation."""
    sandbox_s: float
    """Seconds spent starting sandboxes and running commands."""
    verify_s: float
    wall_s: float
    sandbox_start_s: float = 0.0
    """The part of `sandbox_s` before the first command could run; generation of the first turn runs beside it."""
    error: str | None = None
    """For masked trajectories: what was lost."""
    worker: str | None = None
    """Who ran it: the worker's process as "node:pid", or the name of the actor that was lost; None if nobody did."""
    unwritten: bool = False
    """The disk did not take its file: a resume samples it again, all else goes on (rollout/spool.py)."""
    tampered: tuple[str, ...] = ()
    """Files that decide how the code is tested and that its patch changed; put back before the tests ran."""
    contexts: int = 1
    """Contexts of its payload; more than one only where a harness did not just append (rollout/gateway)."""
    drift: int = 0
    """Calls of a harness that did not continue an earlier one: it rewrote history, or branched."""
    notes: tuple[str, ...] = ()
    """What a harness asked for and did not get, once each."""
