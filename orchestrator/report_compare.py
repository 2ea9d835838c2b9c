"""One page about several runs: arms with their seeds, curves with bands, costs, graded groups and what was configured.

Made from the run folders alone, so that it opens without a network. Runs whose names differ in `-sSEED` at the end
alone are seeds of one arm. Every value is escaped by the template engine, and the page's own policy forbids scripts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from pydantic import ValidationError

from configs.problems import show
from configs.schema import RunConfig
from infra.errors import StorageError
from infra.unseen import visible
from orchestrator.archive import read_archived
from orchestrator.browse import Entry, GroupList, group_lists, to_show
from orchestrator.charts import Chart, band_chart, heat_map, stacked_bars
from orchestrator.cost import compare, step_costs
from orchestrator.evaluation import (
    EVALUATIONS,
    Evaluation,
    Figure,
    estimate_text,
    figures_of,
    grid,
    read_evaluation,
)
from orchestrator.experiment import differing
from orchestrator.group_view import GroupView, group_view
from orchestrator.intervals import Estimate, difference, ratio
from orchestrator.panels import CURVES
from orchestrator.report import MAX_PAGE_CHARS, occupancy, page_size, render_page, spread, write_page
from orchestrator.runfiles import ARCHIVE, CONFIG, EVAL, GROUPS, METRICS, read_jsonl, require_run

SEED = re.compile(r"-s(\d+)$")
SHOWN_OF_A_RUN = 4
"""Groups of each list that one run contributes: a page holds many runs."""
TIME_PARTS = ("rollout", "grading", "learning", "publish", "checkpoint", "idle")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run, as much of it as there is."""

    name: str
    """That of its folder; with those above it where several runs are called the same."""
    arm: str
    seed: int | None
    folder: Path
    config: RunConfig
    metrics: Sequence[Row]
    groups: Sequence[Row]
    evals: Sequence[Row]
    evaluation: Evaluation | None
    """Of its last weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTable:
    """Held-out figures beside each other."""

    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """(figure, its value in each arm)."""
    less: str
    """Rows of this name are differences of the row above, to the first arm."""
    note: str


def runs_of(folders: Sequence[Path]) -> list[Path]:
    """Folders of runs, each once; that of an experiment stands for its cells, the arm that others are held against
    first. What a cell that began anew kept beside itself, or was moved aside, is none.

    Raises:
        StorageError: one is neither, or the experiment's description is damaged.
    """
    found: list[Path] = []
    for folder in folders:
        if (folder / "experiment.yaml").is_file():
            cells = [p.parent for p in folder.glob(f"*/{CONFIG}") if SEED.search(p.parent.name)]
            arms = _arms_of(folder / "experiment.yaml")
            found += sorted(cells, key=lambda cell: _place(cell.name, arms))
        else:
            require_run(folder)
            found.append(folder)
    if not found:
        raise StorageError(f"{folders[0]}: no cell of this experiment has begun")
    return list({folder.resolve(): folder for folder in found}.values())


def _arms_of(path: Path) -> list[str]:
    """Arms in the order in which they are shown: the reference first."""
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
        return list(dict.fromkeys([spec["reference"], *spec["arms"]]))
    except (OSError, yaml.YAMLError, LookupError, TypeError) as e:
        raise StorageError(f"{path}: cannot be read ({e!r}); name the runs one by one") from None


def _place(cell: str, arms: Sequence[str]) -> tuple[int, str, int]:
    """Sorts cells by arm, then by seed; what is no arm comes last."""
    arm, seed = _arm_and_seed(cell)
    return arms.index(arm) if arm in arms else len(arms), arm, seed or 0


def _arm_and_seed(name: str) -> tuple[str, int | None]:
    """Of a run's name; one without a seed is an arm of its own."""
    seed = SEED.search(name)
    return SEED.sub("", name), None if seed is None else int(seed[1])


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each: as much of the end of its path as tells it from the others."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]  # a link has the name that it was given
    depth = 1
    while len({one[-depth:] for one in parts}) < len(parts):
        depth += 1
    return ["/".join(one[-depth:]) for one in parts]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write a page about these runs, which may be unfinished, and return its path.

    Raises:
        StorageError: a folder is no run, a file is damaged, or the page cannot be written.
    """
    found = runs_of(folders)
    runs = [read_run(folder, name) for folder, name in zip(found, names_of(found), strict=True)]
    arms: dict[str, list[RunData]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    lists, views = _browse(runs)
    costs = {arm: {run.seed: step_costs(run.folder, run.config) for run in members} for arm, members in arms.items()}
    page = render_page(
        "compare.html.j2",
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        runs=[(run.name, run.arm, len(run.metrics), run.config.steps) for run in runs],
        arms=list(arms),
        heldout=heldout_table(arms),
        charts=[c for c in curves(arms) if c is not None],
        heats=[c for c in heat_maps(arms) if c is not None],
        spent=[c for c in spending(runs) if c is not None],
        first=next(iter(arms)),
        costs=compare(costs, next(iter(arms))),
        timelines=[(run.name, c) for run in runs if (c := occupancy(run.folder, run.metrics)) is not None],
        lists=lists,
        views=list(views.values()),
        anchors={key: view.anchor for key, view in views.items()},
        differences=config_differences(arms),
    )
    return write_page(path, page)


def read_run(folder: Path, name: str) -> RunData:
    """Everything that the page wants of one run, under this name on it.

    Raises:
        StorageError: its configuration or another file is damaged.
    """
    path = folder / CONFIG
    try:
        config = RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as e:
        raise StorageError(f"{path}: cannot be read ({str(e).splitlines()[0]}); give the folder of a run") from None
    arm, seed = _arm_and_seed(name)
    return RunData(
        name=name,
        arm=arm,
        seed=seed,
        folder=folder,
        config=config,
        metrics=read_jsonl(folder / METRICS),
        groups=list({r["group_id"]: r for r in read_jsonl(folder / GROUPS)}.values()),
        evals=read_jsonl(folder / EVAL),
        evaluation=_last_evaluation(folder.absolute()),
    )


def _last_evaluation(folder: Path) -> Evaluation | None:
    """That of an experiment's cell, or the run's own after its last step."""
    for path in (folder.parent / EVALUATIONS / f"{folder.name}.json", folder / EVALUATIONS / "after.json"):
        if path.is_file():
            return read_evaluation(path)
    return None


# ---- panels ----------------------------------------------------------------------------------------------------------


def curves(arms: Mapping[str, Sequence[RunData]]) -> list[Chart | None]:
    """One line for each arm, the mean over its seeds, in a band from the least to the most of them."""
    colors = {arm: i for i, arm in enumerate(arms)}
    charts = [
        _heldout_curve("Held-out pass rate (avg@k)", arms, colors, lambda e: e["pass_rate"]),
        _heldout_curve("Held-out T1 share of known passes", arms, colors, _known_tier1),
    ]
    for panel in CURVES:
        series = {
            arm: band(
                [{m["step"]: m[panel.key] for m in run.metrics if m.get(panel.key) is not None} for run in members]
            )
            for arm, members in arms.items()
        }
        flat = panel.share and not any(point[3] for line in series.values() for point in line)
        low, high = (0.0 if panel.share else None), (1.0 if flat else None)
        charts.append(band_chart(panel.title, _some(series), colors=colors, low=low, high=high))
    return charts


def _heldout_curve(
    title: str, arms: Mapping[str, Sequence[RunData]], colors: Mapping[str, int], value: Callable[[Row], float | None]
) -> Chart | None:
    """A figure of the held-out evaluations of eval.jsonl."""
    series = {
        arm: band([{e["step"]: v for e in run.evals if (v := value(e)) is not None} for run in members])
        for arm, members in arms.items()
    }
    return band_chart(title, _some(series), colors=colors, low=0.0)


def _known_tier1(line: Row) -> float | None:
    tiers = line.get("known_tiers") or {}
    told = sum(tiers.values())
    return tiers["T1"] / told if told else None


def band(runs: Sequence[Mapping[int, float]]) -> list[tuple[float, float, float, float]]:
    """(step, mean, least, most) over the runs that have a value at a step."""
    steps = sorted({step for run in runs for step in run})
    found = []
    for step in steps:
        values = [float(run[step]) for run in runs if step in run]
        found.append((float(step), fmean(values), min(values), max(values)))
    return found


def heat_maps(arms: Mapping[str, Sequence[RunData]]) -> list[Chart | None]:
    """How lambda is spread over time, all seeds of an arm together."""
    charts = []
    for arm, members in arms.items():
        columns: dict[int, list[tuple[float, float]]] = {}
        for run in members:
            for step, values in spread(run.metrics, "redistribution/lambda").items():
                columns.setdefault(step, []).extend(values)
        charts.append(heat_map(f"Lambda of graded groups: {arm}", columns, low=1.0))
    return charts


def spending(runs: Sequence[RunData]) -> list[Chart | None]:
    """Where the time and the generated tokens of each run went; runs are numbered as in the list above."""
    time_s = {
        part: {i: sum(m.get(f"time/{part}_s") or 0.0 for m in run.metrics) for i, run in enumerate(runs, 1)}
        for part in TIME_PARTS
    }
    tokens: dict[str, dict[int, float]] = {}
    for i, run in enumerate(runs, 1):
        for record in run.groups:
            end = "skipped" if record["outcome"].startswith("skipped") else record["outcome"]
            spent = sum(t["response_tokens"] for t in record["trajectories"] if t["valid"])
            parts = tokens.setdefault(f"rollouts of {end} groups", {})
            parts[i] = parts.get(i, 0.0) + spent
            written = (record.get("grader") or {}).get("completion_tokens") or 0
            parts = tokens.setdefault("grader", {})
            parts[i] = parts.get(i, 0.0) + written
    return [
        stacked_bars("Seconds, by run", time_s),
        stacked_bars("Generated tokens, by run", {n: p for n, p in tokens.items() if any(p.values())}),
    ]


def heldout_table(arms: Mapping[str, Sequence[RunData]]) -> ArmTable | None:
    """Figures of the last weights; why there are none, where tasks or numbers of samples are not the same."""
    found = {arm: {run.seed: run.evaluation for run in members if run.evaluation} for arm, members in arms.items()}
    found = {arm: seeds for arm, seeds in found.items() if seeds}
    everything = [e for seeds in found.values() for e in seeds.values()]
    if not everything:
        return None
    if len({(e.samples, tuple(t.task_id for t in e.tasks)) for e in everything}) > 1:
        said = "These runs were evaluated on other tasks, or with other numbers of samples: no table can hold them."
        return ArmTable(names=(), rows=(), less="", note=said)
    graded = any(e.graded for e in everything)
    known = any(s.known for e in everything for t in e.tasks for s in t.samples)
    shown = figures_of(everything[0].samples, graded=graded, known=known)
    rows: list[tuple[str, tuple[str, ...]]] = []
    reference, first = next(iter(found.items()))
    less = f"less {reference}"
    for f in shown:
        grids = [grid(list(seeds.values()), f.parts) for seeds in found.values()]
        rows.append((f.name, tuple(estimate_text(ratio(*pair), f.unit) for pair in grids)))
        if len(found) > 1 and f.name != "masked":
            apart = [estimate_text(_apart(seeds, first, f), f.unit, signed=True) for seeds in found.values()]
            rows.append((less, ("", *apart[1:])))
    one = everything[0]
    return ArmTable(
        names=tuple(f"{arm} ({len(seeds)})" for arm, seeds in found.items()),
        rows=tuple(rows),
        less=less,
        note=f"{len(one.tasks)} held-out tasks of {one.source}, {one.samples} samples each; in brackets the number of "
        "seeds; 95 % bootstrap intervals over tasks and seeds; differences are paired by seed and task, over the "
        "seeds that both arms have; single runs by task.",
    )


def _apart(
    mine: Mapping[int | None, Evaluation], theirs: Mapping[int | None, Evaluation], f: Figure
) -> Estimate | None:
    """The first less the other, over the seeds that both have; one run each is held against the other whatever its
    seed."""
    if len(mine) == len(theirs) == 1:
        return difference(*grid([*mine.values()], f.parts), *grid([*theirs.values()], f.parts))
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        return None
    return difference(*grid([mine[s] for s in seeds], f.parts), *grid([theirs[s] for s in seeds], f.parts))


def config_differences(arms: Mapping[str, Sequence[RunData]]) -> list[tuple[str, tuple[str, ...]]]:
    """(key, values in each arm) of every key that any two runs have differently; an arm's seeds share a cell."""
    configs = {arm: [r.config.model_dump(mode="json", exclude={"name", "output"}) for r in arms[arm]] for arm in arms}
    pairs = combinations([config for members in configs.values() for config in members], 2)
    keys = sorted({key for one, other in pairs for key in differing(one, other)})
    return [
        (key, tuple(", ".join(dict.fromkeys(_at(config, key) for config in members)) for members in configs.values()))
        for key in keys
    ]


def _at(config: Mapping[str, Any], key: str) -> str:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        return "a section"  # others have none; what is not the same in those that have it has keys of its own
    return visible("-" if value is None else show(value))


# ---- groups ----------------------------------------------------------------------------------------------------------


def _browse(runs: Sequence[RunData]) -> tuple[list[GroupList], dict[str, GroupView]]:
    """The lists of all runs, and the groups that the page shows in full, by "RUN/GROUP"; hacks and fallbacks are
    listed whole, of the others each run's first ones."""
    entries: dict[str, list[Entry]] = {}
    views: dict[str, GroupView] = {}
    size = 0
    for run in runs:
        lists = group_lists(run.groups)
        for one in lists:
            whole = one.title in ("Hacks", "Fallbacks")
            chosen = one.entries if whole else one.entries[:SHOWN_OF_A_RUN]
            for entry in chosen:
                named = {**entry.record, "key": f"{run.name}/{entry.record['group_id']}"}
                entries.setdefault(one.title, []).append(Entry(record=named, said=entry.said))
        cut = [GroupList(title=one.title, entries=one.entries[:SHOWN_OF_A_RUN]) for one in lists]
        for record in to_show(cut):
            if size > MAX_PAGE_CHARS:
                break
            stored, note = None, ""
            try:
                stored = read_archived(run.folder / ARCHIVE, record)
            except StorageError as e:
                note = visible(str(e))
            view = group_view(record, stored, anchor=f"g{len(views)}", note=note)
            size += page_size(view)
            views[f"{run.name}/{record['group_id']}"] = view
    order = ("Best", "Worst", "Contested", "Hacks", "Fallbacks")
    return [GroupList(title=t, entries=tuple(entries[t])) for t in order if t in entries], views


def _some(series: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: points for name, points in series.items() if points}
