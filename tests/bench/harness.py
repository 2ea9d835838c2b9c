"""Harnesses that are not ours in real training: what the learner gets must be what the engine sampled, token by token.

    python -m tests.bench.harness --out DIR [--arms mini,rewrite] [--steps 2] [--at-least 50] [--again] [KEY=VALUE]

    mini      mini-swe-agent as it is on PyPI, on the workers, its commands in jails; it only appends
    rewrite   a command in the jail, with OpenAI's client library, that cuts what old commands had printed from its
              history (tests/bench/rewriting_agent.py): from its third call on, each is drift

Each arm is `gagar train` on the quickstart's code tasks, with its engine, jails and DeepSpeed learner, in a process of
its own. That process adds two records and changes nothing else: the actor around vLLM writes every answer of the engine
to a file before anybody else sees it, and the learner group writes every payload that it is given. After the run:

- Each payload holds every call of its trajectory: the prompt as it was sent, the ids, log-probabilities and versions as
  they were sampled, no other token with a loss. Its digest is that in `groups.jsonl`.
- Of every valid trajectory in `groups.jsonl`, trained on or not, whose harness only appended, a payload made from the
  engine's answers alone has the digest in `groups.jsonl`.
- Log-probabilities recomputed by a plain forward pass, with the checkpoint of each token's version, are those recorded,
  within `--tolerance`; so are the learner's own, `learner/logprob_gap_max`.
- `contexts` and `drift` are what follows from what the harness does; the means in `metrics.jsonl` are theirs.

Results: DIR/harness.json. Exit code 1 if anything differs, or fewer than `--at-least` trajectories were trained on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from rollout.trajectory import Payload
from tests.bench.exact import appended, differences, logprob_gap, read_calls, read_payload, write_payload
from tests.bench.rewards import group_lines

ROOT = Path(__file__).parents[2]
CONSOLE = Console(width=160)
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
POLICY = ROOT / "configs" / "checkpoints" / "policy"
MINI = Path(sys.prefix) / "mini-swe-agent"
"""Where the tests install mini-swe-agent, if the environment does not have it."""
ARMS = ("mini", "rewrite")
OVERRIDES = (
    "sources={minirepo: {type: minirepo, groups_per_step: 4, prior_acceptance: 0.6, prior_time_s: 30}}",
    "algorithm={mode: outcome, group_size: 8}",
    "grader=null",
    "eval=null",
    "scheduler.max_inflight_groups=10",
    "checkpoint={every_steps: 1, keep: 100}",
    "rollout.limits.wall_s=600",
    "telemetry.wandb.mode=disabled",
)


def train(overrides: Sequence[str], calls: Path, given: Path) -> None:
    """`gagar train` in this process, with an engine actor and a learner group that write down what passes them."""
    from learner.group import BatchItem, LearnerGroup, StepStats
    from orchestrator import build, cli
    from rollout import engine_actor
    from rollout.engine import Generation

    class Recorded(engine_actor.EngineActor):
        """The engine's actor; its record of a request is complete before the answer leaves."""

        async def generate(self, **request: Any) -> Generation:
            answer = await super().generate(**request)
            line = {
                "request_id": request["request_id"],
                "prompt_ids": request["prompt_ids"],
                "token_ids": answer.token_ids,
                "logprobs": answer.logprobs,
                "versions": answer.versions,
            }
            with (calls / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            return answer

    class Noting(LearnerGroup):
        """The run's learner group."""

        async def train_step(self, items: Sequence[BatchItem], **options: Any) -> StepStats:
            for item in items:
                payload = item.payload if isinstance(item.payload, Payload) else await item.payload
                write_payload(given / f"{quote(item.trajectory_id, safe='')}.npz", payload)
            return await super().train_step(items, **options)

    engine_actor.EngineActor = Recorded  # type: ignore[misc]
    build.LearnerGroup = Noting  # type: ignore[attr-defined]
    sys.argv = ["gagar", "train", str(QUICKSTART), *overrides]
    cli.main()


@dataclass(slots=True, kw_only=True)
class Found:
    """What one arm left."""

    arm: str
    steps: int
    trained: int
    """Trajectories whose payload the learner was given."""
    compared: int
    """Valid trajectories of `groups.jsonl` whose digest was made again from the engine's answers alone."""
    calls: int
    """Requests of those that were trained on."""
    tokens: int
    """Tokens that bear loss."""
    statuses: dict[str, int]
    pass_rate: float
    contexts_mean: float
    drift_mean: float
    gap_same: float | None
    """Largest |recorded - recomputed| log-probability in contexts that one version sampled."""
    gap_mixed: float | None
    """The same in contexts that new weights reached half-way."""
    gap_learner: float | None
    """learner/logprob_gap_max: tokens of the current weights, as the learner saw them."""
    problems: list[str]


def read(arm: str, run: Path, calls: Path, given: Path, *, steps: int, at_least: int, tolerance: float) -> Found:
    """Hold what a run left against what its engines answered."""
    answers = read_calls(calls)
    groups = group_lines(run)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    valid = {t["id"]: t for g in groups for t in g["trajectories"] if t["valid"]}
    trained = {t["id"] for g in groups if g["outcome"] == "trained" for t in g["trajectories"] if t["valid"]}
    payloads = {quote(name, safe=""): name for name in valid}
    kept = {payloads.get(file.stem, file.stem): read_payload(file) for file in sorted(given.glob("*.npz"))}
    problems: list[str] = []
    if set(kept) != trained:
        problems.append(f"the learner was given {len(kept)} trajectories, groups.jsonl has {len(trained)} trained ones")
    if len(kept) < at_least:
        problems.append(f"{len(kept)} trajectories were trained on, fewer than {at_least}")
    if len(metrics) != steps:
        problems.append(f"metrics.jsonl has {len(metrics)} steps, not {steps}")
    models = {0: str(POLICY)}
    models |= {step: str(run / "checkpoints" / f"step-{step:06d}" / "policy") for step in range(1, steps + 1)}
    gaps: dict[str, float] = {}
    for name, payload in kept.items():
        problems += differences(payload, answers.get(name, ()))
        if name in valid and payload.sha256() != valid[name]["payload_sha256"]:
            problems.append(f"{name}: groups.jsonl has the digest of another payload")
        for kind, gap in logprob_gap(payload, models, temperature=1.0).items():
            gaps[kind] = max(gaps.get(kind, 0.0), gap)
    compared = 0
    for name, row in valid.items():
        made = appended(answers.get(name, ()))
        if (made is None) != (row["drift"] > 0):
            problems.append(f"{name}: drift = {row['drift']}, yet the engine was asked otherwise")
        elif made is not None:
            compared += 1
            if made.sha256() != row["payload_sha256"]:
                problems.append(f"{name}: what the engine answered has another digest")
        wanted = max(0, row["turns"] - 2) if arm == "rewrite" else 0
        if (row["drift"], row["contexts"]) != (wanted, wanted + 1):
            problems.append(f"{name}: drift {row['drift']} and {row['contexts']} contexts in {row['turns']} turns")
    learner = [m["learner/logprob_gap_max"] for m in metrics if m.get("learner/logprob_gap_max") is not None]
    for what, gap in (("recomputed", gaps.get("same")), ("the learner's", max(learner, default=None))):
        if gap is not None and gap > tolerance:
            problems.append(f"{what} log-probabilities differ by {gap:.2g}, more than {tolerance:g}")
    problems += _means(groups, metrics)
    return Found(
        arm=arm,
        steps=len(metrics),
        trained=len(kept),
        compared=compared,
        calls=sum(len(answers.get(name, ())) for name in kept),
        tokens=sum(int(payload.loss_mask.sum()) for payload in kept.values()),
        statuses=dict(Counter(t["status"] for g in groups for t in g["trajectories"])),
        pass_rate=fmean(bool(row["passed"]) for row in valid.values()) if valid else 0.0,
        contexts_mean=fmean(row["contexts"] for row in valid.values()) if valid else 0.0,
        drift_mean=fmean(row["drift"] for row in valid.values()) if valid else 0.0,
        gap_same=gaps.get("same"),
        gap_mixed=gaps.get("mixed"),
        gap_learner=max(learner, default=None),
        problems=problems,
    )


def _means(groups: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """The steps' means of contexts and drift lie within what their trajectories have, and drift shows where it is."""
    rows = [t for g in groups for t in g["trajectories"] if t["valid"]]
    problems = []
    for key in ("contexts", "drift"):
        least, most = min(t[key] for t in rows), max(t[key] for t in rows)
        means = [m[f"trajectories/{key}_mean"] for m in metrics]
        if any(not least <= mean <= most for mean in means) or (most > least and not any(m > least for m in means)):
            problems.append(f"trajectories/{key}_mean is {means}, of trajectories with {least} to {most}")
    return problems


def arm_overrides(arm: str, out: Path) -> list[str]:
    """The configuration of an arm."""
    if arm == "mini":
        file = ROOT / "configs" / "harness" / "mini_swe_agent.yaml"
        return [f"rollout.harness={{type: mini_swe_agent, config_file: {file}}}"]
    folder = out / "agent"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("rewriting_agent.py"), folder)
    spec = importlib.util.find_spec("openai")
    if spec is None or spec.origin is None:
        raise SystemExit("OpenAI's client library is not there: pip install openai")
    packages = Path(spec.origin).parents[1]
    command = f"python3 {folder}/rewriting_agent.py {packages}"
    return [
        f"rollout.harness={{type: command, command: {command}, paths: [{folder}, {packages}]}}",
        "engine.max_model_len=2048",
        "rollout.limits.max_total_tokens=2048",  # the copied beginnings of branches count too
    ]


def run_arm(arm: str, args: argparse.Namespace) -> Found:
    """One training in a process of its own, and what is found in what it left."""
    out: Path = args.out / arm
    calls, given = out / "calls", out / "given"
    limits = {"steps": args.steps, "at_least": args.at_least, "tolerance": args.tolerance}
    if args.again:
        return read(arm, out / arm, calls, given, **limits)
    shutil.rmtree(out, ignore_errors=True)
    calls.mkdir(parents=True)
    given.mkdir()
    overrides = [f"name={arm}", f"output={out}", f"steps={args.steps}", *OVERRIDES, *arm_overrides(arm, out)]
    path = [str(ROOT), *([str(MINI)] if arm == "mini" and importlib.util.find_spec("minisweagent") is None else [])]
    command = [sys.executable, "-m", "tests.bench.harness", "--train", "--out", str(out), *overrides, *args.overrides]
    with (out / "console.log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}; see {out / 'console.log'}")
    return read(arm, out / arm, calls, given, **limits)


def show(found: Sequence[Found]) -> None:
    """One row an arm."""
    table = Table(title="harnesses in training", title_justify="left")
    for column in (
        *("arm", "steps", "trained", "digests made again", "calls", "tokens", "pass", "contexts", "drift"),
        *("gap", "gap, mixed", "gap, learner", "differ"),
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for f in found:
        gaps = ("-" if gap is None else f"{gap:.1e}" for gap in (f.gap_same, f.gap_mixed, f.gap_learner))
        counts = (str(f.steps), str(f.trained), str(f.compared), str(f.calls), f"{f.tokens:,}")
        means = (f"{f.pass_rate:.0%}", f"{f.contexts_mean:.2f}", f"{f.drift_mean:.2f}")
        table.add_row(f.arm, *counts, *means, *gaps, str(len(f.problems)))
    CONSOLE.print(table)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--at-least", type=int, default=50, help="trajectories that each arm must train on")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log-probabilities, in nats")
    parser.add_argument("--again", action="store_true", help="only look at what an earlier call left in DIR")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.train:
        train(args.overrides, args.out / "calls", args.out / "given")
        return
    arms = args.arms.split(",")
    if not set(arms) <= set(ARMS):
        parser.error(f"arms are {', '.join(ARMS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    found = [run_arm(arm, args) for arm in arms]
    (args.out / "harness.json").write_text(json.dumps([asdict(f) for f in found], indent=1) + "\n")
    show(found)
    if problems := [f"{f.arm}: {problem}" for f in found for problem in f.problems]:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
