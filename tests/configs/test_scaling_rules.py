"""What the configuration of elastic pools refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.check import load_run
from configs.errors import ConfigError


def test_a_pool_that_follows_its_queue_starts_inside_its_bounds(run_file: Path) -> None:
    config = load_run(run_file, ["rollout.workers=2", "scaling.rollout={min: 2, max: 4}"]).config
    assert config.scaling.rollout is not None and config.scaling.rollout.target_queue_s == 30.0
    with pytest.raises(ConfigError, match=r"rollout\.workers = 1: is outside scaling\.rollout \(min 2, max 4\)"):
        load_run(run_file, ["scaling.rollout={min: 2, max: 4}"])


def test_bounds_in_the_wrong_order_are_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="max=2 must not be below min=3"):
        load_run(run_file, ["scaling.grader={min: 3, max: 2}"])


def test_graders_that_there_are_none_of_cannot_follow_their_queue(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"scaling\.grader.*has no effect, because there is no grader"):
        load_run(run_file, ["algorithm.mode=outcome", "grader=null", "scaling.grader={max: 2}"])


def test_labels_and_placement_are_read(run_file: Path) -> None:
    config = load_run(run_file, ["grader.resources={labels: {pool: graders}}", "learner.placement=STRICT_PACK"]).config
    assert config.grader is not None and config.grader.resources.labels == {"pool": "graders"}
    assert config.learner.placement == "STRICT_PACK"
