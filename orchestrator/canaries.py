"""When a canary is graded, and what is written down about it: `canaries.jsonl`, one line each.

Canaries are in no ledger, no batch and not in groups.jsonl. A resumed run goes on with the number after the last one
in the file.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import AdvantageMode, CanaryConfig, RubricConfig, RunConfig
from grader.canary import Canary, SupplyCanary, builtin_canaries, canary_record, stored_canaries
from grader.exchange import GradeReply
from grader.verdict import FallbackReason
from infra.errors import StorageError
from infra.sinks import JsonlFile
from infra.storage import Storage
from orchestrator.runfiles import CANARIES, read_jsonl


class Canaries:
    """Lets `share` of the gradings be canaries: each group sent to a grader is credited with share / (1 - share)."""

    def __init__(
        self,
        config: CanaryConfig,
        supply: SupplyCanary,
        log: JsonlFile,
        rubric: RubricConfig,
        *,
        past: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`past`: the lines that are in the log already."""
        self.past = tuple(past)
        self._share = config.share
        self._supply = supply
        self._log = log
        self._rubric = rubric
        self._next = max((line["canary"] for line in past), default=-1) + 1
        self._credit = 0.0
        self._running = 0

    def at_once(self, slots: int) -> int:
        """Most canaries that wait for a slot or hold one: their share of the slots, at least one."""
        return max(1, int(self._share * slots))

    def due(self, at_once: int) -> bool:
        """Whether a canary goes after the group that was just sent; then `take` must follow.

        While canaries are slow, no more than two are saved up: what real groups lose to them stays bounded.
        """
        self._credit = min(self._credit + self._share / (1.0 - self._share), 2.0)
        if self._credit < 1.0 - 1e-9 or self._running >= at_once:
            return False
        self._credit -= 1.0
        self._running += 1
        return True

    async def take(self) -> Canary:
        """The next one, made in a thread: the event loop goes on meanwhile."""
        number = self._next
        self._next += 1
        return Canary(number=number, group=await asyncio.to_thread(self._supply, number))

    def record(self, canary: Canary, reply: GradeReply, step: int) -> dict[str, Any]:
        """It was graded: write and return its line.

        Raises:
            StorageError: the log cannot be written.
        """
        self._running -= 1
        line = canary_record(canary, reply, step=step, rubric=self._rubric)
        self._log.append(line)
        return line


def read_past(path: Path) -> list[dict[str, Any]]:
    """The lines of canaries.jsonl of a run that goes on.

    Raises:
        StorageError: one of them says something else than `canary_record` does.
    """
    lines = read_jsonl(path)
    for number, line in enumerate(lines, 1):
        numbers = [line.get("tier_agreement"), line.get("kendall_tau_b")]
        if not (
            type(line.get("canary")) is int
            and line.get("fallback_reason") in (None, *FallbackReason)
            and all(value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in numbers)
            and {"fallback_reason", "tier_agreement", "kendall_tau_b"} <= line.keys()
        ):
            raise StorageError(f"{path}:{number}: no line about a canary; remove it to go on without what it said")
    return lines


def make_canaries(config: RunConfig, run_dir: Path, storage: Storage | None = None) -> Canaries | None:
    """The canaries of a run, continued where canaries.jsonl ends; None if it grades none.

    Raises:
        StorageError: grader.canaries.path holds no labelled group, or a file cannot be read.
    """
    grader, rubric = config.grader, config.algorithm.rubric
    if grader is None or grader.canaries.share == 0.0 or config.algorithm.mode is AdvantageMode.OUTCOME:
        return None
    path = grader.canaries.path
    supply = builtin_canaries(config.seed, rubric) if path is None else stored_canaries(Path(path))
    past = read_past(run_dir / CANARIES)
    return Canaries(
        grader.canaries, supply, JsonlFile(run_dir / CANARIES, sync=False, storage=storage), rubric, past=past
    )
