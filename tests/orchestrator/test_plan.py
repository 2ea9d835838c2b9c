"""The figures of a plan, by hand."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from configs.errors import GagarError
from configs.schema import RunConfig
from orchestrator.manifest import write_manifest
from orchestrator.plan import make_plan, render

WEIGHTS = b'{"a":{"dtype":"F32","shape":[10,4],"data_offsets":[0,160]},"__metadata__":{"format":"pt"}}'


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run of five steps with a policy of 40 parameters."""
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (folder / "model.safetensors").write_bytes(len(WEIGHTS).to_bytes(8, "little") + WEIGHTS + bytes(160))
    return RunConfig.model_validate(
        {
            "name": "test",
            "output": str(tmp_path / "runs"),
            "steps": 5,
            "sources": {
                "a": {"type": "minirepo", "groups_per_step": 3},
                "b": {"type": "arith", "groups_per_step": 1},
            },
            "algorithm": {"mode": "outcome", "group_size": 4},
            "engine": {"model": str(folder), "replicas": 2, "resources": {"gpus": 2, "cpus": 1}},
            "rollout": {"workers": 3, "slots_per_worker": 5, "limits": {"max_total_tokens": 100}},
            "learner": {"model": str(folder), "world_size": 2},
            "checkpoint": {"every_steps": 2, "keep": 9},
            "eval": {"tasks": 7, "samples": 3},
        }
    )


def test_figures_of_a_plan(config: RunConfig, tmp_path: Path) -> None:
    plan = make_plan(config)
    assert (plan.groups_per_step, plan.trajectories_per_step, plan.tokens_per_step) == (4, 16, 1600)
    assert (plan.rollout_slots, plan.eval_trajectories) == (15, 21)
    assert plan.models[0][2].parameters == 40
    # Steps 2, 4 and 5 leave a checkpoint: fp32 master weights and two moments, and the exported folder.
    assert plan.checkpoint_bytes == 3 * (40 * 12 + 8 + len(WEIGHTS) + 160)
    assert {pool.name: (pool.actors, pool.cpus, pool.gpus) for pool in plan.pools} == {
        "policy engines": (2, 2.0, 4.0),
        "rollout workers": (3, 0.0, 0.0),
        "learner ranks": (2, 0.0, 0.0),
    }
    assert "llama, 40 parameters" in render(plan)
    assert not (tmp_path / "runs").exists()


def write_run(config: RunConfig, *steps: int) -> Path:
    """A run folder with checkpoints after these steps."""
    run_dir = Path(config.output) / config.name
    for step in steps:
        folder = run_dir / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        write_manifest(folder)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("name: test\n")
    return run_dir


def test_a_plan_says_what_would_be_resumed(config: RunConfig) -> None:
    run_dir = write_run(config, 2, 4)
    plan = make_plan(config, resume=True)
    assert plan.start == f"resumed at step 4 from {run_dir}/checkpoints/step-000004; 1 of 5 steps remain"
    assert f"  start            {plan.start}\n" in render(plan)
    assert "kept under another name (--resume goes on with it)" in make_plan(config).start


def test_a_plan_of_a_run_without_a_checkpoint(config: RunConfig) -> None:
    run_dir = write_run(config)
    start = make_plan(config, resume=True).start
    assert start == f"at step 0, because {run_dir} has no checkpoint yet; 5 steps remain"


def test_nothing_to_resume_is_said(config: RunConfig) -> None:
    with pytest.raises(GagarError, match="nothing to resume: no run of this name; leave out --resume to start it"):
        make_plan(config, resume=True)
    (Path(config.output) / config.name).mkdir(parents=True)
    with pytest.raises(GagarError, match="not the folder of a run"):
        make_plan(config, resume=True)
    run_dir = write_run(config, 5)
    assert make_plan(config, resume=True).start.endswith("step-000005; only the last evaluation remains")
    (run_dir / "eval.jsonl").write_text('{"label": "after"}\n')
    with pytest.raises(GagarError, match="nothing to resume: already at step 5 of 5; raise `steps`"):
        make_plan(config, resume=True)


def test_a_run_that_is_running_is_left_alone(config: RunConfig) -> None:
    run_dir = write_run(config, 2)
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    status = {
        "state": "running",
        "pid": os.getpid(),
        "process_start": ticks,
        "host": socket.gethostname(),
        "written_s": time.time(),
    }
    (run_dir / "status.json").write_text(json.dumps(status))
    for resume in (True, False):
        with pytest.raises(GagarError, match="still running"):
            make_plan(config, resume=resume)
