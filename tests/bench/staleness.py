"""How old the tokens are that a real asynchronous run trains on, while its learner is slower than its rollouts.

    python -m tests.bench.staleness [--arms drop,wait,on-policy] [--steps 8] [--sleep 12] [--output DIR] [KEY=VALUE ...]

    drop       scheduler.stale: drop (M6.4): a group that grew too old is dropped and counted
    wait       scheduler.stale: wait: a step waits for the groups that would otherwise grow too old
    on-policy  scheduler.asynchronous: false: nothing but tokens of the current weights

Each arm is the quickstart as it ships, with its engines, sandboxes, graders and DeepSpeed learner, but for a learner
that sleeps after every optimiser step, before the new weights are published: meanwhile rollouts run ahead under the old
ones. Ages are optimiser steps between the weights that sampled a token and those that it trains, taken twice: from
`groups.jsonl` (versions of each trajectory, step that trained it), and token by token from the payloads that the
learner was given. The two must agree, and no age may exceed the bound; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
CONSOLE = Console(width=140)
ARMS: Mapping[str, Sequence[str]] = {
    "drop": ("scheduler.stale=drop", "scheduler.max_inflight_groups=24"),
    "wait": ("scheduler.stale=wait", "scheduler.max_inflight_groups=24"),
    "on-policy": ("scheduler={max_inflight_groups: 12, asynchronous: false}",),
}
TOKENS = "tokens.jsonl"
"""What the learner was given: one line a trajectory, {step, id, versions: {version: generated tokens}}."""


def train(config: str, overrides: Sequence[str], tokens: Path, sleep_s: float) -> None:
    """`gagar train` in this process, with a learner that notes how old its tokens are, and sleeps after each step."""
    import numpy as np

    from learner.group import BatchItem, LearnerGroup, StepStats
    from orchestrator import build, cli

    class Slowed(LearnerGroup):
        """The learner of the run, and what it does besides."""

        async def train_step(self, items: Sequence[BatchItem], **options: Any) -> StepStats:
            stats = await super().train_step(items, **options)
            with tokens.open("a", encoding="utf-8") as file:
                for item in items:
                    payload = await item.payload
                    found, counts = np.unique(payload.versions[payload.loss_mask], return_counts=True)
                    versions = dict(zip(found.tolist(), counts.tolist(), strict=True))
                    line = {"step": self.version + 1, "id": item.trajectory_id, "versions": versions}
                    file.write(json.dumps(line) + "\n")
            await asyncio.sleep(sleep_s)
            return stats

    build.LearnerGroup = Slowed  # type: ignore[attr-defined]
    sys.argv = ["gagar", "train", config, *overrides]
    cli.main()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """What one run trained on."""

    bound: int
    """Optimiser steps that a token may be old."""
    audited: Counter[int]
    """Age -> trained trajectories whose oldest token is that old, by groups.jsonl."""
    tokens: Counter[int]
    """Age -> trained tokens, by the payloads."""
    outcomes: Counter[str]
    """Groups by their end."""
    problems: tuple[str, ...]


def read(run: Path, tokens: Path) -> Ages:
    """Recompute the ages of a run from the files it left."""
    limits = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["scheduler"]
    bound = int(limits["max_staleness"]) if limits["asynchronous"] else 0
    groups = [json.loads(line) for line in (run / "groups.jsonl").read_text(encoding="utf-8").splitlines()]
    given = [json.loads(line) for line in tokens.read_text(encoding="utf-8").splitlines()]
    trained = {
        t["id"]: (g["step"], t["policy_versions"])
        for g in groups
        if g["outcome"] == "trained"
        for t in g["trajectories"]
        if t["valid"]
    }
    held = {line["id"]: (line["step"], sorted(map(int, line["versions"]))) for line in given}
    problems = [] if held == trained else ["groups.jsonl and the payloads differ"]
    audited = Counter(step - 1 - min(versions) for step, versions in trained.values() if versions)
    ages = Counter[int]()
    for line in given:
        for version, count in line["versions"].items():
            ages[line["step"] - 1 - int(version)] += count
    if not ages or min(ages) < 0 or max(ages) > bound or max(audited) > bound:
        problems.append(f"ages {sorted(ages)} of tokens are not all within 0..{bound}")
    return Ages(
        bound=bound,
        audited=audited,
        tokens=ages,
        outcomes=Counter(g["outcome"] for g in groups),
        problems=tuple(problems),
    )


def arm(name: str, args: argparse.Namespace, output: Path) -> Ages:
    """One run in a process of its own."""
    tokens = output / f"{name}.{TOKENS}"
    overrides = [
        *(f"name={name}", f"output={output}", f"steps={args.steps}", "eval=null", "telemetry.wandb.mode=disabled"),
        *(f"checkpoint.every_steps={args.steps}", *ARMS[name], *args.overrides),
    ]
    own = ("--train", str(tokens), "--sleep", str(args.sleep))
    command = [sys.executable, "-m", "tests.bench.staleness", *own, *overrides]
    with (output / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}; see {log.name}")
    return read(output / name, tokens)


def show(found: Mapping[str, Ages]) -> None:
    """One row an arm."""
    table = Table(title="age of trained tokens, optimiser steps", title_justify="left")
    columns = ("arm", "bound", "oldest, groups.jsonl", "oldest, payloads", "tokens by age", "trained", "dropped stale")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, ages in found.items():
        total = ages.tokens.total()
        table.add_row(
            name,
            str(ages.bound),
            str(max(ages.audited)),
            str(max(ages.tokens)),
            ", ".join(f"{age}: {count / total:.1%}" for age, count in sorted(ages.tokens.items())),
            f"{ages.outcomes['trained']} groups, {total:,} tokens",
            f"{ages.outcomes['dropped_stale']} groups",
        )
    CONSOLE.print(table)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=12.0, help="seconds that the learner sleeps after a step")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train", type=Path, metavar="TOKENS", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    if args.train is not None:
        train(str(ROOT / "configs" / "quickstart.yaml"), args.overrides, args.train, args.sleep)
        return
    if unknown := set(args.arms.split(",")) - set(ARMS):
        parser.error(f"no such arm: {', '.join(sorted(unknown))}; choose from {', '.join(ARMS)}")
    output = args.output or Path(tempfile.mkdtemp(prefix="gagar-staleness-"))
    output.mkdir(parents=True, exist_ok=True)
    found = {name: arm(name, args, output) for name in args.arms.split(",")}
    show(found)
    CONSOLE.print(f"runs and logs: {output}")
    if problems := [f"{name}: {problem}" for name, ages in found.items() for problem in ages.problems]:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
