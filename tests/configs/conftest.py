"""A small valid configuration and checkpoint folders that are complete but tiny."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str], Path]


def write_model(folder: Path, *, positions: int = 2048, heads: int = 4, shape: tuple[int, int] = (3, 5)) -> Path:
    """A folder with everything that is looked at before a run: real headers, no useful weights."""
    folder.mkdir(parents=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": positions,
        "num_attention_heads": heads,
    }
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text("{}")
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints `policy` and `grader`."""
    write_model(tmp_path / "policy")
    write_model(tmp_path / "grader")
    return tmp_path


@pytest.fixture
def run_file(folder: Path) -> Path:
    """The smallest configuration that passes every check."""
    file = folder / "run.yaml"
    file.write_text(
        """\
name: test
steps: 2
sources:
  code: {type: minirepo, groups_per_step: 2}
  chat:
    type: arith
    groups_per_step: 1
engine: {model: policy}
grader:
  backend:
    type: vllm
    engine: {model: grader}
learner:
  model: policy
eval: {source: code}
"""
    )
    return file
