"""Canaries: how often, never trained on, never in the way, and what a run says when grades go bad (M7)."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folder import STATS, canary_line
from scripted import (
    Run,
    ScriptedLearner,
    ScriptedPool,
    TranscriptPool,
    grader_config,
    grader_section,
    run_config,
    trajectory,
    transcript,
)
from scripted import ScriptedSource as Source

from configs.schema import CanaryConfig, RubricConfig, RunConfig, WandbConfig
from envs.task import Split, TaskKind
from grader.canary import Canary, builtin_canaries, canary_record, stored_canaries
from grader.exchange import GradeReply, GradeRequest, base_state_of, lost_reply
from grader.rubric import Tier
from grader.scripted import ScriptedGrader
from grader.stored import KnownGrade, StoredGroup, write_archive
from grader.verdict import CandidateVerdict
from infra.errors import StorageError
from infra.pool import ActorLost
from infra.sinks import JsonlFile
from infra.telemetry import Telemetry
from orchestrator.canaries import Canaries, make_canaries, read_past
from orchestrator.checkpoint import LOGS
from orchestrator.observer import RunObserver
from orchestrator.progress import Progress
from orchestrator.status import print_status

RUBRIC = RubricConfig()
KNOWN = {
    "T1": KnownGrade(scores=(5, 5, 5, 5, 5)),
    "T2": KnownGrade(scores=(4, 4, 3, 4, 4)),
    "T3": KnownGrade(scores=(1, 4, 4, 4, 4)),
}


def with_canaries(folder: Path, **changes: Any) -> RunConfig:
    """A run a third of whose gradings are canaries, read from `folder`."""
    for number, tiers in enumerate([("T1", "T2"), ("T2", "T1", "T3")]):
        write_archive(folder, stored(*tiers, number=number))
    canaries = {"share": 1 / 3, "window": 4, "path": str(folder), **changes}
    return run_config(grader=grader_section(canaries=canaries))


def grade(request: GradeRequest, *transcripts: Any) -> GradeReply:
    return ScriptedGrader().reply(request, *transcripts)


def stored(*known: str, patches: tuple[str, ...] = (), number: int = 0) -> StoredGroup:
    """A group of passes known to be of these tiers, and a failure; ScriptedGrader sees the tiers of `patches`."""
    task = Source("stored", TaskKind.CODE).task(Split.HELDOUT, 0)
    names = [f"known-{number}/{slot}.0" for slot in range(len(known) + 1)]
    seen = [*(patches or known), "T1"]
    return StoredGroup(
        group_id=f"known-{number}",
        task=task,
        trajectories=tuple(trajectory(name, task=task, passed=slot < len(known)) for slot, name in enumerate(names)),
        transcripts=tuple(transcript(name, tier) for name, tier in zip(names, seen, strict=True)),
        labels={name: KNOWN[tier] for name, tier in zip(names, known, strict=False)},
    )


def reply_to(group: StoredGroup, grader: ScriptedGrader | None = None) -> GradeReply:
    request = GradeRequest(
        group_id=group.group_id,
        task=group.task,
        base_state=base_state_of(group.task),
        trajectories=group.trajectories,
        order_seed=1,
    )
    return (grader or ScriptedGrader()).reply(request, *group.transcripts)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- one canary -----------------------------------------------------------------------------------------------------


def test_a_line_holds_expected_and_given_tiers_and_how_far_they_agree() -> None:
    group = stored("T1", "T2", "T3", patches=("T1", "T3", "T2"))
    line = canary_record(Canary(number=7, group=group), reply_to(group), step=3, rubric=RUBRIC)
    assert (line["canary"], line["step"], line["group_id"], line["fallback_reason"]) == (7, 3, "known-0", None)
    assert line["expected"] == {"known-0/0.0": "T1", "known-0/1.0": "T2", "known-0/2.0": "T3"}
    assert line["given"] == {"known-0/0.0": "T1", "known-0/1.0": "T3", "known-0/2.0": "T2"}
    assert line["tier_agreement"] == pytest.approx(1 / 3)
    # Two of three pairs are in the right order.
    assert line["kendall_tau_b"] == pytest.approx(1 / 3)
    assert json.loads(line["grader"]["verdict"])["candidates"], "the whole verdict is there to be read"
    json.dumps(line, allow_nan=False)


def test_a_fallback_agrees_with_nothing_and_says_why() -> None:
    group = stored("T1", "T2")
    request = GradeRequest(
        group_id=group.group_id,
        task=group.task,
        base_state=base_state_of(group.task),
        trajectories=group.trajectories,
        order_seed=1,
    )
    lost = lost_reply(request, "killed", run_s=1.0)
    line = canary_record(Canary(number=0, group=group), lost, step=0, rubric=RUBRIC)
    assert line["given"] is line["tier_agreement"] is line["kendall_tau_b"] is None
    assert line["fallback_reason"] == "worker_lost" and line["grader"]["detail"] == "killed"


def test_a_candidate_that_is_called_a_hack_has_no_tier_and_counts_as_wrong() -> None:
    group = stored("T1", "T1")
    reply = reply_to(group)
    assert reply.grade is not None
    kept = {name: one for name, one in reply.grade.candidates.items() if name != "known-0/0.0"}
    hacked = replace(reply, grade=replace(reply.grade, candidates=kept, hacks={"known-0/0.0": ()}))
    line = canary_record(Canary(number=0, group=group), hacked, step=0, rubric=RUBRIC)
    assert line["given"] == {"known-0/0.0": None, "known-0/1.0": "T1"} and line["tier_agreement"] == 0.5
    assert line["kendall_tau_b"] is None, "two that are tied have no order to agree on"


def test_builtin_canaries_are_heldout_repeatable_and_known() -> None:
    supply = builtin_canaries(3, RUBRIC)
    groups = [supply(number) for number in range(4)]
    assert groups == [builtin_canaries(3, RUBRIC)(number) for number in range(4)]
    assert len({group.group_id for group in groups}) == 4 and builtin_canaries(4, RUBRIC)(0) != groups[0]
    for group in groups:
        assert group.task.split is Split.HELDOUT and group.task.kind is TaskKind.CODE
        assert group.labels is not None
        assert set(group.labels) == {t.trajectory_id for t in group.trajectories if t.passed}
        assert not all(t.passed for t in group.trajectories)
        assert reply_to(group).grade is not None, "it can be graded like any other group"


def test_builtin_labels_are_those_of_the_examples() -> None:
    """A grader that gives the known scores agrees in everything."""
    group = builtin_canaries(0, RUBRIC)(2)
    assert group.labels is not None

    def judge(candidate: Any) -> CandidateVerdict:
        known = group.labels[candidate.trajectory.trajectory_id]  # type: ignore[index]
        evidence = list(candidate.patch.references)[:1]
        flags = list(known.judgement[1].raised)
        return CandidateVerdict(evidence=evidence, reasons=["known"] * 5, flags=flags, scores=list(known.scores))

    line = canary_record(
        Canary(number=2, group=group), reply_to(group, ScriptedGrader(judge=judge)), step=0, rubric=RUBRIC
    )
    assert line["tier_agreement"] == 1.0 and line["kendall_tau_b"] in (1.0, None)
    assert set(line["expected"].values()) <= {tier.value for tier in Tier}


def test_stored_canaries_go_round_and_unlabelled_groups_are_left_out(tmp_path: Path) -> None:
    first, second = stored("T1", number=1), stored("T3", number=2)
    for group in (first, second, replace(stored("T2", number=3), labels=None)):
        write_archive(tmp_path, group)
    supply = stored_canaries(tmp_path)
    assert [supply(number) for number in range(4)] == [first, second, first, second]


def test_a_folder_without_labels_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write_archive(tmp_path, replace(stored("T2"), labels=None))
    with pytest.raises(StorageError, match=r"none of its groups has labels.*grader\.canaries\.path"):
        stored_canaries(tmp_path)


# ---- how often ------------------------------------------------------------------------------------------------------


def supply(number: int) -> StoredGroup:
    return stored("T1", "T2")


def canaries(tmp_path: Path, share: float, **changes: Any) -> Canaries:
    log = JsonlFile(tmp_path / "canaries.jsonl", sync=False)
    return Canaries(CanaryConfig(share=share), changes.pop("supply", supply), log, RUBRIC, **changes)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 1 / 3, 0.375, 0.5])
def test_the_share_of_the_gradings_is_what_is_asked_for(tmp_path: Path, share: float) -> None:
    some = canaries(tmp_path, share)
    done, reply = 0, reply_to(supply(0))
    for _ in range(600):
        if some.due(1):
            done += 1
            some.record(Canary(number=done, group=supply(0)), reply, step=0)
    assert done == pytest.approx(600 * share / (1 - share), abs=1.01)


def test_a_canary_that_never_comes_back_keeps_the_next_ones_away_and_no_debt_grows(tmp_path: Path) -> None:
    some = canaries(tmp_path, 0.5)
    assert some.at_once(1) == 1 and some.at_once(8) == 4
    assert some.due(1)
    assert not any(some.due(1) for _ in range(50)), "one at once"
    some.record(Canary(number=0, group=supply(0)), reply_to(supply(0)), step=0)
    follow = 0
    for _ in range(3):
        if some.due(1):
            follow += 1
            some.record(Canary(number=0, group=supply(0)), reply_to(supply(0)), step=0)
    assert follow == 3, "one a group at most, however long none could run"


def test_a_canary_is_made_beside_the_event_loop(tmp_path: Path) -> None:
    made: list[str] = []

    def slow(number: int) -> StoredGroup:
        made.append(threading.current_thread().name)
        return stored("T1")

    some = canaries(tmp_path, 0.5, supply=slow)
    assert asyncio.run(some.take()).number == 0
    assert made and made[0] != threading.main_thread().name


def test_a_resumed_run_goes_on_with_the_next_canary(tmp_path: Path) -> None:
    past = [canary_line(1.0, None, number=n) for n in range(3)]
    assert asyncio.run(canaries(tmp_path, 0.5, past=past).take()).number == 3
    assert "canaries.jsonl" in LOGS, "what a resume repeats is cut from it first"


# ---- in a run -------------------------------------------------------------------------------------------------------


class PatientLearner(ScriptedLearner):
    """Steps only when there is one more canary: the scripted parts are quicker than a canary is made."""

    run: Run

    async def train_step(self, items: Any) -> dict[str, float]:
        stage = self.run.scheduler.grading
        assert stage is not None
        for _ in range(500):
            if stage.canaries_graded > len(self.batches):
                break
            await asyncio.sleep(0.01)
        return await super().train_step(items)


def patient_run(run_dir: Path, config: RunConfig, **parts: Any) -> Run:
    learner = PatientLearner()
    run = learner.run = Run(run_dir, config, pool=TranscriptPool, learner=learner, **parts)
    return run


def is_canary(group_id: str) -> bool:
    return not group_id.startswith(("code-", "sums-"))


def test_canaries_are_graded_among_the_groups_and_never_trained_on(tmp_path: Path) -> None:
    def watched(request: GradeRequest, *transcripts: Any) -> GradeReply:
        if is_canary(request.group_id):
            assert not run.ledger.is_grading(request.group_id)
        return grade(request, *transcripts)

    run = patient_run(tmp_path, with_canaries(tmp_path / "known"), grade=watched)
    groups = run.go()
    written = lines(tmp_path / "canaries.jsonl")
    asked = [request.group_id for _, request, *_ in run.grader.calls]
    assert written and {line["group_id"] for line in written} <= set(filter(is_canary, asked))
    assert not any(is_canary(g["group_id"]) for g in groups), "not in groups.jsonl"
    assert not any(is_canary(i.group_id) for batch in run.learner.batches for i in batch), "not in a batch"
    assert all(len(batch) == 12 for batch in run.learner.batches)
    assert run.ledger.dispatched == 4 * sum(s.dispatched_total for s in run.mixer.sources.values())
    run.ledger.check()
    share = len(list(filter(is_canary, asked))) / len(asked)
    assert 0.1 < share <= 1 / 3 + 0.05
    assert [line["canary"] for line in written] == sorted(line["canary"] for line in written)
    assert all(0 <= line["step"] <= 3 and line["fallback_reason"] is None for line in written)
    spans = [s for s in run.telemetry.spans if is_canary(s[3].get("group_id", "code-"))]
    assert spans and {s[0] for s in spans} == {"canary"}


def test_a_run_that_is_opened_again_knows_its_canaries(tmp_path: Path) -> None:
    config = with_canaries(tmp_path / "known")
    patient_run(tmp_path, config, grade=grade).go()
    written = lines(tmp_path / "canaries.jsonl")
    again = make_canaries(config, tmp_path)
    assert again is not None and list(again.past) == written
    assert asyncio.run(again.take()).number == max(line["canary"] for line in written) + 1


@pytest.mark.parametrize("slots", [1, 2])
def test_canaries_that_hang_do_not_starve_the_groups(tmp_path: Path, slots: int) -> None:
    class Hanging(ScriptedPool):
        async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
            if is_canary(args[0].group_id):
                await asyncio.sleep(0.5)
                return lost_reply(args[0], "hung", run_s=0.5)
            return await super().call(method, *args, num_returns=num_returns, timeout_s=timeout_s)

    config = with_canaries(tmp_path / "known")
    run = Run(tmp_path, config, grade=grade, pool=TranscriptPool, grader_pool=Hanging, grade_slots=slots)
    run.go()
    assert run.steps == [1, 2, 3]


def test_without_a_share_there_are_none(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(steps=1), grade=grade, pool=TranscriptPool)
    run.go()
    assert not (tmp_path / "canaries.jsonl").exists()
    outcome = run_config(algorithm={"group_size": 4, "mode": "outcome"}, grader=grader_section(canaries={"share": 0.5}))
    assert Run(tmp_path, outcome).scheduler.grading is None


def test_grades_gone_bad_are_told_of_once(tmp_path: Path) -> None:
    """A grader that calls everything T3 agrees with few labels: one alarm, not one a step."""

    def sour(request: GradeRequest, *transcripts: Any) -> GradeReply:
        def judge(candidate: Any) -> CandidateVerdict:
            evidence = list(candidate.patch.references)[:1]
            return CandidateVerdict(evidence=evidence, reasons=["bad"] * 5, flags=[], scores=[1, 1, 1, 1, 1])

        return ScriptedGrader(judge=judge).reply(request, *transcripts)

    run = patient_run(tmp_path, with_canaries(tmp_path / "known", window=2, alarm_below=0.9), grade=sour)
    run.go()
    assert [(a.name, a.on) for a in run.alarms] == [("canary_agreement", True)]
    assert "canaries.jsonl" in run.alarms[0].text
    assert run.scheduler.grading is not None
    assert run.scheduler.grading.watch.scalars()["alarm/canary_agreement"] == 1.0


def test_graders_that_all_die_are_told_of_and_the_run_goes_on(tmp_path: Path) -> None:
    def dead(request: GradeRequest, *transcripts: Any) -> GradeReply:
        raise ActorLost("grader-0", "grade", "killed")

    config = run_config(steps=3, grader=grader_section(alarms={"window": 4, "fallback_above": 0.5}))
    run = Run(tmp_path, config, grade=dead)
    run.go()
    assert run.steps == [1, 2, 3]
    assert [(a.name, a.on) for a in run.alarms] == [("fallback_rate", True)]
    assert "worker_lost 3" in run.alarms[0].text


def test_a_runs_metrics_and_status_hold_the_graders_figures(tmp_path: Path) -> None:
    """Through the real observer: every step's line has them, and an alarm is seen wherever a person looks."""

    class MeasuredLearner(PatientLearner):
        async def train_step(self, items: Any) -> Any:
            await super().train_step(items)
            return STATS

    def sour(request: GradeRequest, *transcripts: Any) -> GradeReply:
        return lost_reply(request, "no", run_s=0.0)

    config = with_canaries(tmp_path / "known").model_copy(
        update={"grader": grader_config(canaries={"share": 0.5, "path": str(tmp_path / "known")}, alarms={"window": 2})}
    )
    run_dir = tmp_path / "run"
    telemetry = Telemetry(run_dir, wandb=WandbConfig(mode="disabled"), config={})
    out = io.StringIO()
    observer = RunObserver(config, run_dir, telemetry, Progress(3, 10.0, console=Console(file=out, width=300)))
    learner = MeasuredLearner()
    learner.run = Run(
        run_dir, config, pool=TranscriptPool, learner=learner, grade=sour, telemetry=telemetry, observer=observer
    )
    learner.run.go()
    observer.on_tick(learner.run.scheduler, 0.0)
    metrics = lines(run_dir / "metrics.jsonl")
    assert [m["alarm/fallback_rate"] for m in metrics] == [1.0, 1.0, 1.0]
    assert [m["grader/fallback_rate"] for m in metrics] == [1.0, 1.0, 1.0]
    graded = sum(m["canary/graded"] for m in metrics)  # the last one may end after the last step was measured
    assert 2 <= graded <= len(lines(run_dir / "canaries.jsonl"))
    assert "canary/tier_agreement" not in metrics[-1], "no canary got a verdict"
    assert out.getvalue().count("ALARM fallback_rate: ") == 1
    assert json.loads((run_dir / "status.json").read_text())["snapshot"]["alarms"] == ["fallback_rate"]
    shown = io.StringIO()
    print_status(run_dir, console=Console(file=shown, width=200))
    assert "fallback_rate" in shown.getvalue()


GOOD_LINE = {"canary": 0, "fallback_reason": None, "tier_agreement": 0.5, "kendall_tau_b": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"canary": None},
        {"canary": "1"},
        {"fallback_reason": "bored"},
        {"fallback_reason": ["timeout"]},
        {"tier_agreement": "high"},
        {"kendall_tau_b": float("nan")},
    ],
)
def test_a_log_that_was_damaged_is_named_when_a_run_goes_on(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "canaries.jsonl"
    assert read_past(path) == []
    path.write_text(json.dumps(GOOD_LINE) + "\n" + json.dumps({**GOOD_LINE, "fallback_reason": "timeout"}) + "\n")
    assert len(read_past(path)) == 2
    with path.open("a") as file:
        file.write(json.dumps({**GOOD_LINE, **changes}) + "\n")
    with pytest.raises(StorageError, match=r"canaries\.jsonl:3: no line about a canary; remove it"):
        read_past(path)
    path.write_text("{}\n")
    with pytest.raises(StorageError, match=r"canaries\.jsonl:1"):
        read_past(path)
