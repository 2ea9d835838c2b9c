"""The figures of a plan, by hand."""

from __future__ import annotations

from pathlib import Path

from configs.schema import RunConfig
from orchestrator.plan import make_plan, render


def test_figures_of_a_plan(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    header = b'{"a":{"dtype":"F32","shape":[10,4],"data_offsets":[0,160]},"__metadata__":{"format":"pt"}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(160)
    (folder / "model.safetensors").write_bytes(weights)
    config = RunConfig.model_validate(
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
    plan = make_plan(config)
    assert (plan.groups_per_step, plan.trajectories_per_step, plan.tokens_per_step) == (4, 16, 1600)
    assert (plan.rollout_slots, plan.eval_trajectories) == (15, 21)
    assert plan.models[0][2].parameters == 40
    # Steps 2, 4 and 5 leave a checkpoint: fp32 master weights and two moments, and the exported folder.
    assert plan.checkpoint_bytes == 3 * (40 * 12 + len(weights))
    assert {pool.name: (pool.actors, pool.cpus, pool.gpus) for pool in plan.pools} == {
        "policy engines": (2, 2.0, 4.0),
        "rollout workers": (3, 0.0, 0.0),
        "learner ranks": (2, 0.0, 0.0),
    }
    assert "llama, 40 parameters" in render(plan)
    assert not (tmp_path / "runs").exists()
