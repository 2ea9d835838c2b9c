"""Real pretrained weights through every stage: time to the first step, tokens a second, parity of engine and learner.

    make weights
    python -m tests.bench.smollm2 --out DIR [--steps 3] [KEY=VALUE ...]

One `gagar train configs/smollm2.yaml`, read from its files afterwards. `KEY=VALUE` are overrides, such as
`"learner.lora={rank: 16, alpha: 32}" learner.optimizer.lr=1e-4`. No test runs this: it takes minutes.

    first step    from the start of the command until the first optimiser step's weights were published
    engine        tokens sampled by all rollouts that ended, over the time in which any ran; waits for sandboxes, and
                  the learner beside it, are part of that
    learner       tokens run (prompts and observations included) over the time of the optimiser steps
    parity        |log pi_theta - log mu| over tokens that the weights trained on sampled themselves: should be rounding
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.spans import ROLLOUT, length, merged
from orchestrator.runfiles import read_jsonl, read_spans

ROOT = Path(__file__).parents[2]
NAME = "smollm2"


def train(out: Path, steps: int, overrides: Sequence[str]) -> float:
    """Runs it; returns when it was started, in Unix seconds."""
    command = [
        *(sys.executable, "-m", "orchestrator.cli", "train", str(ROOT / "configs" / f"{NAME}.yaml")),
        *(f"name={NAME}", f"output={out}", f"steps={steps}", "telemetry.wandb.mode=disabled", *overrides),
    ]
    started_s = time.time()
    log = out / f"{NAME}.log"
    with log.open("w") as writing:
        done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=writing, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}; see {log}")
    return started_s


def report(run_dir: Path, started_s: float) -> str:
    """The figures of a run that has ended."""
    metrics, groups = read_jsonl(run_dir / "metrics.jsonl"), read_jsonl(run_dir / "groups.jsonl")
    tokens = {t["id"]: t["response_tokens"] for group in groups for t in group["trajectories"] if t["valid"]}
    spans = [
        span
        for span in read_spans(run_dir / "spans.jsonl")
        if span.name == ROLLOUT and span.attrs.get("trajectory_id") in tokens
    ]
    rollout_s = length(merged((span.start_s, span.end_s) for span in spans))
    sampled = sum(tokens.values())
    run, learning_s = total(metrics, "learner/tokens"), total(metrics, "learner/step_s")
    parts = [f"{part} {total(metrics, 'learner/' + part + '_s'):.0f}" for part in ("forward", "backward", "optimizer")]
    gaps = [
        f"step {m['step']} mean {m['learner/logprob_gap_mean']:.1e} max {m['learner/logprob_gap_max']:.1e}"
        for m in metrics
        if m.get("learner/logprob_gap_mean") is not None
    ]
    outcomes = Counter(group["source"] + " " + group["outcome"] for group in groups)
    graded = [group for group in groups if group["graded"]]
    fallbacks = Counter(group["fallback_reason"] for group in groups if group["fallback_reason"])
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    return "\n".join(
        (
            f"first step    {metrics[0]['time_s'] - started_s:.0f} s after the command",
            f"steps         {', '.join(format(m['time/step_s'], '.0f') for m in metrics)} s",
            f"engine        {sampled / rollout_s:.0f} tokens/s: {sampled} of {len(tokens)} rollouts, {rollout_s:.0f} s",
            f"learner       {run / learning_s:.0f} tokens/s: {run:.0f} in {learning_s:.0f} s ({', '.join(parts)})",
            f"parity        {'; '.join(gaps)} nats",
            f"publishing    {', '.join(format(m['time/publish_s'], '.1f') for m in metrics)} s",
            f"groups        {dict(outcomes)}",
            f"graded        {len(graded)}, fell back: {dict(fallbacks)}",
            f"checkpoints   {', '.join(saved)}",
        )
    )


def total(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of all steps."""
    return sum(float(m[name]) for m in metrics)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run and its log; must not hold one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    if not (ROOT / "models" / NAME / "config.json").is_file() and not any("model=" in o for o in options.overrides):
        raise SystemExit("models/smollm2 is not there; run `make weights` first")
    options.out.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    started_s = train(options.out, options.steps, options.overrides)
    print(report(options.out / NAME, started_s))
    print(f"load average  {before:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
