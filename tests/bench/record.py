"""What the files of a run must say at every moment, also between a kill and a resume. Reads files only."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load_file

from grader.exchange import GradeReply
from infra.errors import StorageError
from orchestrator.checkpoint import LOGS, open_checkpoint
from rollout.spool import group_folder, kept_slots, read_rollout

_REPLY = TypeAdapter(GradeReply)
_GROUP_ID = re.compile(r"(.+)-(\d{6,})$")
_CHECKPOINT = re.compile(r"step-\d+")
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the configuration promises."""

    quotas: Mapping[str, int]
    """Source -> groups that one step trains on."""
    max_staleness: int
    every_steps: int
    """Steps from one checkpoint to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a resume must keep of a folder as it was."""

    step: int = 0
    """Of the last complete checkpoint; no step up to it may be done again."""
    prefixes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Log -> bytes that the checkpoint covers, and their digest."""
    grades: Mapping[str, Any] = field(default_factory=dict)
    """Group -> what the grader answered, of groups that live with all the rollouts that were graded."""
    groups: frozenset[str] = frozenset()
    """Groups that were admitted."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """The state of a folder, and all that is wrong with it."""

    promise: Promise
    steps: int
    """Lines of metrics.jsonl."""
    groups: int
    trained: int
    living: int
    """Groups of the ledger that have not ended, or whose end no checkpoint covers."""
    kept_grades: int
    """Groups that ended since the last look with the very grade they had then."""
    age_min: int | None
    age_max: int | None
    """Optimiser steps between a trained token's weights and the step."""
    faults: list[str]


def look(run_dir: Path, expected: Expected, before: Promise | None = None, *, at_rest: bool = False) -> Finding:
    """Check all files of a run that no process writes now. `before`: the promise of the last look.

    `at_rest`: the run ended by itself, so no line may be torn.
    """
    before = before or Promise()
    faults: list[str] = []
    rows = {name: _lines(run_dir / name, faults, at_rest=at_rest) for name in LOGS}
    step, sizes = _checkpoints(run_dir, faults)
    _not_back(run_dir, step, before, faults)
    prefixes = {}
    for name in LOGS:
        data = (run_dir / name).read_bytes() if (run_dir / name).exists() else b""
        size = int(sizes.get(name, 0))
        if size > len(data):
            faults.append(f"{name}: has {len(data)} bytes, the checkpoint of step {step} covers {size}")
        elif size and data[size - 1 : size] != b"\n":
            faults.append(f"{name}: the checkpoint of step {step} ends inside a line (byte {size})")
        prefixes[name] = (size, hashlib.sha256(data[:size]).hexdigest())

    steps = [row["step"] for row in rows["metrics.jsonl"]]
    if steps != list(range(1, len(steps) + 1)):
        faults.append(f"metrics.jsonl: steps are {_around(steps)}, not 1, 2, 3 ...")
    if not step <= len(steps) <= step + expected.every_steps:
        faults.append(f"metrics.jsonl: {len(steps)} steps with a checkpoint at step {step}")

    groups = rows["groups.jsonl"]
    faults += _groups(groups, len(steps), expected)
    ledger, grades = _ledger(run_dir, faults)
    admitted = frozenset(ledger) | {g["group_id"] for g in groups}
    if lost := before.groups - admitted:
        faults.append(f"groups that had been admitted are nowhere: {sorted(lost)[:5]}")
    faults += _gaps(admitted)
    kept = 0
    for group in groups:
        was = before.grades.get(group["group_id"])
        now = group["grader"]
        if was is None or now is None:  # None: it had grown too old before it would have been graded
            continue
        if was["ids"] != {t["id"]: t["policy_versions"] for t in group["trajectories"] if t["valid"]}:
            continue  # a rollout was lost for good and sampled again, which voids the grade
        if now != was["grader"]:
            faults.append(f"{group['group_id']}: graded again: {was['grader']} became {now}")
        kept += 1
    ages = [
        g["step"] - 1 - v
        for g in groups
        if g["outcome"] == "trained"
        for t in g["trajectories"]
        for v in t["policy_versions"]
        if t["valid"]
    ]
    if ages and max(ages) > expected.max_staleness:
        faults.append(f"groups.jsonl: a token {max(ages)} steps old was trained on; {expected.max_staleness} allowed")
    _archive(run_dir, faults)
    return Finding(
        promise=Promise(step=step, prefixes=prefixes, grades=grades, groups=admitted),
        steps=len(steps),
        groups=len(groups),
        trained=sum(g["outcome"] == "trained" for g in groups),
        living=len(ledger),
        kept_grades=kept,
        age_min=min(ages, default=None),
        age_max=max(ages, default=None),
        faults=faults,
    )


def recomputed(group: Mapping[str, Any]) -> list[float]:
    """Advantages of a group's valid trajectories, by an outsider from its line of groups.jsonl alone (M4.1, M4.3)."""
    valid = [t for t in group["trajectories"] if t["valid"]]
    mean = math.fsum(t["reward"] for t in valid) / len(valid)
    a = [t["reward"] - mean for t in valid]
    if group["mode"] == "outcome":
        return a
    if group["mode"] not in ("redistribute", "redistribute_exact"):
        raise ValueError(f"mode {group['mode']} is not checked here")
    weights = [t["factor"] if t["passed"] else 1.0 for t in valid]
    up = math.fsum(x for x, t in zip(a, valid, strict=True) if t["passed"])
    down = math.fsum(x * w for x, w, t in zip(a, weights, valid, strict=True) if t["passed"])
    scale = min(up / down, group["lambda_max"] or math.inf)
    b = [scale * w * x if t["passed"] else x for x, w, t in zip(a, weights, valid, strict=True)]
    return [x - math.fsum(b) / len(b) for x in b]


def _lines(path: Path, faults: list[str], *, at_rest: bool) -> list[dict[str, Any]]:
    """The whole lines of a log. The last may be torn, unless the run ended by itself."""
    if not path.exists():
        return []
    data = path.read_bytes()
    rows = []
    parts = data.split(b"\n")
    if parts[-1] and at_rest:
        faults.append(f"{path.name}: the last line has no end: {parts[-1][-80:]!r}")
    for number, line in enumerate(parts[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as e:
            faults.append(f"{path.name}:{number}: not JSON ({e}): {line[:80]!r}")
    return rows


def _checkpoints(run_dir: Path, faults: list[str]) -> tuple[int, Mapping[str, int]]:
    """Step of the newest complete checkpoint, and the sizes of the logs at it. Every one under a final name must be as
    it was written, and hold weights that open."""
    newest, sizes = 0, {}
    for folder in sorted((run_dir / "checkpoints").glob("step-*")):
        if not _CHECKPOINT.fullmatch(folder.name):
            continue
        try:
            found = open_checkpoint(folder)
            if folder.name != f"step-{found.step:06d}":
                faults.append(f"{folder.name}: its state is of step {found.step}")
            weights = [load_file(file) for file in found.policy.glob("*.safetensors")]
            if not any(weights) or not any(found.learner.rglob("*.pt")):
                faults.append(f"{folder.name}: no weights of the policy or no state of the learner")
            newest, sizes = found.step, found.state["logs"]
        except (StorageError, OSError, KeyError, SafetensorError) as e:
            faults.append(f"{folder.name}: not whole ({type(e).__name__}: {e})")
    return newest, sizes


def _not_back(run_dir: Path, step: int, before: Promise, faults: list[str]) -> None:
    """What a complete checkpoint covered is never done again, nor touched."""
    if step < before.step:
        faults.append(f"the newest checkpoint is of step {step}, it was {before.step}")
    for name, (size, digest) in before.prefixes.items():
        path = run_dir / name
        data = path.read_bytes()[:size] if path.exists() else b""
        if hashlib.sha256(data).hexdigest() != digest:
            faults.append(f"{name}: the first {size} bytes, which step {before.step} covers, were written again")


def _groups(groups: Sequence[Mapping[str, Any]], steps: int, expected: Expected) -> list[str]:
    """Each group once, each step its quota, each advantage as it follows from its line."""
    faults = []
    twice = [i for i, n in Counter(g["group_id"] for g in groups).items() if n > 1]
    if twice:
        faults.append(f"groups.jsonl: more than one line of {twice[:5]}")
    trained = Counter((g["step"], g["source"]) for g in groups if g["outcome"] == "trained")
    for step in range(1, steps + 1):
        got = {source: n for (s, source), n in trained.items() if s == step}
        if got != {s: n for s, n in expected.quotas.items() if n}:
            faults.append(f"groups.jsonl: step {step} trained on {got}, not {dict(expected.quotas)}")
    if late := {s for s, _ in trained if s > steps + 1}:
        faults.append(f"groups.jsonl: groups trained at steps {sorted(late)}, metrics.jsonl ends at {steps}")
    for group in groups:
        given = [t["advantage"] for t in group["trajectories"] if t["valid"]]
        if group["outcome"] == "trained" or any(a is not None for a in given):
            wanted = recomputed(group)
            if None in given or any(abs(x - y) > _CLOSE for x, y in zip(given, wanted, strict=True)):
                faults.append(f"{group['group_id']}: advantages {given} should be {wanted}")
    return faults


def _ledger(run_dir: Path, faults: list[str]) -> tuple[dict[str, bool], dict[str, Any]]:
    """Groups of the ledger -> whether they have ended; and the grades that a resume must keep.

    Looks at a copy: opening the file itself would change it.
    """
    groups: dict[str, bool] = {}
    grades: dict[str, Any] = {}
    if not (run_dir / "ledger.sqlite").exists():
        return groups, grades
    with tempfile.TemporaryDirectory(prefix="gagar-ledger-") as folder:
        for file in run_dir.glob("ledger.sqlite*"):
            shutil.copy2(file, folder)
        try:
            with closing(sqlite3.connect(Path(folder) / "ledger.sqlite")) as db:
                if (verdict := db.execute("PRAGMA integrity_check").fetchall()) != [("ok",)]:
                    faults.append(f"ledger.sqlite: {verdict[:3]}")
                if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'groups'").fetchall():
                    return groups, grades
                rows = db.execute("SELECT group_id, ended, reply FROM groups").fetchall()
        except sqlite3.Error as e:
            faults.append(f"ledger.sqlite: {e}")
            return groups, grades
    for group_id, ended, text in rows:
        groups[group_id] = ended is not None
        slots = kept_slots(run_dir / "rollouts", group_id)
        for path in slots.values():
            try:
                read_rollout(path)
            except StorageError as e:
                faults.append(f"{group_folder(Path(), group_id)}/{path.name}: {e}")
        if text is not None:
            reply = _REPLY.validate_json(text)
            ids = {i: list(versions) for i, versions in dict(reply.policy_versions).items()}
            if set(ids) == {f"{group_id}/{path.stem}" for path in slots.values()}:
                grades[group_id] = {"ids": ids, "grader": json.loads(json.dumps(reply.audit()))}
    return groups, grades


def _gaps(admitted: frozenset[str]) -> list[str]:
    """Every task of a source's stream, from the first to the last, is a group that lives or has ended."""
    numbers: dict[str, set[int]] = {}
    for group_id in admitted:
        if match := _GROUP_ID.match(group_id):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    gaps = {s: sorted(set(range(max(n) + 1)) - n) for s, n in numbers.items()}
    return [f"groups {s}-{missing[:5]} were admitted and are nowhere" for s, missing in gaps.items() if missing]


def _archive(run_dir: Path, faults: list[str]) -> None:
    """Stored groups can be read."""
    for path in sorted((run_dir / "archive").glob("*.json.gz")):
        try:
            json.loads(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, ValueError) as e:
            faults.append(f"archive/{path.name}: {e}")


def _around(steps: Sequence[int]) -> str:
    """The steps beside the first that is out of order."""
    at = next(i for i, s in enumerate(steps) if s != i + 1)
    return f"{list(steps[max(at - 2, 0) : at + 3])} from line {max(at - 2, 0) + 1}"
