"""The real thing, small: a run that is killed and resumed, then loses its learner, looked at through its files."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
STEPS = 3
COMMAND = (
    *(sys.executable, "-m", "orchestrator.cli", "train", str(ROOT / "configs" / "quickstart.yaml")),
    *("name=e2e", f"steps={STEPS}", "checkpoint.every_steps=1"),
    *("sources.minirepo.groups_per_step=3", "sources.arith.groups_per_step=0", "eval.tasks=6"),
)

SECRETS = {"PLANTED_API_KEY": "open-sesame-4417/x", "DATABASE_PASSWORD": "correct-horse-battery"}
"""In the environment of the run; no file and no line of it may hold their values."""

pytestmark = pytest.mark.e2e


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed with SIGKILL after its first checkpoint, resumed, whose learner is killed after one step more."""
    output = tmp_path_factory.mktemp("runs")
    command = (*COMMAND, f"output={output}")
    environ = {**os.environ, **SECRETS}
    run = output / "e2e"
    log = output / "log.txt"
    heard: set[tuple[str, str]] = set()
    with log.open("w") as out:
        first = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True, env=environ)
        deadline = time.monotonic() + 300.0
        while not list(run.glob("checkpoints/step-*/state.json")):
            assert first.poll() is None and time.monotonic() < deadline, log.read_text()
            heard |= listeners(first.pid)
            time.sleep(1.0)
        (output / "listeners.json").write_text(json.dumps(sorted(heard)))
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        killed_after = len(lines(run / "metrics.jsonl"))
        assert 1 <= killed_after < STEPS, "the kill must fall between steps"
        resumed = subprocess.Popen((*command, "--resume"), cwd=ROOT, stdout=out, stderr=out, env=environ)
        deadline = time.monotonic() + 400.0
        while len(lines(run / "metrics.jsonl")) == killed_after:
            assert resumed.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        (learner,) = named(resumed.pid, "Learner")
        learner.kill()
        assert resumed.wait(timeout=400.0) == 0, log.read_text()
    return run


def named(pid: int, word: str) -> list[psutil.Process]:
    """What a process has started and that has the word in its name."""
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [one] if word in one.name() else []
    return found


def listeners(pid: int) -> set[tuple[str, str]]:
    """(process, address) of every listening socket of a process and of what it has started."""
    found = set()
    driver = psutil.Process(pid)
    for one in (driver, *driver.children(recursive=True)):
        try:
            connections = one.net_connections("inet")
            found |= {(one.name(), c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN}
        except psutil.Error:  # it has just ended
            continue
    return found


def test_nothing_that_a_run_starts_can_be_reached_from_another_machine(run_dir: Path) -> None:
    heard = json.loads((run_dir.parent / "listeners.json").read_text())
    names = " ".join(name for name, _ in heard)
    assert all(part in names for part in ("gcs_server", "raylet", "Engine", "Rollout", "Grader", "Learner")), names
    addresses = [(name, ipaddress.ip_address(address.removeprefix("::ffff:"))) for name, address in heard]
    assert [(name, str(address)) for name, address in addresses if not address.is_loopback] == []


def test_no_file_and_no_line_of_a_run_holds_a_secret_of_its_environment(run_dir: Path) -> None:
    for path in (run_dir.parent / "log.txt", *(p for p in run_dir.rglob("*") if p.is_file())):
        content = path.read_bytes()
        assert not [name for name, value in SECRETS.items() if value.encode() in content], path


def test_the_resumed_run_has_every_step_once(run_dir: Path) -> None:
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_a_lost_learner_starts_again_inside_the_run(run_dir: Path) -> None:
    log = (run_dir.parent / "log.txt").read_text()
    assert log.count("the learner was lost") == 1
    assert lines(run_dir / "metrics.jsonl")[-1]["restarts/learner"] == 1
    assert log.count("policy engine ready") == 2, "engines stay: they start once in each process"


def test_no_group_is_trained_twice(run_dir: Path) -> None:
    groups = lines(run_dir / "groups.jsonl")
    ids = [g["group_id"] for g in groups]
    assert len(ids) == len(set(ids))
    trained = Counter((g["step"], g["source"]) for g in groups if g["outcome"] == "trained")
    quotas = {"minirepo": 3, "files": 1}
    assert trained == {(step, s): n for step in range(1, STEPS + 1) for s, n in quotas.items()}


def test_groups_follow_their_schema(run_dir: Path) -> None:
    schema = json.loads((ROOT / "orchestrator" / "groups.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    groups = lines(run_dir / "groups.jsonl")
    assert groups
    for group in groups:
        validator.validate(group)


def recomputed(group: Mapping[str, Any]) -> Sequence[float]:
    """What an outsider computes from one line alone (M4.1, M4.3)."""
    valid = [t for t in group["trajectories"] if t["valid"]]
    rewards = [t["reward"] for t in valid]
    mean = sum(rewards) / len(rewards)
    a = [r - mean for r in rewards]
    if group["mode"] == "outcome":
        return a
    weights = [t["factor"] if t["passed"] else 1.0 for t in valid]
    up = sum(x for x, t in zip(a, valid, strict=True) if t["passed"])
    down = sum(x * w for x, w, t in zip(a, weights, valid, strict=True) if t["passed"])
    scale = min(up / down, group["lambda_max"])
    b = [scale * w * x if t["passed"] else x for x, w, t in zip(a, weights, valid, strict=True)]
    return [x - sum(b) / len(b) for x in b]


def test_an_outsider_recomputes_every_advantage(run_dir: Path) -> None:
    trained = [g for g in lines(run_dir / "groups.jsonl") if g["outcome"] == "trained"]
    for group in trained:
        given = [t["advantage"] for t in group["trajectories"] if t["valid"]]
        assert given == pytest.approx(recomputed(group), abs=1e-9)
        assert sum(given) == pytest.approx(0.0, abs=1e-9)


def test_grades_really_move_advantages(run_dir: Path) -> None:
    code = [g for g in lines(run_dir / "groups.jsonl") if g["source"] == "minirepo" and g["outcome"] == "trained"]
    graded = [g for g in code if g["graded"]]
    assert graded, [g["fallback_reason"] for g in code]
    for group in graded:
        passing = [t for t in group["trajectories"] if t["passed"]]
        assert all(t["tier"] in ("T1", "T2", "T3") and 0.0 < t["factor"] <= 1.0 for t in passing)
    moved = [
        g
        for g in graded
        for t in g["trajectories"]
        if t["valid"] and abs(t["advantage"] - (t["reward"] - _mean_reward(g))) > 1e-6
    ]
    assert moved, "at least one grade made an advantage differ from the outcome advantage"


def _mean_reward(group: Mapping[str, Any]) -> float:
    rewards = [t["reward"] for t in group["trajectories"] if t["valid"]]
    return sum(rewards) / len(rewards)


def test_ungraded_sources_keep_outcome_advantages(run_dir: Path) -> None:
    others = [g for g in lines(run_dir / "groups.jsonl") if g["source"] != "minirepo"]
    assert others and all(g["mode"] == "outcome" and g["grader"] is None for g in others)


def test_tokens_carry_the_version_that_sampled_them(run_dir: Path) -> None:
    """M6.4: asynchronous, killed and resumed; no token that was trained is older than allowed."""
    scheduler = yaml.safe_load((run_dir / "config.yaml").read_text())["scheduler"]
    assert scheduler["asynchronous"]
    trained = [g for g in lines(run_dir / "groups.jsonl") if g["outcome"] == "trained"]
    ages = [g["step"] - 1 - v for g in trained for t in g["trajectories"] for v in t["policy_versions"]]
    assert min(ages) >= 0 and max(ages) <= scheduler["max_staleness"]


def test_engine_and_learner_agree_on_fresh_tokens(run_dir: Path) -> None:
    gaps = [m["learner/logprob_gap_max"] for m in lines(run_dir / "metrics.jsonl") if "learner/logprob_gap_max" in m]
    assert gaps and max(gaps) <= 1e-3


def test_the_run_leaves_what_it_promises(run_dir: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "groups.jsonl", "spans.jsonl", "report.html", "status.json"):
        assert (run_dir / name).stat().st_size > 0, name
    assert list(run_dir.glob("wandb/**/*.wandb")), "the offline W&B run"
    policy = run_dir / "checkpoints" / f"step-{STEPS:06d}" / "policy"
    assert (policy / "config.json").exists() and list(policy.glob("*.safetensors"))
    assert [e["label"] for e in lines(run_dir / "eval.jsonl")] == ["before", "after"]


def test_graded_groups_are_archived_shown_and_graded_again(run_dir: Path, tmp_path: Path) -> None:
    asked = {g["group_id"] for g in lines(run_dir / "groups.jsonl") if g["grader"] is not None}
    archived = {path.name.removesuffix(".json.gz") for path in (run_dir / "archive").iterdir()}
    assert asked and asked <= archived
    gagar = (sys.executable, "-m", "orchestrator.cli")
    shown = subprocess.run(
        (*gagar, "show", "group", str(run_dir), min(asked)), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0 and min(asked) in shown.stdout, shown.stderr
    output = tmp_path / "grades.jsonl"
    grader = ("--grader", str(ROOT / "configs" / "quickstart.yaml"), "--output", str(output))
    graded = subprocess.run(
        (*gagar, "grade", str(run_dir), *grader, "--limit", "2"), cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert graded.returncode == 0, graded.stdout + graded.stderr
    assert {row["group_id"] for row in lines(output)} <= asked
    assert "valid verdicts" in graded.stdout


def test_every_metric_of_a_real_run_is_documented(run_dir: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    names = {name for line in lines(run_dir / "metrics.jsonl") for name in line} - {"step", "time_s", "histograms"}
    general = {re.sub(r"/(minirepo|files|arith)(?=/|$)", "/{source}", name) for name in names}
    general = {re.sub(r"^(grading/fallback_rate)/\w+$", r"\1/{reason}", name) for name in general}
    general = {re.sub(r"^(infra/failures)/\w+$", r"\1/{class}", name) for name in general}
    general = {re.sub(r"^pool/(rollout|engine|grader)/", "pool/{name}/", name) for name in general}
    assert general - documented == set()
    assert {"restarts/learner", "storage/faults_total", "pool/rollout/busy"} <= names
