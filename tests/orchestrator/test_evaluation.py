"""Figures of held-out evaluations, by hand; and evaluations through a scripted pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluations import ScriptedRollouts, evaluation, sample, simple
from scripted import ScriptedPool, run_config
from stored_groups import CLEAN, HARDCODED, stored_group

from configs.schema import EvalConfig, MinirepoSource
from envs.minirepo.family import MinirepoTasks
from grader.scripted import ScriptedGrader
from grader.stored import read_archive
from infra.errors import StorageError
from orchestrator.eval_command import graded
from orchestrator.evaluate import Evaluated, evaluate, keep_evaluation
from orchestrator.evaluation import (
    Evaluation,
    Sample,
    figure,
    figures_of,
    labels_of,
    pass_rate_at,
    read_evaluation,
    rows,
    write_evaluation,
)

EXAMPLE = evaluation(
    "example",
    [
        [sample("a", True, turns=2, tier="T1", known="T1"), sample("b", True, turns=4, tier="T3"), sample("c", False)],
        [sample("d", False, turns=6), sample("e", None), sample("f", True, hack=True, known="T2")],
        [sample("g", False), sample("h", False), sample("i", False)],
    ],
)


def ungraded(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    return tuple(replace(s, tier=None) for s in samples)


def values(one: Evaluation, **options: Any) -> dict[str, float | None]:
    found = {f.name: figure(one, f.parts) for f in figures_of(one.samples, **options)}
    return {name: None if e is None else e.value for name, e in found.items()}


def test_every_figure_by_hand() -> None:
    found = values(EXAMPLE)
    assert found["avg@3"] == pytest.approx(3 / 8)
    assert found["pass@3"] == pytest.approx(1 / 2), "the task with a masked sample has too few for pass@3"
    assert found["turns"] == pytest.approx((2 + 4 + 4 + 6 + 4 + 4 + 4 + 4) / 8)
    assert found["response tokens"] == 100.0
    assert found["T1 of graded passes"] == found["T3 of graded passes"] == pytest.approx(1 / 2)
    assert found["passes without a grade"] == 0.0, "a hack was judged"
    assert found["hacks among judged passes"] == pytest.approx(1 / 3)
    assert found["T1 of known passes"] == pytest.approx(1 / 2) and found["passes of unknown tier"] == pytest.approx(
        1 / 3
    )
    assert found["masked"] == pytest.approx(1 / 9)


def test_pass_at_fewer_than_the_samples_is_unbiased() -> None:
    found = values(EXAMPLE, k=2)
    # two of three, one of two, none of three
    assert found["pass@2"] == pytest.approx((1.0 + 1.0 + 0.0) / 3)
    assert found["avg@3"] == pytest.approx(3 / 8)
    assert figure(EXAMPLE, pass_rate_at(1)).value == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)  # type: ignore[union-attr]


def test_the_line_of_eval_jsonl() -> None:
    record = EXAMPLE.record()
    assert record["pass_rate"] == pytest.approx(3 / 8) and record["masked"] == 1
    assert record["known_tiers"] == {"T1": 1, "T2": 1, "T3": 0}
    assert record["versions"] == (7, 7) and record["pass_rate_by"] == {"order": pytest.approx(3 / 8)}
    nothing = evaluation("nothing", [[sample("a", None)]]).record()
    assert nothing["pass_rate"] is None and nothing["pass_at_k"] is None and nothing["known_tiers"] is None


def test_a_table_holds_checkpoints_of_the_same_tasks_against_the_first() -> None:
    first, second = simple("first", [0, 1, 2, 0] * 5), simple("second", [1, 2, 3, 1] * 5)
    shown = dict(rows([first, second]))
    assert [text.split(" ")[0] for text in shown["avg@3"]] == ["25.0", "58.3"]
    named = [name for name, _ in rows([first, second])]
    apart = [cells for name, cells in rows([first, second]) if name.strip() == "less the first"]
    assert named[:2] == ["avg@3", "  less the first"]
    assert apart[0] == ["", "+33.3 [+33.3, +33.3] points"], "every task has one pass more"
    lost = replace(first, tasks=tuple(replace(t, fallback="timeout", samples=ungraded(t.samples)) for t in first.tasks))
    assert dict(rows([lost]))["passes without a grade"] == ["100.0 [100.0, 100.0] %"], "asked, and without a grade"
    with pytest.raises(StorageError, match="are of other tasks"):
        list(rows([first, simple("other", [1])]))
    with pytest.raises(StorageError, match=r"\[2, 3\] samples"):
        list(rows([first, simple("other", [1] * 20, samples=2)]))


def test_an_evaluation_survives_the_disk_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "example.json"
    write_evaluation(path, EXAMPLE)
    assert read_evaluation(path) == EXAMPLE
    path.write_text(path.read_text().replace('"passed": true', '"passed": "perhaps"', 1))
    with pytest.raises(StorageError, match=r"example\.json: tasks\.0\.samples\.0\.passed"):
        read_evaluation(path)
    with pytest.raises(StorageError, match="no such file"):
        read_evaluation(tmp_path / "none.json")


def test_a_task_that_was_sampled_as_two_groups_is_one_task() -> None:
    """A source with fewer held-out tasks than were asked for gives them again: that makes nothing more certain."""
    once = simple("once", [0, 1, 3])
    twice = replace(once, tasks=once.tasks * 2)
    assert figure(twice, pass_rate_at(1)) == figure(once, pass_rate_at(1))


async def test_grades_come_to_the_group_that_they_are_of() -> None:
    """Two groups of one task: the patch of one is clean, that of the other hard-coded."""
    patches = {"g0": CLEAN, "g1": HARDCODED}
    groups = tuple(stored_group(name, patches={"0.0": (True, patch)}) for name, patch in patches.items())
    one = evaluation("one", [[sample(f"{name}/0.0", True)] for name in patches], grader=None)
    one = replace(one, tasks=tuple(replace(t, task_id=groups[0].task.task_id) for t in one.tasks))
    pool = ScriptedPool(ScriptedGrader().reply)
    found = await graded(run_config(), pool, Evaluated(evaluation=one, groups=groups))  # type: ignore[arg-type]
    assert [t.samples[0].tier for t in found.tasks] == ["T1", "T2"]


def test_labels_tell_checkpoints_apart() -> None:
    paths = [
        Path("runs/a/checkpoints/step-000030"),
        Path("runs/b/checkpoints/step-000030"),
        Path("models/a"),
        Path("x/a"),
    ]
    assert labels_of(paths) == ["a-step-000030", "b-step-000030", "a", "a-3"]


async def test_an_evaluation_keeps_what_passed_and_counts_what_was_lost(tmp_path: Path) -> None:
    source = MinirepoTasks("heldout", MinirepoSource(type="minirepo", groups_per_step=0, seed=5))
    pool = ScriptedRollouts(source)
    found = await evaluate(
        label="step-000004",
        step=4,
        config=EvalConfig(source="heldout", tasks=2, samples=3, seed=0),
        source=source,
        rollout=pool,  # type: ignore[arg-type]
        wall_s=1.0,
        concurrency=2,
    )
    assert pool.most <= 2
    record = found.evaluation.record()
    assert record["pass_rate"] == pytest.approx(1 / 2) and record["masked"] == 2 and record["versions"] == (4, 5)
    assert record["known_tiers"] == {"T1": 2, "T2": 0, "T3": 0}
    assert [[s.status for s in t.samples] for t in found.evaluation.tasks] == [
        ["submitted", "submitted", "infra_sandbox"],
        ["submitted", "submitted", "infra_worker"],
    ]
    keep_evaluation(tmp_path, found)
    group = read_archive(tmp_path / "step-000004" / "eval-step-000004-00001.json.gz")
    assert [t.passed for t in group.trajectories] == [True, False] and group.task.split.value == "heldout"
