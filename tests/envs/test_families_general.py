"""Generated terminal and arithmetic tasks: solvable, endless, and with splits that share nothing."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from configs.schema import ArithSource, FilesSource
from envs.replay import judge, patch_of
from envs.source import make_source
from envs.task import ExactAnswer, ExpertSource, FinalState, Quality, Split, Task, TaskKind

_COUNT = 120


def _source(family: str, seed: int = 0) -> ExpertSource:
    if family == "files":
        return make_source("mix", FilesSource(type="files", groups_per_step=1, seed=seed))
    return make_source("mix", ArithSource(type="arith", groups_per_step=1, seed=seed))


def _tasks(family: str, split: Split) -> list[Task]:
    source = _source(family)
    return [source.task(split, index) for index in range(_COUNT)]


@pytest.mark.parametrize("family", ["files", "arith"])
@pytest.mark.parametrize("split", list(Split))
def test_experts_are_as_good_as_they_say(family: str, split: Split) -> None:
    source = _source(family)
    for task in _tasks(family, split):
        traces = list(source.experts(task))
        for trace in traces:
            passed = [judge(task, trace.actions) for _ in range(2)]
            assert passed == [trace.quality is not Quality.WRONG] * 2, (task.meta, trace.strategy, trace.actions)
            assert (trace.scores is None) == (trace.quality is Quality.WRONG)
            assert patch_of(task, trace.actions) == ""
        assert {Quality.T1, Quality.WRONG} <= {trace.quality for trace in traces}


@pytest.mark.parametrize("family", ["files", "arith"])
def test_a_task_depends_on_seed_split_and_index_alone(family: str) -> None:
    one, two = _source(family), _source(family)
    two.task(Split.TRAIN, 9)
    for split in Split:
        for index in (0, 3, 10**9):
            task = one.task(split, index)
            assert task == two.task(split, index)
            assert [trace.actions for trace in one.experts(task)] == [trace.actions for trace in two.experts(task)]
            assert task.task_id == f"mix/{split}/0/{index}"
            assert task.source == "mix"
    with pytest.raises(ValueError, match="negative"):
        one.task(Split.TRAIN, -1)
    assert one.task(Split.TRAIN, 1) != _source(family, seed=5).task(Split.TRAIN, 1)


@pytest.mark.parametrize("family", ["files", "arith"])
def test_splits_share_no_template(family: str) -> None:
    templates = {split: {task.meta["template"] for task in _tasks(family, split)} for split in Split}
    assert not templates[Split.TRAIN] & templates[Split.HELDOUT]
    skeletons = {split: {_skeleton(task) for task in _tasks(family, split)} for split in Split}
    assert not skeletons[Split.TRAIN] & skeletons[Split.HELDOUT]


def _skeleton(task: Task) -> str:
    """The statement without names, numbers and things."""
    text = re.sub(r"\b[a-z]+(\.txt|/[a-z]+)\b|\d+|\b[A-Z][a-z][a-z]\b", "_", task.statement)
    words = set(re.findall(r"[a-z]+", " ".join(task.files.values())))
    return " ".join("_" if word.strip(".,:?") in words else word for word in text.split())


def test_splits_share_no_file_name_and_no_data_word() -> None:
    found: dict[Split, set[str]] = defaultdict(set)
    for split in Split:
        for task in _tasks("files", split):
            assert isinstance(task.verifier, FinalState)
            paths = [*task.files, *task.verifier.files]
            found[split] |= set(re.findall(r"[a-z]+", " ".join(path.removesuffix(".txt") for path in paths)))
            found[split] |= set(re.findall(r"[a-z]+", " ".join(task.files.values())))
    assert not found[Split.TRAIN] & found[Split.HELDOUT]
    assert all(len(names) > 200 for names in found.values())


@pytest.mark.parametrize("pattern", [r"\d ([a-z]+s)\b", r"^([A-Z][a-z]{2}) (?:has|had|packs|buys)"])
def test_splits_share_no_thing_and_no_person(pattern: str) -> None:
    words = {
        split: {word for task in _tasks("arith", split) for word in re.findall(pattern, task.statement)}
        for split in Split
    }
    assert not words[Split.TRAIN] & words[Split.HELDOUT]
    assert all(len(found) >= 3 for found in words.values())


def test_kinds_of_task() -> None:
    files, sums = _source("files"), _source("arith")
    assert files.kind is TaskKind.GENERAL
    assert sums.kind is TaskKind.SINGLE_TURN
    assert files.task(Split.TRAIN, 0).needs_sandbox
    assert not sums.task(Split.TRAIN, 0).needs_sandbox
    assert isinstance(sums.task(Split.TRAIN, 0).verifier, ExactAnswer)


def test_every_operation_comes_and_most_experts_look_first() -> None:
    source = _source("files")
    tasks = _tasks("files", Split.TRAIN)
    assert len({task.meta["operation"] for task in tasks}) == 15
    for task in tasks:
        for trace in source.experts(task):
            assert re.match(r"(ls -1|cat) ?", trace.actions[0])
            assert trace.actions[-1] == "submit"
            assert 2 <= len(trace.actions) <= 5
