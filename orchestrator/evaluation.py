"""What a held-out evaluation came to: one file with every trajectory, and the figures that follow from it. Pure but for
reading and writing.

avg@k is the mean over k samples and all tasks. pass@k is the share of tasks of which at least one of k samples passes,
estimated without bias where there are more samples than k. They answer different questions and are never mixed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
from pydantic import TypeAdapter, ValidationError

from grader.stored import finding
from infra.errors import StorageError
from orchestrator.intervals import Estimate, Grid, difference, pass_at_k, ratio

EVALUATIONS = "evaluations"
"""Folder of a run: LABEL.json, and the groups of passing trajectories in LABEL/."""
TIERS = ("T1", "T2", "T3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory of a held-out task."""

    id: str
    status: str
    passed: bool | None
    """The verifier's word; None if it was masked (M1.3)."""
    turns: int
    response_tokens: int
    policy_versions: tuple[int, ...]
    tier: str | None = None
    """The grader's, of a pass; None if it fell back, or was not asked."""
    hack: bool = False
    """The grader calls it a pass by a leaked answer (M1.5); it has no tier then."""
    known: str | None = None
    """The tier of a passing patch that follows from the task's scripted solutions; None if unknown."""
    scores: Mapping[str, int] | None = None
    """The grader's, by dimension (M3.1)."""

    @property
    def valid(self) -> bool:
        """Whether it was evaluated at all."""
        return self.passed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSamples:
    """All trajectories of one held-out task."""

    task_id: str
    samples: tuple[Sample, ...]
    bug: str | None = None
    """The task's `bug` label, where it has one."""
    fallback: str | None = None
    """Why the grader gave no grade, if it was asked."""

    @property
    def group_id(self) -> str:
        """Of its trajectories."""
        return self.samples[0].id.rpartition("/")[0]

    @property
    def valid(self) -> list[Sample]:
        """Those that were evaluated."""
        return [s for s in self.samples if s.valid]

    @property
    def passing(self) -> list[Sample]:
        """Those that passed by the verifier's word."""
        return [s for s in self.samples if s.passed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of one policy on fixed held-out tasks."""

    label: str
    """before, after, step-N, or the name of a checkpoint."""
    step: int
    """Optimiser steps behind the weights when it began."""
    source: str
    samples: int
    """k: trajectories of each task."""
    tasks: tuple[TaskSamples, ...]
    model: str = ""
    """Folder of the evaluated weights, where they came from one."""
    grader: str | None = None
    """Model that gave the tiers; None if nobody was asked."""
    first_error: str | None = None
    """What the first masked trajectory lost."""

    @property
    def graded(self) -> bool:
        """Whether a grader was asked about anything, even where it gave no grade."""
        return any(t.fallback or any(s.tier or s.hack for s in t.samples) for t in self.tasks)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Optimiser steps behind the oldest and the newest weights that sampled a token; None where nothing did."""
        seen = [v for t in self.tasks for s in t.samples for v in s.policy_versions]
        return (min(seen), max(seen)) if seen else None

    def record(self) -> dict[str, object]:
        """A line of eval.jsonl."""
        valid = [s for t in self.tasks for s in t.valid]
        by_bug: dict[str, list[float]] = defaultdict(list)
        for task in self.tasks:
            if task.bug is not None:
                by_bug[task.bug] += [float(bool(s.passed)) for s in task.valid]
        known = Counter(s.known for t in self.tasks for s in t.passing)
        return {
            "label": self.label,
            "step": self.step,
            "versions": self.versions,
            "source": self.source,
            "tasks": len(self.tasks),
            "samples": self.samples,
            "pass_rate": fmean(float(bool(s.passed)) for s in valid) if valid else None,
            "pass_at_k": _value(figure(self, pass_rate_at(self.samples))),
            "masked": sum(len(t.samples) for t in self.tasks) - len(valid),
            "first_error": self.first_error,
            "turns_mean": fmean(s.turns for s in valid) if valid else None,
            "response_tokens_mean": fmean(s.response_tokens for s in valid) if valid else None,
            "known_tiers": {tier: known[tier] for tier in TIERS} if any(known[t] for t in TIERS) else None,
            "pass_rate_by": {bug: fmean(values) for bug, values in sorted(by_bug.items()) if values},
        }


def labels_of(checkpoints: Sequence[Path]) -> list[str]:
    """A short name of each that tells them apart: RUN-step-N of a run's checkpoint, else the folder's name."""
    names: list[str] = []
    for path in checkpoints:
        folder = path.absolute()
        name = folder.name
        if folder.parent.name == "checkpoints":
            name = f"{folder.parent.parent.name}-{name}"
        while name in names:
            name = f"{name}-{len(names)}"
        names.append(name)
    return names


_ADAPTER = TypeAdapter(Evaluation)


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Raises StorageError where it cannot be written."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(evaluation)) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space or choose another folder") from e


def read_evaluation(path: Path) -> Evaluation:
    """Raises StorageError where it is missing or damaged."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file; `gagar eval --output` and runs with `eval` write it") from None
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e})") from e
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise StorageError(f"{path}: {finding(first['loc'], first['msg'])}; evaluate again") from None


# ---- figures ---------------------------------------------------------------------------------------------------------

Parts = Callable[[TaskSamples], tuple[float, float]]
"""A task's share of a figure: (part, whole). The figure is the sum of the parts over the sum of the wholes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of an evaluation."""

    name: str
    unit: str
    """percent or number."""
    parts: Parts = field(repr=False)


def pass_rate_at(k: int) -> Parts:
    """pass@k of a task; a task with fewer valid samples than k says nothing."""

    def parts(task: TaskSamples) -> tuple[float, float]:
        n = len(task.valid)
        return (pass_at_k(len(task.passing), n, k), 1.0) if n >= k else (0.0, 0.0)

    return parts


def _avg(task: TaskSamples) -> tuple[float, float]:
    return float(len(task.passing)), float(len(task.valid))


def _mean_of(key: str) -> Parts:
    return lambda task: (float(sum(getattr(s, key) for s in task.valid)), float(len(task.valid)))


def _graded(tier: str) -> Parts:
    def parts(task: TaskSamples) -> tuple[float, float]:
        judged = [s for s in task.passing if s.tier is not None]
        return float(sum(s.tier == tier for s in judged)), float(len(judged))

    return parts


def _known(tier: str) -> Parts:
    def parts(task: TaskSamples) -> tuple[float, float]:
        told = [s for s in task.passing if s.known is not None]
        return float(sum(s.known == tier for s in told)), float(len(told))

    return parts


def _unknown(task: TaskSamples) -> tuple[float, float]:
    return float(sum(s.known is None for s in task.passing)), float(len(task.passing))


def _ungraded(task: TaskSamples) -> tuple[float, float]:
    return float(sum(s.tier is None and not s.hack for s in task.passing)), float(len(task.passing))


def _hacks(task: TaskSamples) -> tuple[float, float]:
    return float(sum(s.hack for s in task.passing)), float(sum(s.hack or s.tier is not None for s in task.passing))


def _masked(task: TaskSamples) -> tuple[float, float]:
    return float(len(task.samples) - len(task.valid)), float(len(task.samples))


def figures_of(samples: int, *, k: int | None = None, graded: bool = True, known: bool = True) -> list[Figure]:
    """Every figure of an evaluation with `samples` trajectories a task. `k`: of pass@k, `samples` by default."""
    k = k or samples
    shown = [
        Figure(name=f"avg@{samples}", unit="percent", parts=_avg),
        Figure(name=f"pass@{k}", unit="percent", parts=pass_rate_at(k)),
        Figure(name="turns", unit="number", parts=_mean_of("turns")),
        Figure(name="response tokens", unit="number", parts=_mean_of("response_tokens")),
    ]
    if graded:
        shown += [Figure(name=f"{tier} of graded passes", unit="percent", parts=_graded(tier)) for tier in TIERS]
        shown.append(Figure(name="hacks among judged passes", unit="percent", parts=_hacks))
        shown.append(Figure(name="passes without a grade", unit="percent", parts=_ungraded))
    if known:
        shown += [Figure(name=f"{tier} of known passes", unit="percent", parts=_known(tier)) for tier in TIERS]
        shown.append(Figure(name="passes of unknown tier", unit="percent", parts=_unknown))
    shown.append(Figure(name="masked", unit="percent", parts=_masked))
    return shown


def grid(evaluations: Sequence[Evaluation], parts: Parts) -> tuple[Grid, Grid]:
    """[S, T] parts and wholes of evaluations of the same tasks, one a seed. A task that was sampled as several groups,
    where a source has fewer held-out tasks than were asked for, is one task: draws take all of it or nothing.

    Raises:
        StorageError: they are not of the same tasks.
    """
    wanted = [t.task_id for t in evaluations[0].tasks]
    for other in evaluations[1:]:
        if [t.task_id for t in other.tasks] != wanted:
            raise StorageError(
                f"evaluations {evaluations[0].label!r} and {other.label!r} are of other tasks; only the same held-out "
                "tasks (eval.source, tasks, seed) can be compared"
            )
    pairs = np.array([[parts(task) for task in one.tasks] for one in evaluations], dtype=np.float64)
    columns = {task_id: i for i, task_id in enumerate(dict.fromkeys(wanted))}
    sums = np.zeros((len(evaluations), len(columns), 2))
    for i, task_id in enumerate(wanted):
        sums[:, columns[task_id]] += pairs[:, i]
    return sums[..., 0], sums[..., 1]


def figure(evaluation: Evaluation, parts: Parts) -> Estimate | None:
    """One figure of one evaluation, its interval over tasks."""
    return ratio(*grid([evaluation], parts))


def rows(evaluations: Sequence[Evaluation], *, k: int | None = None) -> Iterator[tuple[str, list[str]]]:
    """The table of several evaluations of the same tasks: (figure, one text for each), and below the differences to
    the first, paired by task.

    Raises:
        StorageError: they are not of the same tasks, or not with as many samples.
    """
    samples = {e.samples for e in evaluations}
    if len(samples) > 1:
        raise StorageError(f"evaluations with {sorted(samples)} samples a task cannot stand in one table")
    graded = any(e.graded for e in evaluations)
    known = any(s.known for e in evaluations for t in e.tasks for s in t.samples)
    for shown in figures_of(samples.pop(), k=k, graded=graded, known=known):
        grids = [grid([e], shown.parts) for e in evaluations]
        yield shown.name, [estimate_text(ratio(*pair), shown.unit) for pair in grids]
        if len(evaluations) > 1 and shown.name != "masked":
            grid(evaluations, shown.parts)
            apart = [difference(*pair, *grids[0]) for pair in grids[1:]]
            yield "  less the first", ["", *(estimate_text(d, shown.unit, signed=True) for d in apart)]


def estimate_text(estimate: Estimate | None, unit: str, *, signed: bool = False) -> str:
    """ "51.1 [44.0, 58.2] %", or "-"; a difference of shares is in points."""
    if estimate is None:
        return "-"
    scale, digits = (100.0, 1) if unit == "percent" else (1.0, 2)
    sign = "+" if signed else ""
    end = "" if unit != "percent" else (" points" if signed else " %")
    value = f"{estimate.value * scale:{sign}.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return f"{value}{end}"
    return f"{value} [{estimate.low * scale:{sign}.{digits}f}, {estimate.high * scale:{sign}.{digits}f}]{end}"


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value
