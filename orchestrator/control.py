"""How a command reaches a running driver: two small files in the run's folder, each replaced in one piece.

`control.json` holds the last request; the driver looks every second and answers in `control.answer.json`. There is no
socket: who may write the folder may scale the run.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.errors import StorageError
from infra.scrub import scrub

REQUEST = "control.json"
ANSWER = "control.answer.json"

AnswerState = Literal["working", "done", "failed", "refused", "superseded"]
M = TypeVar("M", bound=BaseModel)


class ScaleRequest(BaseModel):
    """What is asked of the driver."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    sizes: dict[str, int]
    """Pool -> actors."""
    drain_s: float | None = None
    """What drained workers get to finish; None: as configured."""
    asked_unix_s: float


class PoolAnswer(BaseModel):
    """One pool of the request; sizes in actors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    was: int
    target: int
    live: int
    starting: int
    draining: int
    handed_back: int
    """Calls that drained workers have given back because of this request."""


class ScaleAnswer(BaseModel):
    """Where the driver stands with a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    state: AnswerState
    text: str = ""
    """Why it was refused, or what stands in the way."""
    pools: dict[str, PoolAnswer] = {}
    effect_s: float = 0.0
    """Seconds since the driver read the request; of a finished one, until its effect."""


def ask(run_dir: Path, sizes: dict[str, int], drain_s: float | None) -> ScaleRequest:
    """Leave a request. Raises StorageError."""
    request = ScaleRequest(id=secrets.token_hex(4), sizes=sizes, drain_s=drain_s, asked_unix_s=time.time())
    write(run_dir / REQUEST, request)
    return request


def clear(run_dir: Path) -> None:
    """Forget what an earlier session of the run was asked. Raises StorageError."""
    for name in (REQUEST, ANSWER):
        try:
            (run_dir / name).unlink(missing_ok=True)
        except OSError as e:
            raise StorageError(f"{run_dir / name}: cannot be removed ({e})") from e


def write(path: Path, message: BaseModel) -> None:
    """Replace a file in one piece. Raises StorageError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(scrub(message.model_dump_json()), encoding="utf-8")
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e})") from e


def read(path: Path, kind: type[M]) -> M | None:
    """The message; None if there is none. Raises StorageError where it is none of ours."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        return kind.model_validate(raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as e:
        raise StorageError(f"{path}: cannot be read ({e}); remove it, and ask again with `gagar scale`") from e
