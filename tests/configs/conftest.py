"""A small valid configuration and checkpoint folders that are complete but tiny."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_folders import write_model


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
