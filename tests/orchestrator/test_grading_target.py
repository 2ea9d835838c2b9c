"""Which groups `gagar grade` is given: a run's, folders of one's own, built-in ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folder import group as record_of
from run_folder import trajectory as row_of
from scripted import run_config
from stored_groups import labelled, stored_group

from grader.stored import write_archive
from grader.stored_folder import write_folder
from infra.errors import ConfigError, StorageError
from orchestrator.grading_target import load_target

CONFIG = run_config()


def graded_record(group_id: str, ids: list[str], order_seed: int = 41) -> dict[str, Any]:
    rows = [row_of(f"{group_id}/{end}", True) for end in ids]
    return record_of(group_id, rows, graded=True, grader={"order_seed": order_seed})


def test_a_run_is_graded_again_in_its_own_orders(tmp_path: Path) -> None:
    ends = ["0.0", "1.0", "2.0"]
    records = [
        graded_record("g1", ends, 40),  # it ended, was not yet in a checkpoint, and was sampled again after a resume
        graded_record("g1", ends, 41),
        record_of("ungraded", [row_of("ungraded/0", True)]),
        graded_record("unarchived", ends),
        graded_record("resampled", ["0.1", "1.0", "2.0"]),
        graded_record("g2", ends, 43),
    ]
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name in ("g1", "resampled", "g2"):
        write_archive(tmp_path / "archive", stored_group(name))
    target = load_target(str(tmp_path), CONFIG)
    assert [g.group_id for g in target.groups] == ["g1", "g2"]
    assert target.order_seeds == {"g1": 41, "g2": 43}
    assert target.missing == 2, "an archive of an earlier sampling is not the group's"
    assert [g.group_id for g in load_target(str(tmp_path), CONFIG, 1).groups] == ["g1"]
    (tmp_path / "groups.jsonl").write_text(json.dumps(records[3]) + "\n")
    with pytest.raises(StorageError, match=r"none of its graded groups is archived \(1 are not\)"):
        load_target(str(tmp_path), CONFIG)


def test_folders_of_groups(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_folder(tmp_path / name, labelled(name))
    assert [g.group_id for g in load_target(str(tmp_path), CONFIG).groups] == ["a", "b"]
    assert [g.group_id for g in load_target(str(tmp_path), CONFIG, 1).groups] == ["a"]
    assert [g.group_id for g in load_target(str(tmp_path / "b"), CONFIG).groups] == ["b"]


def test_built_in_groups_are_held_out_and_labelled() -> None:
    groups = load_target("minirepo:heldout:2", CONFIG).groups
    assert len(groups) == 2
    for group in groups:
        assert group.task.split == "heldout"
        assert group.labels and set(group.labels) == {t.trajectory_id for t in group.trajectories if t.passed}
    assert [g.group_id for g in load_target("minirepo:heldout:9", CONFIG, 1).groups] == [groups[0].group_id]
    assert load_target("minirepo:heldout:1:5", CONFIG).groups[0].group_id != groups[0].group_id


@pytest.mark.parametrize(
    "text", ["minirepo:train:3", "minirepo:heldout", "minirepo:heldout:x", "minirepo:heldout:1:2:3"]
)
def test_a_wrong_built_in_name_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write minirepo:heldout:N\[:SEED\]"):
        load_target(text, CONFIG)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; give a run"):
        load_target(str(tmp_path / "nothing"), CONFIG)
    with pytest.raises(ConfigError, match="no group at all"):
        load_target("minirepo:heldout:0", CONFIG)
