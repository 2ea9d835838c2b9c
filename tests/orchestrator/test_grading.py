"""`gagar grade` without models: targets, plans, results on disk, resuming, interrupts, lost graders."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from scripted import ScriptedPool, run_config
from stored_groups import CLEAN, HARDCODED, labelled, stored_group, task

from configs.schema import RunConfig
from grader.candidates import shuffled
from grader.exchange import GradeReply, GradeRequest
from grader.rubric import Tier
from grader.scripted import ScriptedGrader
from grader.stored import StoredGroup, write_archive
from grader.verdict import FallbackReason
from infra.errors import GagarError, GraderError, StorageError
from infra.pool import ActorLost
from orchestrator.grading import (
    Asked,
    Work,
    default_order_seed,
    gradings_of,
    read_results,
    run_grading,
    setup_digest,
)
from orchestrator.grading_target import Target, load_target
from orchestrator.progress import Progress
from orchestrator.trust import GroupResult

CONFIG = run_config()


class Graders:
    """Stands for Ray and the graders: runs the work on a scripted pool."""

    def __init__(self, handler: Callable[..., GradeReply] | None = None, slots: int = 2, delay_s: float = 0.0) -> None:
        self.grader = ScriptedGrader()
        self.pool = ScriptedPool(handler or self.grader.reply, slots=slots, delay_s=delay_s)
        self.started = 0

    def run(self, config: RunConfig, progress: Progress, work: Work) -> None:
        self.started += 1

        async def go() -> None:
            await work(cast(Any, self.pool))

        try:
            asyncio.run(asyncio.wait_for(go(), timeout=30))
        except BaseExceptionGroup as errors:  # as orchestrator.build.run_loop does
            raise errors.exceptions[0] from None

    @property
    def asked(self) -> list[tuple[str, int]]:
        return [(call[1].group_id, call[1].order_seed) for call in self.pool.calls]


def grade(graders: Graders, groups: list[StoredGroup], **options: Any) -> str:
    out = io.StringIO()
    target = options.pop("target", None) or Target(groups=groups, order_seeds={})
    console = Console(file=out, width=160)
    run_grading(CONFIG, target, source="somewhere", console=console, run=graders.run, **options)
    return out.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- what is asked ---------------------------------------------------------------------------------------------------


def test_repeats_share_one_order_and_a_permuted_grading_has_another() -> None:
    """M2.5."""
    group = stored_group()
    asked = gradings_of(group, 7, repeat=3, permute=True)
    assert asked[:3] == [Asked(order_seed=7, permuted=False)] * 3
    assert asked[3].permuted and len(asked) == 4
    ids = [t.trajectory_id for t in group.trajectories]
    assert shuffled(ids, asked[3].order_seed) != shuffled(ids, 7)


def test_a_single_candidate_has_one_order_only() -> None:
    alone = stored_group(patches={"0.0": (True, CLEAN)})
    assert gradings_of(alone, 7, repeat=1, permute=True) == [Asked(order_seed=7, permuted=False)]


def test_the_order_depends_on_the_group_and_the_seed_alone() -> None:
    assert default_order_seed(CONFIG, "g1") == default_order_seed(run_config(), "g1")
    assert default_order_seed(CONFIG, "g1") != default_order_seed(CONFIG, "g2")
    assert default_order_seed(CONFIG, "g1") != default_order_seed(run_config(seed=1), "g1")


# ---- results ---------------------------------------------------------------------------------------------------------


def test_every_grade_is_kept_and_the_figures_are_shown(tmp_path: Path) -> None:
    graders = Graders()
    path = tmp_path / "grades.jsonl"
    shown = grade(graders, [labelled("g1"), labelled("g2")], repeat=2, permute=True, output=path)
    assert len(graders.asked) == 6
    # The clean patch is T1 as known; the hard-coded one is given T2 by its size, and is known as T2 by its scores.
    for part in (
        "2 groups of somewhere",
        "graded 2/2 groups",
        "somewhere, graded by scripted",
        "100.0% (6 of 6 gradings)",
        "100.0% (12 of 12 candidates)",
        "+1.000 (mean of 6 gradings)",
        "same tier when asked again",
        "0.0% (0 of 8 candidates)",
        str(path),
    ):
        assert part in shown, shown
    first, second = sorted(lines(path), key=lambda r: r["group_id"])
    assert first["group_id"] == "g1" and second["group_id"] == "g2"
    assert first["passing"] == ["g1/0.0", "g1/1.0"]
    assert [g["permuted"] for g in first["gradings"]] == [False, False, True]
    reply = first["gradings"][0]["reply"]
    assert reply["grade"]["candidates"]["g1/0.0"]["tier"] == "T1"
    assert reply["labels"].keys() == {"C1", "C2", "C3"}


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    grade(Graders(), [labelled("g1")], output=path)
    (result,) = read_results(path, setup_digest(CONFIG, repeat=1, permute=False)).values()
    assert isinstance(result, GroupResult)
    found = result.gradings[0].reply.grade
    assert found is not None and found.candidates["g1/1.0"].tier is Tier.T2
    assert result.labels == labelled("g1").labels


def test_what_was_graded_is_not_graded_again(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    grade(Graders(), [stored_group("g1")], output=path)
    with path.open("a") as file:
        file.write('{"group_id": "g2", "to')  # killed while it wrote
    again = Graders()
    shown = grade(again, [stored_group(f"g{i}") for i in (1, 2, 3)], output=path)
    assert sorted(name for name, _ in again.asked) == ["g2", "g3"]
    assert "3 groups of somewhere, 1 of them graded before" in shown
    assert "100.0% (3 of 3 gradings)" in shown
    assert sorted(r["group_id"] for r in lines(path)) == ["g1", "g2", "g3"]
    done = Graders()
    assert "100.0% (3 of 3 gradings)" in grade(done, [stored_group(f"g{i}") for i in (1, 2, 3)], output=path)
    assert done.started == 0, "nothing is left to do, so nothing starts"


def test_results_of_another_set_up_are_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    grade(Graders(), [stored_group("g1")], output=path)
    with pytest.raises(StorageError, match=r"grades\.jsonl:1: setup = .*give another --output"):
        grade(Graders(), [stored_group("g1")], output=path, repeat=2)
    other = run_config(grader={"backend": {"type": "vllm", "engine": {"model": "other"}}, "timeout_s": 5.0})
    wide = run_config(
        grader={"backend": {"type": "vllm", "engine": {"model": "unused"}}, "timeout_s": 5.0, "workers": 3}
    )
    same = setup_digest(CONFIG, repeat=1, permute=False)
    assert setup_digest(other, repeat=1, permute=False) != same
    assert setup_digest(wide, repeat=1, permute=False) == same, "more workers give the same answers"
    damaged = lines(path)[0]
    damaged["gradings"][0]["reply"]["turns"] = "many"
    path.write_text(json.dumps(damaged) + "\n")
    with pytest.raises(StorageError, match=r"grades\.jsonl:1: gradings\.0\.reply\.turns: must be a valid integer"):
        grade(Graders(), [stored_group("g1")], output=path)


@pytest.mark.parametrize(
    "held",
    [
        "notes of mine, without a newline at the end",
        "one\ntwo\nthree without a newline",
        '{"a": 1}',
        '{"group_id": "g1"}\n{"step": 1',
        "[" * 100_000 + "\n",
        "\x89PNG\r\n\x1a\n\x00",
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, held: str) -> None:
    path = tmp_path / "mine"
    path.write_bytes(held.encode())
    graders = Graders()
    with pytest.raises(StorageError, match="give another --output"):
        grade(graders, [stored_group("g1")], output=path)
    assert path.read_bytes() == held.encode()
    assert graders.started == 0


@pytest.mark.parametrize("kept", ["", '{"gro', '{"group_id": "g1", "ta'])
def test_a_first_line_that_was_cut_off_is_written_anew(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "grades.jsonl"
    path.write_text(kept)
    grade(Graders(), [stored_group("g1")], output=path)
    assert [r["group_id"] for r in lines(path)] == ["g1"]


def test_labels_that_came_after_the_grading_count(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    assert "tier as known" not in grade(Graders(), [stored_group("g1")], output=path)
    again = Graders()
    assert "tier as known" in grade(again, [labelled("g1")], output=path)
    assert again.started == 0


def test_a_group_that_was_changed_is_graded_again(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    grade(Graders(), [stored_group("g1"), stored_group("g2"), stored_group("g3")], output=path)
    more = {"0.0": (True, CLEAN), "1.0": (True, CLEAN), "2.0": (True, CLEAN)}
    groups = [stored_group("g1"), stored_group("g2", patches=more), stored_group("g3", task=task(files={"a.py": ""}))]
    again = Graders()
    assert "100.0% (3 of 3 gradings)" in grade(again, groups, output=path)
    assert sorted(name for name, _ in again.asked) == ["g2", "g3"]
    assert grade(done := Graders(), groups, output=path) and done.started == 0, "the later line counts"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests that were started in the background ignore interrupts, as everything does there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_keeps_and_shows_what_is_done(tmp_path: Path, interruptible: None) -> None:
    grader = ScriptedGrader()

    def interrupted(request: GradeRequest, *transcripts: Any) -> GradeReply:
        if request.group_id == "g2":
            signal.raise_signal(signal.SIGINT)
        return grader.reply(request, *transcripts)

    path, out = tmp_path / "grades.jsonl", io.StringIO()
    target = Target(groups=[stored_group(f"g{i}") for i in (1, 2, 3)], order_seeds={})
    with pytest.raises(KeyboardInterrupt):
        run_grading(
            CONFIG,
            target,
            source="x",
            output=path,
            console=Console(file=out, width=160),
            run=Graders(interrupted, slots=1, delay_s=0.01).run,
        )
    kept = [r["group_id"] for r in lines(path)]
    assert "g1" in kept and "g3" not in kept
    assert f"100.0% ({len(kept)} of {len(kept)} gradings)" in out.getvalue()


def test_a_lost_grader_is_asked_once_more_and_then_a_fallback() -> None:
    """M1.10."""
    grader = ScriptedGrader()
    attempts: list[int] = []

    def dies(request: GradeRequest, *transcripts: Any) -> GradeReply:
        attempts.append(request.attempt)
        if request.group_id == "g1" or request.attempt == 0:
            raise ActorLost("grader-0", "grade")
        return grader.reply(request, *transcripts)

    shown = grade(Graders(dies), [stored_group("g1"), stored_group("g2")])
    assert sorted(attempts) == [0, 0, 1, 1]
    assert "50.0% (1 of 2 gradings)" in shown and "fallback: worker_lost" in shown


def test_what_no_grader_answered_is_asked_again_by_the_same_command(tmp_path: Path) -> None:
    """A bad verdict is an answer: to ask until one is valid would be a choice among them."""
    grader, path = ScriptedGrader(), tmp_path / "grades.jsonl"

    def some_die(request: GradeRequest, *transcripts: Any) -> GradeReply:
        if request.group_id == "g1":
            raise ActorLost("grader-0", "grade")
        reply = grader.reply(request, *transcripts)
        bad = request.group_id == "g2"
        return replace(reply, grade=None, fallback_reason=FallbackReason.NOT_JSON) if bad else reply

    groups = [stored_group(f"g{i}") for i in (1, 2, 3)]
    assert "33.3% (1 of 3 gradings)" in grade(Graders(some_die), groups, output=path)
    again = Graders()
    shown = grade(again, groups, output=path)
    assert [name for name, _ in again.asked] == ["g1"]
    assert "3 groups of somewhere, 2 of them graded before" in shown and "66.7% (2 of 3 gradings)" in shown
    assert grade(Graders(some_die), groups, output=path).count("66.7% (2 of 3 gradings)") == 1, "the newest line counts"


def test_what_ray_cannot_carry_costs_one_group_alone() -> None:
    """M1.10."""
    from ray.exceptions import RayTaskError

    grader = ScriptedGrader()

    def broken(request: GradeRequest, *transcripts: Any) -> GradeReply:
        if request.group_id == "g2":
            raise RayTaskError("grade", "the worker's traceback", ValueError("a fault of ours"))
        return grader.reply(request, *transcripts)

    shown = grade(Graders(broken), [stored_group(f"g{i}") for i in (1, 2, 3)])
    assert "66.7% (2 of 3 gradings)" in shown
    assert "fallback: worker_lost" in shown


def test_without_any_grader_left_it_ends_with_what_was_done(tmp_path: Path) -> None:
    grader = ScriptedGrader()
    graders = Graders(slots=1)

    def dies(request: GradeRequest, *transcripts: Any) -> GradeReply:
        if request.group_id == "g2":
            graders.pool.slots = 0
            raise ActorLost("grader-0", "grade")
        return grader.reply(request, *transcripts)

    graders.pool.handler = dies
    path = tmp_path / "grades.jsonl"
    with pytest.raises(GraderError, match="no grader worker is left"):
        grade(graders, [stored_group(f"g{i}") for i in (1, 2, 3)], output=path)
    assert [r["group_id"] for r in lines(path)] == ["g1"]
    assert issubclass(GraderError, GagarError)


def test_an_answer_to_something_else_is_a_fallback() -> None:
    """M2.6."""
    grader = ScriptedGrader()
    other = stored_group("other", patches={"0.0": (True, HARDCODED)})

    def wrong(request: GradeRequest, *transcripts: Any) -> GradeReply:
        return grader.reply(
            GradeRequest(
                group_id="other",
                task=other.task,
                base_state=request.base_state,
                trajectories=other.trajectories,
                order_seed=request.order_seed,
            ),
            *other.transcripts,
        )

    shown = grade(Graders(wrong), [stored_group("g1")])
    assert "0.0% (0 of 1 gradings)" in shown and f"fallback: {FallbackReason.MISMATCH.value}" in shown


# ---- docs/grading.md -------------------------------------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs" / "grading.md").read_text(encoding="utf-8")


def test_the_group_of_the_documentation_can_be_graded(tmp_path: Path) -> None:
    script = DOCS.split("```bash\n")[1].split("```")[0]
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True)
    target = load_target(str(tmp_path / "total"), CONFIG)
    (group,) = target.groups
    assert [len(t.turns) for t in group.transcripts] == [2, 0]
    assert "100.0% (1 of 1 candidates)" in grade(Graders(), [], target=target)


def test_the_documentation_explains_every_figure_that_is_shown(tmp_path: Path) -> None:
    shown = grade(Graders(), [labelled("g1")], repeat=2, permute=True)
    for name in ("valid verdicts", "tiers given", "tier as known", "score as known", "same tier when asked again"):
        assert name in shown and f"| {name} |" in DOCS
    for name in ("ranking against known, tau-b", "same ranking when asked again", "other tier in another order"):
        assert name in shown and f"| {name} |" in DOCS
    assert "time of a grading" in shown and "| time of a grading |" in DOCS


def test_the_documentation_s_way_to_folders_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_archive(tmp_path / "runs" / "learn" / "archive", stored_group("g1"))
    exec(DOCS.split("```python\n")[1].split("```")[0], {})
    assert [g.group_id for g in load_target("to-label", CONFIG).groups] == ["g1"]
