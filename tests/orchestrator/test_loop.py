"""The scheduler over scripted pools: overlap, masking and re-sampling, fallbacks, staleness, conservation."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectLostError
from scripted import Run, ScriptedLearner, ScriptedPool, ScriptedSource, even_slots_pass, run_config, trajectory

from envs.task import Split, Task, TaskKind
from grader.exchange import GradeReply, GradeRequest
from infra.errors import EngineError, GagarError
from infra.pool import ActorLost
from learner.group import PayloadsLost
from orchestrator.archive import GroupArchive
from orchestrator.batch import batch_items
from orchestrator.credit import credit
from orchestrator.ledger import CompleteGroup, Member, ReadyGroup, Stage
from rollout.trajectory import Status, Trajectory, Transcript


def test_every_step_trains_its_quotas(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config())
    groups = run.go()
    assert run.steps == [1, 2, 3] and run.learner.published == [1, 2, 3]
    trained = [g for g in groups if g["outcome"] == "trained"]
    assert Counter((g["step"], g["source"]) for g in trained) == {
        (s, source): n for s in (1, 2, 3) for source, n in (("code", 2), ("sums", 1))
    }
    ids = [g["group_id"] for g in groups]
    assert len(ids) == len(set(ids)), "no group twice"
    run.ledger.check()


def test_batches_carry_references_and_outcome_advantages(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(steps=1))
    run.go()
    (batch,) = run.learner.batches
    assert len(batch) == 12
    for item in batch:
        slot = int(item.trajectory_id.split("/")[1].split(".")[0])
        assert item.payload == f"payload:{item.trajectory_id}"
        assert item.advantage == pytest.approx(0.5 if slot % 2 == 0 else -0.5)


def test_only_eligible_code_groups_are_graded(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config())
    run.go()
    assert run.grader.calls and all(request.task.kind is TaskKind.CODE for _, request, *_ in run.grader.calls)


def test_outcome_mode_grades_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(algorithm={"group_size": 4, "mode": "outcome"}))
    groups = run.go()
    assert not run.grader.calls and all(g["fallback_reason"] is None for g in groups)


def test_all_pass_and_all_fail_groups_are_skipped_and_refilled(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        index = int(group_id.split("-")[1])
        if index % 3:
            return trajectory(trajectory_id, task=task, passed=index % 3 == 1)
        return even_slots_pass(task, trajectory_id, group_id)

    run = Run(tmp_path, run_config(steps=2), rollout=rollout)
    groups = run.go()
    outcomes = Counter(g["outcome"] for g in groups)
    assert outcomes["trained"] == 6 and outcomes["skipped_all_pass"] and outcomes["skipped_all_fail"]
    assert all(g["step"] is None for g in groups if g["outcome"] != "trained")


def test_only_the_lost_trajectory_is_sampled_again(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if trajectory_id.endswith("/1.0"):
            return trajectory(trajectory_id, task=task, status=Status.INFRA_SANDBOX)
        if trajectory_id.endswith("/2.0"):
            raise ActorLost("rollout-0", "rollout")
        return even_slots_pass(task, trajectory_id, group_id)

    run = Run(tmp_path, run_config(steps=1), rollout=rollout)
    groups = run.go()
    for g in groups:
        assert [t["id"].split("/")[1] for t in g["trajectories"]] == ["0.0", "1.1", "2.1", "3.0"]
        assert all(t["valid"] for t in g["trajectories"])
    asked = Counter(args[2] for args in run.rollout.calls)
    assert max(asked.values()) == 1, "no trajectory id is sampled twice"
    trained = len([g for g in groups if g["outcome"] == "trained"])
    assert min(run.retries["infra_sandbox"], run.retries["infra_worker"]) >= trained


def test_a_result_that_is_lost_from_the_object_store_is_sampled_again(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if trajectory_id.endswith("/1.0"):
            raise ObjectLostError("0" * 40, "", "")
        return even_slots_pass(task, trajectory_id, group_id)

    run = Run(tmp_path, run_config(steps=1), rollout=rollout)
    groups = run.go()
    assert all([t["id"].split("/")[1] for t in g["trajectories"]] == ["0.0", "1.1", "2.0", "3.0"] for g in groups)
    assert set(run.retries) == {"infra_storage"}


def test_a_lost_worker_is_named_and_no_sandbox_is_blamed(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if "/1." in trajectory_id:
            raise ActorLost("rollout-7", "rollout", "its node died")
        return even_slots_pass(task, trajectory_id, group_id)

    run = Run(tmp_path, run_config(steps=1, rollout={"infra_retries": 0}), rollout=rollout)
    for g in run.go():
        lost = g["trajectories"][1]
        assert (lost["status"], lost["worker"], lost["valid"]) == ("infra_worker", "rollout-7", False)
        assert "its node died" in lost["error"]


def test_a_trajectory_that_stays_lost_is_masked_and_leaves_the_statistics(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if "/0." in trajectory_id:
            return trajectory(trajectory_id, task=task, status=Status.INFRA_ENGINE)
        return trajectory(trajectory_id, task=task, passed="/1." in trajectory_id)

    run = Run(tmp_path, run_config(steps=1), rollout=rollout)
    trained = [g for g in run.go() if g["outcome"] == "trained"]
    assert trained
    for g in trained:
        lost, *rest = g["trajectories"]
        assert lost["valid"] is False and lost["advantage"] is None and lost["passed"] is None
        assert [t["advantage"] for t in rest] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert all("/0." not in item.trajectory_id for item in run.learner.batches[0])


def test_a_group_nobody_could_verify_is_a_broken_task(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if group_id == "code-000000":
            return trajectory(trajectory_id, task=task, status=Status.INFRA_VERIFIER)
        return even_slots_pass(task, trajectory_id, group_id)

    run = Run(tmp_path, run_config(steps=3, rollout={"infra_retries": 0}), rollout=rollout)
    groups = {g["group_id"]: g for g in run.go()}
    assert groups["code-000000"]["outcome"] == "skipped_broken_task"


def test_a_dead_grader_costs_a_fallback_with_its_reason(tmp_path: Path) -> None:
    def grade(request: GradeRequest, *transcripts: Any) -> GradeReply:
        raise ActorLost("grader-0", "grade")

    run = Run(tmp_path, run_config(steps=1), grade=grade)
    for g in run.go():
        if g["source"] == "code" and g["outcome"] == "trained":
            assert g["fallback_reason"] and g["mode"] == "outcome" and g["graded"] is False
            assert sum(t["advantage"] for t in g["trajectories"]) == pytest.approx(0.0)


def test_a_transcript_lost_with_its_node_costs_a_fallback(tmp_path: Path) -> None:
    def grade(request: GradeRequest, *transcripts: Any) -> GradeReply:
        raise ObjectLostError("0" * 40, "", "")

    run = Run(tmp_path, run_config(steps=1), grade=grade)
    trained = [g for g in run.go() if g["source"] == "code" and g["outcome"] == "trained"]
    assert len(trained) == 2
    for g in trained:
        assert g["fallback_reason"] == "worker_lost" and g["mode"] == "outcome"
        assert "ObjectLostError" in g["grader"]["detail"]


def test_grading_overlaps_the_rollouts_of_other_groups(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(), rollout_delay_s=0.01, grade_delay_s=0.03)
    run.go()
    grades = [s for s in run.telemetry.spans if s[0] == "grade"]
    rollouts = [s for s in run.telemetry.spans if s[0] == "rollout"]
    overlapped = [
        g for g in grades if any(r[1] < g[2] and g[1] < r[2] and r[3]["group_id"] != g[3]["group_id"] for r in rollouts)
    ]
    assert len(overlapped) >= len(grades) // 2 and overlapped


def test_stale_groups_are_dropped_and_counted(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        slot = int(trajectory_id.split("/")[1].split(".")[0])
        # Tokens of odd groups claim a version from long before the run: they must never be trained on.
        old = -9 if int(group_id.split("-")[1]) % 2 else run.scheduler.step
        return trajectory(trajectory_id, task=task, passed=slot % 2 == 0, versions=(old,))

    run = Run(tmp_path, run_config(), rollout=rollout)
    groups = run.go()
    dropped = [g for g in groups if g["outcome"] == "dropped_stale"]
    assert dropped and all(int(g["group_id"].split("-")[1]) % 2 for g in dropped)
    trained = [g for g in groups if g["outcome"] == "trained"]
    assert len(trained) == 9
    for g in trained:
        assert all(g["step"] - 1 - v <= 2 for t in g["trajectories"] for v in t["policy_versions"])


def test_outstanding_groups_stay_within_the_lookahead(tmp_path: Path) -> None:
    seen: list[int] = []

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        seen.append(sum(run.ledger.count(stage) for stage in Stage))
        passed = even_slots_pass(task, trajectory_id, group_id).passed
        return trajectory(trajectory_id, task=task, passed=passed, versions=(run.scheduler.step,))

    run = Run(tmp_path, run_config(steps=6, scheduler={"max_inflight_groups": 5, "max_staleness": 1}), rollout=rollout)
    run.go()
    assert max(seen) <= 5 + 6, "in flight plus ready"
    assert run.ledger.living <= 2, "nothing much is sampled for steps that will not come"


def test_the_running_step_holds_its_slots_until_the_weights_are_published(tmp_path: Path) -> None:
    class SlowLearner(ScriptedLearner):
        async def train_step(self, items: Any) -> dict[str, float]:
            await asyncio.sleep(0.05)
            return await super().train_step(items)

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        passed = even_slots_pass(task, trajectory_id, group_id).passed
        return trajectory(trajectory_id, task=task, passed=passed, versions=(run.scheduler.step,))

    sources = {
        "code": {"type": "minirepo", "groups_per_step": 2, "prior_acceptance": 1.0},
        "sums": {"type": "arith", "groups_per_step": 1, "prior_acceptance": 1.0},
    }
    config = run_config(sources=sources, scheduler={"max_staleness": 0})
    run = Run(tmp_path, config, rollout=rollout, learner=SlowLearner())
    groups = run.go()
    assert [g["outcome"] for g in groups] == ["trained"] * 9, "nothing is sampled by weights that it may not train"
    assert run.ledger.living == 0


def test_what_is_ready_counts_for_the_step_that_is_being_collected(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class WatchedLearner(ScriptedLearner):
        async def train_step(self, items: Any) -> dict[str, float]:
            for name, source in run.mixer.sources.items():
                seen.append((source.accepted, run.ledger.count(Stage.READY, name)))
            return await super().train_step(items)

    run = Run(tmp_path, run_config(), learner=WatchedLearner())
    run.go()
    assert len(seen) == 6 and all(accepted == ready for accepted, ready in seen), "not those in the running step"


def test_payloads_go_free_when_their_step_is_done(tmp_path: Path) -> None:
    class Payload:
        pass

    class Pool(ScriptedPool):
        async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
            value, _ = await super().call(method, *args, num_returns=num_returns, timeout_s=timeout_s)
            return value, [Payload(), None]

    class ForgetfulLearner(ScriptedLearner):
        async def train_step(self, items: Any) -> dict[str, float]:
            trained.append([weakref.ref(item.payload) for item in items])
            return {"loss": 0.0}

        async def save(self, path: Path) -> None:
            await super().save(path)
            left.append(sum(ref() is not None for ref in trained[-1]))

    trained: list[list[weakref.ref[Payload]]] = []
    left: list[int] = []
    config = run_config(algorithm={"group_size": 4, "mode": "outcome"}, checkpoint={"every_steps": 1})
    run = Run(tmp_path, config, pool=Pool, learner=ForgetfulLearner())
    run.go()
    assert [len(refs) for refs in trained] == [12, 12, 12]
    assert left == [0, 0, 0]


def test_a_run_that_does_not_move_ends_with_an_error(tmp_path: Path) -> None:
    config = run_config(scheduler={"stall_after_s": 0.5, "abort_after_s": 1.0})
    run = Run(tmp_path, config, rollout_delay_s=60.0)
    with pytest.raises(ExceptionGroup) as e:
        run.go()
    assert e.group_contains(GagarError, match="abort_after_s")


def test_a_run_whose_every_trajectory_is_lost_ends_with_an_error(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        return trajectory(trajectory_id, task=task, status=Status.INFRA_ENGINE)

    config = run_config(scheduler={"stall_after_s": 0.5, "abort_after_s": 1.0})
    run = Run(tmp_path, config, rollout=rollout, rollout_delay_s=0.05)
    with pytest.raises(ExceptionGroup) as e:
        run.go()
    assert e.group_contains(GagarError, match="abort_after_s")


def test_a_pool_without_engines_ends_the_run(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        run.engines.live = 0
        run.scheduler.resize()
        return trajectory(trajectory_id, task=task, status=Status.INFRA_ENGINE)

    run = Run(tmp_path, run_config(), rollout=rollout, rollout_delay_s=0.05)
    with pytest.raises(ExceptionGroup) as e:
        run.go()
    assert e.group_contains(EngineError, match=r"no policy engine is left.*--resume")


def test_a_rollout_pool_without_workers_ends_the_run(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        run.rollout.slots = 0
        raise ActorLost("rollout", "rollout", "no actor is left")

    run = Run(tmp_path, run_config(), rollout=rollout)
    with pytest.raises(ExceptionGroup) as e:
        run.go()
    assert e.group_contains(GagarError, match="no rollout worker is left")
    assert not run.audit.path.read_text(), "no group is skipped for it"


def test_exactly_the_groups_that_a_grader_was_asked_about_are_archived(tmp_path: Path) -> None:
    archive = GroupArchive(
        tmp_path / "archive",
        fetch=lambda refs: [
            Transcript(trajectory_id=str(r).removeprefix("transcript:"), turns=(), patch="", test_log="") for r in refs
        ],
    )
    run = Run(tmp_path, run_config(), archive=archive)
    with archive:
        groups = run.go()
    asked = {g["group_id"] for g in groups if g["grader"] is not None}
    assert asked and {g["source"] for g in groups if g["grader"] is None} >= {"sums"}
    assert {p.name.removesuffix(".json.gz") for p in (tmp_path / "archive").iterdir()} == asked


class LosingLearner(ScriptedLearner):
    """Cannot fetch the payloads of some trajectories."""

    def __init__(self, *lost: str) -> None:
        super().__init__()
        self.lost = set(lost)
        self.files: dict[str, Path | None] = {}

    async def train_step(self, items: Any) -> dict[str, float]:
        self.files.update((item.trajectory_id, item.file) for item in items)
        if gone := {item.trajectory_id: "lost with its node" for item in items if item.trajectory_id in self.lost}:
            raise PayloadsLost(gone)
        return await super().train_step(items)


def test_a_payload_lost_with_its_node_costs_its_group_and_not_the_step(tmp_path: Path) -> None:
    learner = LosingLearner("code-000000/1.0", "code-000000/2.0", "sums-000001/0.0")
    run = Run(tmp_path, run_config(), learner=learner)
    groups = {g["group_id"]: g for g in run.go()}
    failed = {name: g for name, g in groups.items() if g["outcome"] == "failed"}
    assert set(failed) == {"code-000000", "sums-000001"} and all(g["step"] is None for g in failed.values())
    assert failed["code-000000"]["error"] == (
        "code-000000/1.0: lost with its node; code-000000/2.0: lost with its node"
    )
    trained = [g for g in groups.values() if g["outcome"] == "trained"]
    assert Counter((g["step"], g["source"]) for g in trained) == {
        (s, source): n for s in (1, 2, 3) for source, n in (("code", 2), ("sums", 1))
    }, "others take their places"
    assert all(g["error"] is None for g in trained)
    assert run.steps == [1, 2, 3] and run.learner.published == [1, 2, 3]
    assert [len(batch) for batch in learner.batches] == [12, 12, 12]
    assert run.ledger.ended["failed"] == 8
    run.ledger.check()


def test_what_the_mixer_counts_is_what_is_ready_after_a_loss_too(tmp_path: Path) -> None:
    class Observed(Run):
        def on_step(self, scheduler: Any, record: Any, stats: Any) -> None:
            super().on_step(scheduler, record, stats)
            for name, state in self.mixer.sources.items():
                assert state.accepted == self.ledger.count(Stage.READY, name)

    learner = LosingLearner(*(f"code-{n:06d}/0.0" for n in (1, 2, 5)))
    run = Observed(tmp_path, run_config(), learner=learner)
    outcomes = Counter(g["outcome"] for g in run.go())
    assert outcomes["trained"] == 9 and outcomes["failed"] == 3


def test_the_learner_is_told_where_rollouts_are_kept(tmp_path: Path) -> None:
    learner = LosingLearner()
    run = Run(tmp_path, run_config(steps=1), learner=learner)
    run.go()
    assert set(learner.files.values()) == {None}, "they are not kept"
    (item, *_) = batch_items([ready_group("code-000000")], tmp_path)
    assert item.file == tmp_path / "code-000000" / "0.0.npz"


def ready_group(group_id: str) -> ReadyGroup:
    task = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, 0)
    one = trajectory(f"{group_id}/0.0", task=task)
    given = credit(
        [one, trajectory(f"{group_id}/1.0", task=task, passed=False)],
        run_config().algorithm,
        grade=None,
        fallback_reason=None,
    )
    member = Member(trajectory=one, payload=None, transcript=None)
    group = CompleteGroup(group_id=group_id, task=task, index=0, members=(member,), admitted_s=0.0, completed_s=1.0)
    return ReadyGroup(group=group, credit=given, reply=None, ready_s=1.0)


def test_slots_and_engines_follow_the_pools_at_once(tmp_path: Path) -> None:
    """`gagar scale`: the pools call `resize`, build.py sees to that."""

    class Growing(Run):
        def on_step(self, scheduler: Any, record: Any, stats: Any) -> None:
            super().on_step(scheduler, record, stats)
            self.rollout.slots, self.grader.slots, self.engines.live = 16, 5, 3
            scheduler.resize()
            assert (scheduler.rollouts.slots.size, scheduler.grading.slots.size) == (16, 5)
            assert scheduler.admission.sequences == 3 * self.config.engine.max_num_seqs

    run = Growing(tmp_path, run_config(steps=2))
    run.go()
    assert run.steps == [1, 2]
