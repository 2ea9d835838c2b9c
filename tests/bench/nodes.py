"""Trains on two Ray nodes of this machine, and loses the one with half of the rollout workers and a grader.

    python -m tests.bench.nodes --out FOLDER [--config configs/quickstart.yaml] [--ways killed,cut,drained] [KEY=VALUE]

    killed    every process of the node gets SIGKILL, as when its machine loses power
    frozen    every process of it is stopped, and nobody wakes it up
    cut       its network is cut without a word to either end (needs root and iproute2, see tests/bench/cluster.py)
    drained   it is told to leave as a pod of `gagar infra render` is: Ray drains it, and it gets SIGTERM 30 s later

`ray start` starts a head, which holds the engines and the learner (label pool=home), and a worker node. Each of the two
offers one place for a rollout worker and one for a grader (custom resources). `gagar train` joins the head with
ray.address. Once both rollout workers are busy the node is lost. The run must end its step and do another one with what
is left; then a new node joins, and the pools must fill up on it; then comes the next way. A node that was cut off must
end by itself. At the end the run gets SIGTERM, and its files are held against tests/bench/record.py; every graded patch
is verified again. Result: FOLDER/nodes.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.check import load_run
from configs.schema import RunConfig
from tests.bench import driven
from tests.bench.cluster import ROLES, Cluster, Node
from tests.bench.driven import Driven, Process
from tests.bench.record import Expected, look
from tests.bench.rewards import group_lines, verified_again
from tests.bench.victims import Tail, noticed

NAME = "nodes"
WAYS = ("killed", "frozen", "cut", "drained")
START_S = 900.0
STEP_S = 600.0
DRAIN_S = 30
ALONE_S = 240.0
"""What a node that was cut off may live on."""
PLACES = {"rollout_place": 1.0, "grader_place": 1.0}
WORKERS = ("rollout worker", "grader worker")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=driven.ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--ways", default="killed,cut,drained")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    driven.adopt_orphans()
    cluster = Cluster(out, labels="pool=home", resources=PLACES)
    result: dict[str, Any] = {"ok": False, "ways": [], "network": cluster.no_network or "namespaces"}
    try:
        if "cut" in ways and cluster.network is None:
            raise RuntimeError(f"--ways: cut: {cluster.no_network}")
        overrides = [*_overrides(out, cluster), *args.overrides]
        config = load_run(args.config, overrides).config
        cluster.nodes[0].ready()
        _join(cluster).ready()
        run = Trial(driven.train(args.config, *overrides), out, cluster)
        try:
            for way in ways:
                result["ways"].append(run.lose(way))
                print(json.dumps(result["ways"][-1]), flush=True)
            result |= run.stop()
        finally:
            run.end()
        result |= _files(out / NAME, config)
        result["ok"] = not result["faults"] and not result["left"] and all(not way["faults"] for way in result["ways"])
    except RuntimeError as error:
        result["error"] = str(error)
    finally:
        cluster.shutdown()
        driven.end_all(driven.descendants())
    (out / "nodes.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1), flush=True)
    raise SystemExit(0 if result["ok"] else 1)


def _overrides(out: Path, cluster: Cluster) -> list[str]:
    places = {pool: {place: 1} for pool, place in zip(("rollout", "grader"), PLACES, strict=True)}
    return [
        *(f"name={NAME}", f"output={out}", "steps=1000000", "eval=null", f"ray.address={cluster.address}"),
        *("checkpoint.every_steps=1", "telemetry.wandb.mode=offline", "rollout.workers=2", "grader.workers=2"),
        *("rollout.slots_per_worker=8", "grader.groups_per_worker=4"),
        *(f"{pool}.resources.custom={json.dumps(custom)}" for pool, custom in places.items()),
        *(f"{pool}.resources.labels={{pool: home}}" for pool in ("engine", "grader.backend.engine", "learner")),
    ]


def _join(cluster: Cluster) -> Node:
    return cluster.add(labels="pool=away", resources=PLACES)


class Trial:
    """The run, and what happens to it."""

    def __init__(self, command: list[str], out: Path, cluster: Cluster) -> None:
        self._cluster = cluster
        self._metrics, self._spans = (Tail(out / NAME / f"{name}.jsonl") for name in ("metrics", "spans"))
        self._steps = self._again = 0
        self._run = Driven(command, console=out / "console" / "run.txt", environment=cluster.environment)
        self._wait("the first step", lambda: self._done() > 0, START_S)

    def lose(self, way: str) -> dict[str, Any]:
        """Loses the node that joined last, and waits for a step without it and for the pools to fill up on a new one.

        Raises:
            RuntimeError: one of these does not come.
        """
        lost = self._cluster.nodes[-1]

        def held() -> dict[str, int]:
            return driven.by_role(lost.processes())

        self._wait("work on both nodes", lambda: held().get("jail server", 0) > 0, STEP_S)
        there = {role: held().get(role, 0) for role in WORKERS}
        if set(there.values()) != {1}:
            raise RuntimeError(f"the node holds {held()}, not half of the workers")
        its = {(p.pid, p.start) for p in lost.processes()}
        shown, before, again = len(self._run.text()), self._done(), self._sampled_again()
        seen: dict[str, Any] = {"way": way, "lost": there, "faults": []}
        self._hit(way, lost)
        at_s = time.monotonic()

        def since() -> float:
            return round(time.monotonic() - at_s, 1)

        def alive() -> list[Process]:
            return [p for p in driven.descendants() if (p.pid, p.start) in its]

        def step() -> bool:
            if "noticed_s" not in seen:
                line = next((x for x in self._run.text()[shown:].splitlines()[:-1] if noticed(x)), None)
                if line is not None:
                    seen["noticed_s"], seen["noticed"] = since(), line[:160]
            if "ended_s" not in seen and not alive():
                seen["ended_s"] = since()
            return self._done() > before

        self._wait("the running step", step, STEP_S)
        seen["running_step_s"] = since()
        self._wait("a step that began without the node", lambda: step() and self._done() > before + 1, STEP_S)
        seen["next_step_s"] = since()
        self._wait("word of the loss", lambda: bool(step() and "noticed_s" in seen), STEP_S)
        seen["steps_until_noticed"] = self._done() - before
        joined_s, fresh = since(), _join(self._cluster)
        fresh.ready()
        seen["new_node_up_s"] = round(since() - joined_s, 1)
        self._wait("full pools", lambda: self._filled(fresh), STEP_S)
        seen["refilled_s"] = round(since() - joined_s, 1)
        now = self._done()
        self._wait("a step with the new node", lambda: step() and self._done() > now, STEP_S)
        seen["sampled_again"] = self._sampled_again() - again
        if way == "cut" and not driven.wait_for(lambda: bool(step() and "ended_s" in seen), ALONE_S, 0.5):
            seen["faults"].append(f"the node that was cut off lives after {since():g} s: {driven.by_role(alive())}")
        lost.kill()
        return seen

    def stop(self) -> dict[str, Any]:
        """SIGTERM, and what is left of it."""
        self._run.signal(signal.SIGTERM)
        ended = driven.wait_for(lambda: self._run.ended, 120.0)
        gone = self._run.gone(60.0, keep=ROLES)
        return {
            "took_s": round(self._run.age_s, 1),
            "left": [p.command[:80] for p in gone.left] if ended else ["the driver"],
        }

    def end(self) -> None:
        """Whatever happened."""
        self._run.signal(signal.SIGKILL)
        self._run.process.wait()
        self._run.clean()

    def _hit(self, way: str, node: Node) -> None:
        if way == "killed":
            driven.end_all(node.processes())
        elif way == "frozen":
            node.freeze()
        elif way == "cut":
            assert node.wire is not None
            node.wire.cut()
        else:
            node.drain("the pod is stopped", DRAIN_S)
            threading.Timer(DRAIN_S, node.leave).start()

    def _filled(self, node: Node) -> bool:
        roles = driven.by_role(node.processes())
        return all(roles.get(role, 0) for role in WORKERS) and "jail server" in roles

    def _done(self) -> int:
        self._steps += len(self._metrics.rows())
        return self._steps

    def _sampled_again(self) -> int:
        rows = (s for s in self._spans.rows() if s.get("name") == "rollout")
        self._again += sum(not s["trajectory_id"].endswith(".0") for s in rows)
        return self._again

    def _wait(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        come = driven.wait_for(lambda: self._run.ended or condition(), timeout_s, 0.3)
        if not come or self._run.ended:
            raise RuntimeError(f"{what} did not come in {timeout_s:g} s: {self._run.text()[-1200:]}")


def _files(run_dir: Path, config: RunConfig) -> dict[str, Any]:
    """What the run's files say: conservation, and rewards that no lost node has touched."""
    expected = Expected(
        quotas={name: source.groups_per_step for name, source in config.sources.items()},
        max_staleness=config.scheduler.staleness,
        every_steps=config.checkpoint.every_steps,
    )
    found = look(run_dir, expected, at_rest=True)
    rewards = asyncio.run(verified_again(run_dir))
    groups = group_lines(run_dir)
    faults = [*found.faults, *rewards.pop("faults")]
    return {
        "steps": found.steps,
        "trained": found.trained,
        "groups": found.groups,
        "failed": sum(g["outcome"] == "failed" for g in groups),
        "worker_lost": sum(g["fallback_reason"] == "worker_lost" for g in groups),
        **rewards,
        "faults": faults,
    }


if __name__ == "__main__":
    main()
