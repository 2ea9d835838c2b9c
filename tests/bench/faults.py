"""Breaks every part of a real run in every way and phase, one after the other in one run, and measures what follows.

    python -m tests.bench.faults --out FOLDER [--only PART[:FAULT[:PHASE]]]... [--limit 240] [--config FILE] [KEY=VALUE]

    killed   SIGKILL
    hung     SIGSTOP, and nobody wakes it up
    slow     stopped four fifths of the time, for 20 s

A cell is one part, fault and phase. It is ok if the part worked again within the limit (what it began after the fault
has ended), the run then did another step, nothing that hangs is left, and a part that was only slow was not lost. After
a cell whose run has ended it is resumed for the next. The driver is watched over by supervision.driver_restarts.

`node` and `link` cells are left out unless named: they need a cluster, which is then made on this machine, with the
rollouts on a node of their own. Of a killed node only the raylet is killed, of a hung or slow one every process is
stopped. The link of the node is cut for good, cut for 8 s (blip), or slow (256 kbit/s for 20 s). Where the node cannot
come back, another one joins five seconds after the fault.

At the end the run is stopped with SIGTERM, and its files are held against tests/bench/record.py. Rewards are checked in
two ways. Weights do not change (a learning rate of 1e-30), and what an engine samples follows from weights, prompt and
request alone; so a run of `--reference` steps with the same seed and no faults must give every trajectory that was not
lost the same reward. It can differ where the policy read a clock, as in "Ran 8 tests in 0.008s": those, told by another
number of tokens, are counted apart. And every graded trajectory is verified once more from its stored patch, in a fresh
sandbox with nothing broken. A masked trajectory must have no reward (M1.3). Results: FOLDER/faults.json and faults.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.check import load_run
from configs.schema import RunConfig
from rollout.spool import rollout_file
from tests.bench import driven, victims
from tests.bench.cluster import ROLES, Cluster, Node
from tests.bench.driven import Driven
from tests.bench.record import Expected, Promise, look
from tests.bench.rewards import compared, group_lines, verified_again
from tests.bench.victims import FAULTS, LINK_FAULTS, ON_CLUSTER, PARTS, Engines, Tail, Watch, faults_of

NAME = "faults"
START_S = 900.0
PHASE_S = 240.0
SETTLE_S = 5.0
PASSES = {"slow": victims.SLOW_S + SETTLE_S, "blip": victims.BLIP_S + SETTLE_S}
"""Faults that pass by themselves -> seconds until they have."""
NEW_NODE_S = 5.0
ENDED_S = 30.0
"""What a process that hangs may live on after its place was taken."""
WORK = {
    "rollout": "rollout",
    "policy-engine": "rollout",
    "grader": "grade",
    "grader-engine": "grade",
    "node": "rollout",
    "link": "rollout",
}
"""Part -> span that only it can end; of all others the next step counts."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """One fault and what came of it. Times in seconds from the fault."""

    part: str
    fault: str
    phase: str
    ok: bool = False
    reason: str = ""
    noticed_s: float | None = None
    """Until the console said so."""
    noticed: str = ""
    recovered_s: float | None = None
    """Until work that the part began after the fault had ended."""
    step_s: float | None = None
    """Until the next step was done."""
    lost: int = 0
    """Trajectories that were sampled again, and grades that fell back because their grader was lost."""
    driver_ended: bool = False


@dataclass(slots=True, kw_only=True)
class Session:
    """The run as the cells see it."""

    args: argparse.Namespace
    out: Path
    overrides: list[str]
    expected: Expected
    run: Driven | None = None
    engines: Engines = field(default_factory=Engines)
    promise: Promise | None = None
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    nodes: Nodes | None = None

    @property
    def run_dir(self) -> Path:
        return self.out / NAME

    def start(self) -> str:
        """Start or resume; returns why it does not run, or ""."""
        resume = (self.run_dir / "config.yaml").exists()
        more = self.nodes.overrides if self.nodes else ()
        command = driven.train(self.args.config, *self.overrides, *more, resume=resume)
        metrics = self.run_dir / "metrics.jsonl"
        steps = driven.lines(metrics)
        environment = self.nodes.cluster.environment if self.nodes else None
        console = self.out / "console" / f"{self.starts:02d}.txt"
        run = self.run = Driven(command, console=console, environment=environment)
        self.starts += 1
        self.engines = Engines()
        told = self.engines.learn(self.run_dir, run, START_S)
        if not driven.wait_for(lambda: run.ended or driven.lines(metrics) > steps, START_S, 0.2):
            return "no step after the start"
        if run.ended:
            return f"the driver ended at the start: {run.text()[-600:]}"
        return "" if told else "the engines could not be told apart"

    def stop(self, number: int) -> None:
        """End the session and look at what it leaves."""
        run = self.run
        assert run is not None
        run.signal(number)
        if number == signal.SIGTERM and not driven.wait_for(lambda: run.ended, 120.0):
            self.faults.append("the driver did not end within 120 s of SIGTERM")
            run.signal(signal.SIGKILL)
        if number == signal.SIGKILL:  # `run` is only the supervisor, and a driver goes on without it
            driven.end_all(p for p in driven.descendants() if p.role == "driver")
        gone = run.gone(60.0, keep=ROLES if self.nodes else ())
        if gone.left:
            self.faults.append(f"processes are left: {[p.command[:80] for p in gone.left[:5]]}")
        run.clean()
        self.run = None
        found = look(self.run_dir, self.expected, self.promise)
        self.promise = found.promise
        self.faults += found.faults

    def place(self, part: str) -> None:
        """A run for this part: those of a node need a cluster, all others have a Ray of their own."""
        if (part in ON_CLUSTER) == (self.nodes is not None):
            return
        if self.run is not None:
            self.stop(signal.SIGTERM)
        if self.nodes is not None:
            self.nodes.cluster.shutdown()
        self.nodes = Nodes(self.out) if part in ON_CLUSTER else None


class Nodes:
    """A head for everything else, and one node at a time for the rollouts."""

    def __init__(self, out: Path) -> None:
        self.cluster = Cluster(out, labels="pool=home")
        home = ("engine", "grader", "grader.backend.engine", "learner")
        self.overrides: Sequence[str] = (
            f"ray.address={self.cluster.address}",
            "rollout.resources.custom={rollouts: 1}",
            *(f"{pool}.resources.labels={{pool: home}}" for pool in home),
        )
        """Of the run that joins it."""
        try:
            self.cluster.nodes[0].ready()
            self.node = self.add()
        except BaseException:
            self.cluster.shutdown()
            raise

    def add(self) -> Node:
        """One more, which takes the place of the last.

        Raises:
            RuntimeError: it does not start.
        """
        self.node = self.cluster.add(labels="pool=away", resources={"rollouts": 1})
        self.node.ready()
        return self.node


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PART[:FAULT[:PHASE]]", default=[])
    parser.add_argument("--limit", type=float, default=240.0, help="seconds until a cell must be over")
    parser.add_argument("--reference", type=int, default=8, help="steps of the run without faults; 0: none")
    parser.add_argument("--config", type=Path, default=driven.ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    cells = chosen(args.only)
    if not cells:
        faults = f"faults {', '.join(FAULTS)}, of a link {', '.join(LINK_FAULTS)}"
        parser.error(f"--only names no cell; parts are {', '.join(PARTS)}, {faults}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    driven.adopt_orphans()
    overrides = [
        *(f"name={NAME}", f"output={out}", "steps=1000000", "eval=null", "checkpoint.every_steps=1"),
        *("telemetry.wandb.mode=offline", "supervision.driver_restarts=100", "learner.optimizer.lr=1e-30"),
        *args.overrides,
    ]
    config = load_run(args.config, overrides).config
    expected = Expected(
        quotas={name: source.groups_per_step for name, source in config.sources.items()},
        max_staleness=config.scheduler.staleness,
        every_steps=1,
    )
    session = Session(args=args, out=out, overrides=overrides, expected=expected)
    for cell in cells:
        _one(session, cell)
        print(json.dumps(asdict(cell)), flush=True)
        _write(out, config, cells, session, None)
    session.place("none")
    if session.run is not None:
        session.stop(signal.SIGTERM)
    rewards = asyncio.run(verified_again(session.run_dir))
    session.faults += rewards["faults"]
    if args.reference:
        rewards |= _reference(session, args)
    result = _write(out, config, cells, session, rewards)
    print((out / "faults.md").read_text(), flush=True)
    raise SystemExit(0 if result["ok"] else 1)


def chosen(only: Sequence[str]) -> list[Cell]:
    """The cells that are asked for; those that end the driver last, because they cost a start."""
    wanted = [word.split(":") for word in only]
    cells = [
        Cell(part=part, fault=fault, phase=phase)
        for part, phases in PARTS.items()
        for fault in faults_of(part)
        for phase in phases
        if any(all(a == b for a, b in zip(w, (part, fault, phase), strict=False)) for w in wanted)
        or (not wanted and part not in ON_CLUSTER)
    ]
    return sorted(cells, key=lambda c: (c.part == "driver", c.part in ON_CLUSTER))


# ---- one cell -------------------------------------------------------------------------------------------------------


def _one(session: Session, cell: Cell) -> None:
    """Wait for the phase, hit, watch, and tidy up for the next."""
    session.place(cell.part)
    if session.run is not None and session.run.ended:
        session.stop(signal.SIGKILL)
    if session.run is None and (problem := session.start()):
        cell.reason = problem
        if session.run is not None:
            session.stop(signal.SIGKILL)
        return
    run, run_dir = session.run, session.run_dir
    assert run is not None
    if not Watch(run_dir).until(cell.phase, run, PHASE_S):
        cell.reason = "the driver ended before the fault" if run.ended else f"the phase did not come in {PHASE_S:g} s"
        return
    node = session.nodes.node if session.nodes else None
    found = victims.victims(cell.part, run, run_dir, session.engines, node)
    if not found:
        cell.reason = "no such process"
        return
    if cell.part == "link" and (node is None or node.wire is None):
        cell.reason = f"no wire to cut: {session.nodes.cluster.no_network if session.nodes else ''}"
        return
    spans, metrics, groups = (Tail(run_dir / f"{name}.jsonl") for name in ("spans", "metrics", "groups"))
    shown = len(run.text())
    hit = victims.hit(cell.fault, cell.part, found, node.wire if node else None)
    work, steps_after = WORK.get(cell.part), 0
    joins = Joins(session) if node and cell.fault not in PASSES else None
    now_s = 0.0
    while now_s < session.args.limit and not run.ended:
        time.sleep(0.02)
        now_s = time.monotonic() - hit.at_s
        if cell.noticed_s is None:
            for line in run.text()[shown:].splitlines()[:-1]:
                if victims.noticed(line):
                    cell.noticed_s, cell.noticed = round(now_s, 1), line[:160]
                    break
        for span in spans.rows():
            if span.get("start_s", 0.0) <= hit.at_s:
                continue
            if cell.recovered_s is None and span["name"] == work and _whole(run_dir, span):
                cell.recovered_s = round(now_s, 1)
            cell.lost += span["name"] == "rollout" and not span["trajectory_id"].endswith(".0")
        for _ in metrics.rows():
            steps_after += cell.recovered_s is not None
            cell.step_s = cell.step_s or round(now_s, 1)
            if work is None and cell.recovered_s is None:
                cell.recovered_s = round(now_s, 1)
        if steps_after and now_s > PASSES.get(cell.fault, 0.0):
            break
    cell.lost += sum(g["fallback_reason"] == "worker_lost" for g in groups.rows())
    if joins is not None:
        joins.join()
    _judge(session, cell, hit, steps_after)
    if joins is not None and node is not None:
        node.kill()


class Joins(threading.Thread):
    """A node that joins a while after the fault."""

    def __init__(self, session: Session) -> None:
        super().__init__(daemon=True)
        self._session = session
        self.start()

    def run(self) -> None:
        time.sleep(NEW_NODE_S)
        assert self._session.nodes is not None
        try:
            self._session.nodes.add()
        except RuntimeError as error:
            self._session.faults.append(str(error))


def _whole(run_dir: Path, span: dict[str, Any]) -> bool:
    """Whether the work has come to something: of a rollout that was lost no file is kept."""
    if span["name"] != "rollout":
        return True
    return rollout_file(run_dir / "rollouts", span["group_id"], span["trajectory_id"]).exists()


def _judge(session: Session, cell: Cell, hit: victims.Hit, steps_after: int) -> None:
    """Fill in `ok` and `reason`, and leave the run fit for the next cell."""
    run = session.run
    assert run is not None
    if cell.part not in ("wandb", *ON_CLUSTER):  # Ray takes a while to end a process that does not answer it
        driven.wait_for(lambda: not victims.still_stopped(hit.pids), ENDED_S, 0.5)
    stopped = victims.still_stopped(hit.pids)
    if run.ended:
        cell.driver_ended = True
        cell.reason = f"the driver ended with {run.process.returncode}: {run.text()[-300:]}"
    elif cell.recovered_s is None:
        cell.reason = f"did not work again within {session.args.limit:g} s"
    elif not steps_after:
        cell.reason = f"no step within {session.args.limit:g} s"
    elif stopped and cell.part not in ("wandb", *ON_CLUSTER):  # W&B is a view; a frozen machine stays frozen
        cell.reason = "the run goes on, but the process that hangs is still there"
    elif cell.fault in PASSES and "lost" in cell.noticed:
        cell.reason = "it would have come back, and was taken for lost"
    else:
        cell.ok = True
    if stopped and cell.part != "node":  # a frozen node is killed
        victims.release(stopped)
    if not cell.ok and not cell.driver_ended and (cell.recovered_s is None or not steps_after):
        session.stop(signal.SIGKILL)  # else the next cell would meet this one's fault


def _reference(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    """The same run without faults, and what of it differs."""
    overrides = [*session.overrides, "name=reference", f"steps={args.reference}"]
    run = Driven(driven.train(args.config, *overrides), console=session.out / "console" / "reference.txt")
    driven.wait_for(lambda: run.ended, START_S + args.limit * args.reference, 0.2)
    run.signal(signal.SIGKILL)
    run.gone(60.0)
    run.clean()
    if run.process.returncode:
        session.faults.append(f"the run without faults ended with {run.process.returncode}: {run.text()[-600:]}")
    found = compared(group_lines(session.run_dir), group_lines(session.out / "reference"))
    session.faults += found.pop("different")
    return found


# ---- results --------------------------------------------------------------------------------------------------------


def _write(
    out: Path, config: RunConfig, cells: Sequence[Cell], session: Session, rewards: dict[str, Any] | None
) -> dict[str, Any]:
    done = [c for c in cells if c.ok or c.reason]
    result = {
        "ok": all(c.ok for c in done) and not session.faults,
        "cells": [asdict(c) for c in done],
        "rewards": rewards,
        "faults": session.faults,
        "starts": session.starts,
        "group_size": config.algorithm.group_size,
    }
    (out / "faults.json").write_text(json.dumps(result, indent=1) + "\n")
    rows = ["| part | fault | phase | | noticed s | works again s | next step s | lost | |", "|" + "---|" * 9]
    for c in done:
        times = (f"{t:g}" if t is not None else "-" for t in (c.noticed_s, c.recovered_s, c.step_s))
        why = (c.reason or c.noticed).replace("|", "/").replace("\n", " ")[:160]
        mark = "ok" if c.ok else "FAILED"
        rows.append(f"| {c.part} | {c.fault} | {c.phase} | {mark} | {' | '.join(times)} | {c.lost} | {why} |")
    if rewards is not None:
        rows += ["", f"{sum(c.ok for c in done)} of {len(done)} cells; rewards: {json.dumps(rewards)}"]
    rows += [f"- fault: {fault[:300]}" for fault in session.faults]
    (out / "faults.md").write_text("\n".join(rows) + "\n")
    return result


if __name__ == "__main__":
    main()
