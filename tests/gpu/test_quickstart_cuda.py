"""The quickstart with every model on one GPU: the same configuration, told `cuda`. Skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRACTION = 0.2  # policy engine, grader engine and learner share the card
ON_CUDA = (
    *("engine.device=cuda", "~engine.kv_cache_gib", "~engine.threads", f"engine.gpu_memory_utilization={FRACTION}"),
    *("grader.backend.engine.device=cuda", "~grader.backend.engine.kv_cache_gib", "~grader.backend.engine.threads"),
    f"grader.backend.engine.gpu_memory_utilization={FRACTION}",
    *("learner.device=cuda", "~learner.threads"),
    *(f"{pool}.resources.gpus=0.3" for pool in ("engine", "grader.backend.engine", "learner")),
)


def gagar(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "orchestrator.cli", *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_the_overrides_make_a_valid_configuration() -> None:
    checked = gagar("config", "check", "configs/quickstart.yaml", *ON_CUDA)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.gpu
def test_quickstart_runs_on_one_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    ran = gagar("train", "configs/quickstart.yaml", f"output={tmp_path}", "steps=2", *ON_CUDA)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    metrics = [json.loads(line) for line in (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2]
    gaps = [m["learner/logprob_gap_max"] for m in metrics if "learner/logprob_gap_max" in m]
    assert gaps and max(gaps) <= 1e-3, "engine and learner, both fp32"
