"""Tiers of patches of built-in tasks, from their scripted solutions alone."""

from __future__ import annotations

import pytest

from configs.schema import MinirepoSource
from envs.minirepo.family import MinirepoTasks
from envs.patch import unified_diff
from envs.replay import final_files, patch_of
from envs.task import ExpertTrace, Quality, Split, Task
from grader.rubric import Tier
from orchestrator.known_tiers import KnownTiers


@pytest.fixture(scope="module")
def source() -> MinirepoTasks:
    return MinirepoTasks("minirepo", MinirepoSource(type="minirepo", groups_per_step=0, seed=3))


@pytest.fixture(scope="module")
def task(source: MinirepoTasks) -> Task:
    return source.task(Split.HELDOUT, 5)


@pytest.fixture(scope="module")
def known(source: MinirepoTasks, task: Task) -> KnownTiers:
    return KnownTiers.of(source, task)


def test_every_script_has_the_tier_that_it_was_written_for(
    source: MinirepoTasks, task: Task, known: KnownTiers
) -> None:
    best: dict[str, str] = {}
    for trace in source.experts(task):
        if trace.quality is not Quality.WRONG:
            patch = patch_of(task, trace.actions)
            best[patch] = min(best.get(patch, trace.quality.value), trace.quality.value)
    assert set(best.values()) >= {"T1", "T3"}
    assert {patch: known(patch) for patch in best} == best


def clean(source: MinirepoTasks, task: Task) -> ExpertTrace:
    return next(t for t in source.experts(task) if t.strategy == "clean")


@pytest.mark.parametrize(
    ("added", "tier"),
    [
        ("# words that no script has", Tier.T2),
        ("XYZ = 12345", Tier.T2),
        ("import os", Tier.T2),
        ("import os\n\ndef zzz():\n    return 77", Tier.T3),
        ("import sys", None),
        ("# words\nXYZ = 12345", None),
    ],
)
def test_other_words_in_the_same_place_are_known_too(
    source: MinirepoTasks, task: Task, known: KnownTiers, added: str, tier: Tier | None
) -> None:
    files = final_files(task, clean(source, task).actions)
    path = next(p for p in files if p.endswith(".py") and not p.startswith("test_"))
    assert known(unified_diff(task.files, {**files, path: f"{files[path]}{added}\n"})) is tier


def test_a_repair_that_nobody_scripted_is_unknown(source: MinirepoTasks, task: Task, known: KnownTiers) -> None:
    assert known("") is None
    files = final_files(task, clean(source, task).actions)
    path = next(p for p in files if files[p] != task.files.get(p))
    lines = [line for line in files[path].splitlines() if line.strip()]
    assert known(unified_diff(task.files, {**files, path: "\n".join(lines[:-1]) + "\n"})) is None
    weakened = {**files, "test_visible.py": task.files["test_visible.py"].replace("self.assert", "pass  # ", 1)}
    assert known(unified_diff(task.files, weakened)) is Tier.T3
