"""Every format of tasks from its files to two optimiser steps: checked, validated, trained on.

    python -m tests.bench.formats --out DIR [--formats folder,swebench,mimo,harbor] [--times 2] [--steps 2] [KEY=VALUE]

For each configuration of `configs/tasks/`, as a user would, one process after the other:

    gagar tasks check CONFIG       every record can be used
    gagar tasks validate CONFIG    in real jails, `--times` times: each start fails, each reference passes
    gagar train CONFIG             engine, jails, verifiers and DeepSpeed learner, from the shipped warm-up policy

A group that all passed or all failed is skipped (M1.6). Two tasks of each format are of the built-in family that this
policy was warmed up on, so that some of its attempts pass; it solves next to none of the others. After the run, the
steps must be real ones: each trained on its quota of groups of this source whose trajectories differ in reward, with
the advantages R - p (M4.1); its gradient is not zero; the weights of each checkpoint differ from those before it; and
all files of the run hold together (tests/bench/record.py). Results: DIR/formats.json. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from configs.check import load_run
from envs.source import make_source
from envs.task import Split
from tests.bench.record import Expected, look
from tests.bench.rewards import group_lines

ROOT = Path(__file__).parents[2]
CONSOLE = Console(width=160)
FORMATS = ("folder", "swebench", "mimo", "harbor")
POLICY = ROOT / "configs" / "checkpoints" / "policy"


@dataclass(slots=True, kw_only=True)
class Found:
    """What came of one format."""

    form: str
    tasks: int
    sound: int
    """Tasks whose start failed and whose reference passed, each time."""
    validate_s: float
    train_s: float
    outcomes: dict[str, int]
    """Groups by how they ended."""
    passed: dict[str, str]
    """Record -> passes of its valid trajectories, over all its groups."""
    grad_norms: list[float]
    changes: list[float]
    """Largest change of a weight, by step."""
    problems: list[str]


def gagar(*words: object, log: Path) -> str:
    """What a command printed. Raises SystemExit where it fails."""
    command = [sys.executable, "-m", "orchestrator.cli", *map(str, words)]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}; see {log}")
    return log.read_text(encoding="utf-8")


def true_steps(run: Path, source: str, steps: int) -> tuple[list[float], list[float], list[str]]:
    """Gradient norms, largest changes of a weight, and what of the optimiser steps of a run is not as it must be."""
    problems = list(look(run, Expected(quotas={source: 1}, max_staleness=1, every_steps=1), at_rest=True).faults)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    norms = [float(m.get("learner/grad_norm") or 0.0) for m in metrics]
    if len(metrics) != steps or not all(norm > 0.0 for norm in norms) or any(m["learner/skipped"] for m in metrics):
        problems.append(f"{len(metrics)} steps with gradient norms {norms}, not {steps} steps that move the weights")
    for group in group_lines(run):
        rewards = {t["reward"] for t in group["trajectories"] if t["valid"]}
        if group["outcome"] == "trained" and rewards != {0.0, 1.0}:
            problems.append(f"{group['group_id']}: trained on rewards {sorted(rewards)}")
    folders = [POLICY, *(run / "checkpoints" / f"step-{step:06d}" / "policy" for step in range(1, steps + 1))]
    weights = [load_file(folder / "model.safetensors") for folder in folders if folder.is_dir()]
    changes = []
    for old, new in itertools.pairwise(weights):
        if old.keys() != new.keys():
            problems.append("checkpoints hold other weights than the policy they began with")
        changes.append(max(float(np.abs(old[name].astype(np.float32) - new[name]).max()) for name in old.keys() & new))
    if len(changes) != steps or not all(change > 0.0 for change in changes):
        problems.append(f"weights changed by {changes} in {steps} steps")
    return norms, changes, problems


def run_format(form: str, args: argparse.Namespace) -> Found:
    """Check, validate and train; what is found."""
    config = ROOT / "configs" / "tasks" / f"{form}.yaml"
    out: Path = args.out / form
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    gagar("tasks", "check", config, log=out / "check.log")
    begin_s = time.monotonic()
    outcomes = out / "outcomes.jsonl"
    gagar("tasks", "validate", config, "--times", args.times, "--output", outcomes, log=out / "validate.log")
    judged: list[dict[str, Any]] = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    middle_s = time.monotonic()
    overrides = ("name=run", f"output={out}", f"steps={args.steps}", "checkpoint={every_steps: 1, keep: 100}")
    wandb = "telemetry.wandb.mode=disabled"
    gagar("train", config, *overrides, wandb, *args.overrides, log=out / "train.log")
    norms, changes, problems = true_steps(out / "run", form, args.steps)
    groups = group_lines(out / "run")
    stream = make_source(form, load_run(config).config.sources[form])
    passes: dict[str, list[bool]] = {}
    for group in groups:
        record = stream.task(Split.TRAIN, int(group["task_id"].rpartition("/")[2])).meta["record"]
        passes.setdefault(record, []).extend(t["passed"] for t in group["trajectories"] if t["valid"])
    sound = sum(outcome["judgement"] == "sound" for outcome in judged)
    if sound != len(judged):
        problems.append(f"{len(judged) - sound} tasks have no reference that passes")
    return Found(
        form=form,
        tasks=len(judged),
        sound=sound,
        validate_s=round(middle_s - begin_s, 1),
        train_s=round(time.monotonic() - middle_s, 1),
        outcomes=dict(Counter(group["outcome"] for group in groups)),
        passed={record: f"{sum(given)}/{len(given)}" for record, given in sorted(passes.items())},
        grad_norms=norms,
        changes=changes,
        problems=problems,
    )


def show(found: Sequence[Found]) -> None:
    """One row a format."""
    table = Table(title="two steps on every format", title_justify="left")
    columns = (
        "format",
        "tasks",
        "sound",
        "validate s",
        "train s",
        "groups",
        "gradient norms",
        "weights moved",
        "wrong",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "format" else "right")
    for f in found:
        table.add_row(
            *(f.form, str(f.tasks), str(f.sound), f"{f.validate_s:.0f}", f"{f.train_s:.0f}"),
            ", ".join(f"{count} {outcome}" for outcome, count in sorted(f.outcomes.items())),
            ", ".join(f"{norm:.3f}" for norm in f.grad_norms),
            ", ".join(f"{change:.1e}" for change in f.changes),
            str(len(f.problems)),
        )
    CONSOLE.print(table)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--times", type=int, default=2, help="how often each patch is validated")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    args.out = args.out.resolve()
    forms = args.formats.split(",")
    if not set(forms) <= set(FORMATS):
        parser.error(f"formats are {', '.join(FORMATS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    found = [run_format(form, args) for form in forms]
    (args.out / "formats.json").write_text(json.dumps([asdict(f) for f in found], indent=1) + "\n")
    show(found)
    for f in found:
        CONSOLE.print(f"{f.form}, passes by task: {', '.join(f'{name} {given}' for name, given in f.passed.items())}")
    if problems := [f"{f.form}: {problem}" for f in found for problem in f.problems]:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
