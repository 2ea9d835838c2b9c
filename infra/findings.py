"""What `gagar doctor` found: data, for the console and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    detail: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""
