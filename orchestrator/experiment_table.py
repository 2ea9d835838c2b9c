"""The figures of an experiment, from its files alone: experiment.json in numbers, table.md for people."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from infra.errors import StorageError
from orchestrator.cost import RECENT_STEPS, StepCost, compare, step_costs
from orchestrator.evaluation import Evaluation, Figure, estimate_text, figures_of, grid, read_evaluation
from orchestrator.experiment import CELLS, START, CellState, Experiment
from orchestrator.intervals import Estimate, difference, ratio
from orchestrator.markdown import table
from orchestrator.runfiles import METRICS, read_jsonl

RESULT = "experiment.json"
TABLE = "table.md"
TRAINED = {
    "entropy": "learner/entropy",
    "cap rate": "redistribution/lambda_capped_rate",
    "lambda": "redistribution/lambda_mean",
    "failing side": "redistribution/failing_shift_mean",
    "grader T1": "grading/tier1_share",
    "fallback": "grading/fallback_rate",
}
"""What the training itself says, by metric: the mean over steps, of entropy the last ones."""
SHARES = ("cap rate", "grader T1", "fallback")


def write_table(experiment: Experiment) -> dict[str, Any]:
    """Write experiment.json and table.md from what there is; returns the former.

    Raises:
        StorageError: a file is damaged, or the folder cannot be written.
    """
    result = collect(experiment)
    _write(experiment.folder / RESULT, json.dumps(result, indent=1) + "\n")
    _write(experiment.folder / TABLE, markdown(result))
    return result


def collect(experiment: Experiment) -> dict[str, Any]:
    """Every figure, as plain data."""
    config = experiment.config
    found: dict[tuple[str, int], Evaluation] = {}
    runs: dict[tuple[str, int], Sequence[Mapping[str, Any]]] = {}
    costs: dict[str, dict[int | None, list[StepCost]]] = {}
    states = []
    for cell in experiment.cells:
        state = experiment.state(cell)
        if state is not CellState.NEW or cell.arm in (config.run or config.arms):
            states.append({"cell": cell.name, "arm": cell.arm, "seed": cell.seed, "state": state.value})
        if state is CellState.DONE:
            found[cell.arm, cell.seed] = _evaluation(experiment, cell.name)
            runs[cell.arm, cell.seed] = read_jsonl(cell.run_dir / METRICS)
            costs.setdefault(cell.arm, {})[cell.seed] = step_costs(cell.run_dir, cell.config)
    start = _evaluation(experiment, START) if experiment.evaluation_file(START).is_file() else None
    shown = figures_of(config.evaluation.samples, graded=experiment.judge.grader is not None)
    done = [arm for arm in config.arms if any(a == arm for a, _ in found)]
    return {
        "name": config.name,
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "reference": config.reference,
        "steps": max((cell.config.steps for cell in experiment.cells), default=0),
        "samples": config.evaluation.samples,
        "tasks": config.evaluation.tasks,
        "grader": next((e.grader for e in found.values() if e.grader), None),
        "cells": states,
        "hours": sum(row["seconds"] for row in read_jsonl(experiment.folder / CELLS)) / 3600.0,
        "start": None if start is None else {f.name: _plain(ratio(*grid([start], f.parts))) for f in shown},
        "arms": {arm: _arm(arm, found, runs, shown) for arm in done},
        "differences": {
            arm: _apart(arm, other, found, shown)
            for arm in done
            if (other := config.against.get(arm, config.reference)) != arm and other in done
        },
        "cost": compare(costs, config.reference),
    }


def _evaluation(experiment: Experiment, label: str) -> Evaluation:
    """One that is of as many tasks and samples as the experiment says: figures are named after these."""
    path, wanted = experiment.evaluation_file(label), experiment.config.evaluation
    found = read_evaluation(path)
    if (len(found.tasks), found.samples) != (wanted.tasks, wanted.samples):
        raise StorageError(
            f"{path}: is of {len(found.tasks)} tasks with {found.samples} samples, the experiment of {wanted.tasks} "
            f"with {wanted.samples}; move it away to evaluate anew"
        )
    return found


def _arm(
    arm: str,
    found: Mapping[tuple[str, int], Evaluation],
    runs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]],
    shown: Sequence[Figure],
) -> dict[str, Any]:
    mine = [e for (a, _), e in found.items() if a == arm]
    trained = {}
    for name, key in TRAINED.items():
        values = []
        for (a, _), metrics in runs.items():
            steps = metrics[-RECENT_STEPS:] if name == "entropy" else metrics
            known = [float(m[key]) for m in steps if m.get(key) is not None]
            values += [fmean(known)] if a == arm and known else []
        trained[name] = {"mean": fmean(values), "min": min(values), "max": max(values)} if values else None
    return {
        "seeds": sorted(seed for a, seed in found if a == arm),
        "heldout": {f.name: _plain(ratio(*grid(mine, f.parts))) for f in shown},
        "trained": trained,
    }


def _apart(
    arm: str, other: str, found: Mapping[tuple[str, int], Evaluation], shown: Sequence[Figure]
) -> dict[str, Any] | None:
    """Differences over the seeds that both have, paired by seed and task."""
    seeds = sorted({s for a, s in found if a == arm} & {s for a, s in found if a == other})
    if not seeds:
        return None
    mine, theirs = [found[arm, s] for s in seeds], [found[other, s] for s in seeds]
    grid([*mine, *theirs], shown[0].parts)  # refuses evaluations of other tasks
    return {
        "against": other,
        "seeds": seeds,
        "heldout": {
            f.name: _plain(difference(*grid(mine, f.parts), *grid(theirs, f.parts)))
            for f in shown
            if f.name != "masked"
        },
    }


def _plain(estimate: Estimate | None) -> dict[str, float | None] | None:
    return None if estimate is None else asdict(estimate)


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space") from e


# ---- for people ------------------------------------------------------------------------------------------------------


def markdown(result: Mapping[str, Any]) -> str:
    """table.md. Deterministic: the same result gives the same text (docs/experiments.md is held against it)."""
    k = result["samples"]
    cells = result["cells"]
    done = sum(c["state"] == "done" for c in cells)
    lines = [
        f"# {result['name']}",
        "",
        f"{result['steps']} steps a cell; {done} of {len(cells)} cells are complete. Held-out figures: "
        f"{result['tasks']} tasks, {k} samples each, mean with a 95 % bootstrap interval over tasks and seeds, of one "
        "seed over tasks alone. What the training says: mean over steps, then over seeds (least to most); entropy over "
        f"the last {RECENT_STEPS} steps.",
        "",
        *table(
            ["arm", "seeds", f"avg@{k}", f"pass@{k}", "T1 of graded", "T1 of known", "turns", "tokens"],
            _heldout_rows(result, k),
        ),
        "",
    ]
    if result["differences"]:
        lines += [
            "Differences, paired by seed and task; **bold** where the interval of two seeds or more is clear of zero:",
            "",
            *table(
                ["arm", "against", "seeds", f"avg@{k}", "T1 of graded", "T1 of known", "turns", "tokens"],
                _difference_rows(result, k),
            ),
            "",
        ]
    if result["arms"]:
        names = list(TRAINED)
        rows = [[arm, *(_range(row["trained"][name], name) for name in names)] for arm, row in result["arms"].items()]
        lines += ["What the training itself says:", "", *table(["arm", *names], rows), ""]
    if result["cost"]:
        lines += _cost_lines(result)
    return "\n".join(lines).rstrip() + "\n"


def _heldout_rows(result: Mapping[str, Any], k: int) -> list[list[str]]:
    names = _names(k)
    rows = []
    if result["start"] is not None:
        rows.append(["(start)", "-", *(_text(result["start"].get(name), name) for name in names)])
    for arm, row in result["arms"].items():
        texts = [_text(row["heldout"].get(name), name) for name in names]
        rows.append([arm, str(len(row["seeds"])), *texts])
    return rows


def _difference_rows(result: Mapping[str, Any], k: int) -> list[list[str]]:
    names = [name for name in _names(k) if not name.startswith("pass@")]
    rows = []
    for arm, row in result["differences"].items():
        if row is not None:
            found = [(row["heldout"].get(name), name) for name in names]
            texts = [_text(value, name, signed=True, bold=len(row["seeds"]) > 1) for value, name in found]
            rows.append([arm, row["against"], str(len(row["seeds"])), *texts])
    return rows


def _names(k: int) -> list[str]:
    return [f"avg@{k}", f"pass@{k}", "T1 of graded passes", "T1 of known passes", "turns", "response tokens"]


def _text(value: Mapping[str, float | None] | None, name: str, *, signed: bool = False, bold: bool = False) -> str:
    """`bold`: where the interval is clear of zero."""
    if value is None or value["value"] is None:
        return "-"
    estimate = Estimate(value=value["value"], low=value["low"], high=value["high"])
    text = estimate_text(estimate, "number" if name in ("turns", "response tokens") else "percent", signed=signed)
    return f"**{text}**" if bold and estimate.clear_of_zero else text


def _range(value: Mapping[str, float] | None, name: str) -> str:
    if value is None:
        return "-"
    scale, digits, unit = (100.0, 1, " %") if name in SHARES else (1.0, 3, "")
    mean, least, most = (f"{value[key] * scale:.{digits}f}" for key in ("mean", "min", "max"))
    return f"{mean} ({least} to {most}){unit}"


def _cost_lines(result: Mapping[str, Any]) -> list[str]:
    columns = {
        "seeds": ("seeds", 0, 1.0),
        "compute, resource-s": ("compute_s", 0, 1.0),
        "rollout": ("rollout_s", 0, 1.0),
        "grader": ("grader_s", 0, 1.0),
        "learner": ("learner_s", 0, 1.0),
        "grader share %": ("grader_share", 1, 100.0),
        "grader endpoint USD": ("cost_usd", 2, 1.0),
        "queue s": ("queue_s", 2, 1.0),
        "fallback %": ("fallback_rate", 1, 100.0),
        "tokens a trajectory": ("tokens_per_trajectory", 1, 1.0),
        f"saved against {result['reference']} %": ("tokens_saved", 1, 100.0),
        "pass % at equal steps": ("pass_rate", 1, 100.0),
        "at equal tokens": ("pass_rate_at_equal_tokens", 1, 100.0),
        "(step)": ("steps_at_equal_tokens", 1, 1.0),
        "at equal compute": ("pass_rate_at_equal_compute", 1, 100.0),
        "(step) ": ("steps_at_equal_compute", 1, 1.0),
    }
    rows = [
        [
            arm,
            *("-" if row[key] is None else f"{row[key] * scale:.{digits}f}" for key, digits, scale in columns.values()),
        ]
        for arm, row in result["cost"].items()
    ]
    said = (
        "Cost, means over the seeds that all these arms have. Compute is busy time of a pool times its GPUs or CPU "
        "threads; graders at an endpoint are not in it. Pass rates are those of fresh training tasks over "
        f"{RECENT_STEPS} steps, up to the step that each arm had reached with as many steps, as many sampled tokens, "
        "or as much compute as the cell that spent least:"
    )
    return [said, "", *table(["arm", *(name.strip() for name in columns)], rows), ""]
