"""Tasks whose evaluation is broken leave the run (M1.3), and an outage puts none of them out."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from rich.console import Console
from run_folder import make_run
from scripted import MemoryLog, Run, ScriptedPool, ScriptedSource, even_slots_pass, run_config, trajectory

from envs.task import Split, Task, TaskKind
from infra.sinks import JsonlFile
from orchestrator.ledger import Member, RollingGroup
from orchestrator.progress import ProgressSnapshot
from orchestrator.quarantine import Quarantine
from orchestrator.report import write_report
from orchestrator.runfiles import QUARANTINE, read_jsonl
from orchestrator.status import print_status, write_status
from rollout.trajectory import Status, Trajectory

BROKEN = "code-000001"
BROKEN_TASK = "code/train/0/1"


def remembering(folder: Path, after: int | None = 3) -> Quarantine:
    """As training.py makes it, at the start and at a resume."""
    path = folder / QUARANTINE
    return Quarantine(after, file=JsonlFile(path, sync=False), past=read_jsonl(path))


def breaking(status: Status) -> Any:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if group_id == BROKEN:
            return trajectory(trajectory_id, task=task, status=status)
        return even_slots_pass(task, trajectory_id, group_id)

    return rollout


class TakesTime(ScriptedPool):
    """Attempts of the broken task are quick, but its last two slots take so long that only a stop can end them; the
    stop is remembered."""

    stopped: list[str]

    def occupancy(self) -> tuple[int, int]:
        return self.busy, 32

    async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
        if args[2] == BROKEN and args[1].split("/")[1][0] in "67":
            self.calls.append((method, *args))
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                self.stopped.append(args[1])
                raise
        await asyncio.sleep(0.002)
        return await super().call(method, *args, num_returns=num_returns, timeout_s=timeout_s)


@pytest.mark.parametrize("status", [Status.INFRA_VERIFIER, Status.INFRA_SETUP])
def test_a_task_that_keeps_breaking_is_put_out_while_others_go_on(tmp_path: Path, status: Status) -> None:
    config = run_config(algorithm={"group_size": 8}, rollout={"infra_retries": 5})
    run = Run(tmp_path, config, rollout=breaking(status), pool=TakesTime, quarantine=remembering(tmp_path))
    pool: Any = run.rollout
    pool.stopped = []
    groups = {g["group_id"]: g for g in run.go()}
    assert run.steps == [1, 2, 3]
    g = groups[BROKEN]
    assert g["outcome"] == "skipped_quarantined" and g["step"] is None
    assert not any(t["valid"] for t in g["trajectories"]), "the whole group leaves"
    ends = Counter(t["status"] for t in g["trajectories"])
    assert ends["infra_cancelled"] >= 2 and set(ends) <= {status.value, "infra_cancelled"}
    assert {name.split(".")[0] for name in pool.stopped} == {f"{BROKEN}/6", f"{BROKEN}/7"}, "what ran is stopped"
    attempts = sum(args[3] == BROKEN for args in run.rollout.calls)
    assert attempts < 6 * 6, "retries of a broken task end"
    (line,) = read_jsonl(tmp_path / QUARANTINE)
    assert (line["task_id"], line["source"], line["index"]) == (BROKEN_TASK, "code", 1)
    assert line["class"] == status.value.removeprefix("infra_") and line["failures"] >= 3
    assert line["errors"] and line["last_s"] >= line["first_s"] > 0
    (alarm,) = (a for a in run.alarms if a.name.startswith("quarantine"))
    assert BROKEN_TASK in alarm.text and "quarantine.jsonl" in alarm.text
    assert run.scheduler.supply_figures()["infra/quarantined_tasks"] == 1.0
    run.ledger.check()


def test_an_outage_puts_nothing_out_and_pauses_the_run_instead(tmp_path: Path) -> None:
    """The verifier fails for all tasks for a while."""
    seen = 0

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        nonlocal seen
        seen += 1
        if 20 <= seen < 140:
            return trajectory(trajectory_id, task=task, status=Status.INFRA_VERIFIER)
        return even_slots_pass(task, trajectory_id, group_id)

    config = run_config(scheduler={"pause_masked_window": 16, "max_staleness": 8}, steps=4)
    run = Run(tmp_path, config, rollout=rollout, rollout_delay_s=0.002, quarantine=remembering(tmp_path))
    groups = run.go()
    assert run.steps == [1, 2, 3, 4] and seen > 140
    assert read_jsonl(tmp_path / QUARANTINE) == []
    assert all(g["outcome"] != "skipped_quarantined" for g in groups)
    assert {a.name.split("/")[0] for a in run.alarms if a.on} == {"masked"}


def test_it_is_not_sampled_after_a_resume_and_its_group_ends(tmp_path: Path) -> None:
    """The group of a task that was put out after the checkpoint comes back with the ledger; so does its task."""
    line = {"task_id": BROKEN_TASK, "source": "code", "index": 1, "class": "verifier", "errors": ["no"]}
    (tmp_path / QUARANTINE).write_text(json.dumps(line) + "\n", encoding="utf-8")
    log = MemoryLog()
    task = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, 1)
    log.admitted(RollingGroup(group_id=BROKEN, task=task, index=1, size=4, version=0, admitted_s=0.0))
    log.keep(trajectory(f"{BROKEN}/0.0", task=task))
    run = Run(
        tmp_path, run_config(), rollout=even_slots_pass, log=log, kept=log.load(0), quarantine=remembering(tmp_path)
    )
    groups = {g["group_id"]: g for g in run.go()}
    assert groups[BROKEN]["outcome"] == "skipped_quarantined"
    assert all(args[-1] != BROKEN for args in run.rollout.calls)
    assert all(args[0] != "restore" for args in run.rollout.calls)
    run.ledger.check()


def test_a_task_of_the_stream_that_is_out_is_passed_over(tmp_path: Path) -> None:
    quarantine = Quarantine(3, past=[{"task_id": BROKEN_TASK}])
    run = Run(tmp_path, run_config(), quarantine=quarantine)
    assert BROKEN not in {g["group_id"] for g in run.go()}
    assert all(args[-1] != BROKEN for args in run.rollout.calls)
    assert run.steps == [1, 2, 3]


# ---- the rule -------------------------------------------------------------------------------------------------------


class Attempts:
    """Attempts at tasks of one source, told to a quarantine."""

    def __init__(self, after: int | None = 3) -> None:
        self.quarantine = Quarantine(after)
        self.groups: dict[int, RollingGroup] = {}
        self.out: list[str] = []

    def _tell(self, index: int, status: Status) -> None:
        task = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, index)
        group_id = f"code-{index:06d}"
        new = RollingGroup(group_id=group_id, task=task, index=index, size=99, version=0, admitted_s=0.0)
        rolling = self.groups.setdefault(index, new)
        slot = len(rolling.members)
        one = trajectory(f"{group_id}/{slot}.0", task=task, status=status)
        self.out += self.quarantine.attempt(rolling, one, now_s=1.0, step=0)
        rolling.members[slot] = Member(trajectory=one, payload=None, transcript=None)

    def fails(self, index: int, times: int = 1, status: Status = Status.INFRA_VERIFIER) -> None:
        for _ in range(times):
            self._tell(index, status)

    def works(self, *indices: int) -> None:
        for index in indices:
            self._tell(index, Status.SUBMITTED)


def test_two_failures_and_failures_without_others_are_not_enough() -> None:
    a = Attempts()
    a.fails(0, 2)
    a.works(1, 2, 3, 4)
    assert a.out == []
    b = Attempts()
    b.fails(0, 50)
    assert b.out == [], "nobody knows whether others go well"
    b.works(1, 2, 1, 1)
    assert b.out == [], "two others are too few, however often"
    b.works(3)
    assert b.out == ["code/train/0/0"]
    assert "code/train/0/0" in b.quarantine and len(b.quarantine) == 1


def test_a_task_that_was_evaluated_once_is_not_broken() -> None:
    a = Attempts()
    a.works(0)
    a.fails(0, 10)
    a.works(1, 2, 3, 4, 5)
    assert a.out == []


def test_what_breaks_for_half_of_the_others_too_is_no_task_s_fault() -> None:
    a = Attempts()
    for i in range(1, 20):
        a.fails(0)
        a.fails(i) if i % 2 else a.works(i)
    assert a.out == []


def test_two_broken_tasks_do_not_hide_each_other() -> None:
    a = Attempts()
    a.works(10)
    for _ in range(6):
        a.fails(0)
        a.fails(1)
    a.works(11, 12, 13, 14)
    assert set(a.out) == {"code/train/0/0", "code/train/0/1"}


def test_the_last_task_of_an_outage_that_had_only_probes_is_not_broken() -> None:
    a = Attempts()
    a.works(0, 1, 2, 3)
    for index in range(4, 9):
        a.fails(index, 12)
        assert a.quarantine.complete(f"code/train/0/{index}") is False
    a.works(*range(20, 60))
    assert a.out == []


def test_what_goes_well_long_after_an_outage_does_not_count_against_the_tasks_of_the_outage() -> None:
    a = Attempts()
    for _ in range(12):
        for index in range(5):
            a.fails(index)
    for index in range(5):
        assert a.quarantine.complete(f"code/train/0/{index}") is False
    a.works(*range(100, 400))
    assert a.out == []


def test_other_losses_are_no_evaluation() -> None:
    a = Attempts()
    for status in (Status.INFRA_SANDBOX, Status.INFRA_ENGINE, Status.INFRA_WORKER, Status.INFRA_WALL):
        a.fails(0, 5, status)
    a.works(1, 2, 3, 4, 5)
    assert a.out == []
    a.fails(0, 3)
    a.fails(7, 2, Status.INFRA_SANDBOX)
    a.works(1, 2, 3)
    assert a.out == ["code/train/0/0"], "and none of others' either"


def test_many_others_between_two_failures_do_not_let_it_go() -> None:
    a = Attempts()
    for round_ in range(3):
        a.fails(0)
        a.works(*range(1 + 100 * round_, 60 + 100 * round_))
    assert a.out == ["code/train/0/0"]


def test_null_puts_nothing_out() -> None:
    a = Attempts(after=None)
    a.fails(0, 20)
    a.works(*range(1, 20))
    assert a.out == []


SNAPSHOT = ProgressSnapshot(
    step=3,
    total_steps=12,
    activity="waiting",
    activity_s=2.0,
    pools={},
    sources={},
    living=0,
    max_living=12,
    oldest_rollout_s=None,
    oldest_grading_s=None,
    cap_rate=None,
)


def shown(run_dir: Path) -> tuple[int, str]:
    out = io.StringIO()
    code = print_status(run_dir, console=Console(file=out, width=160))
    return code, out.getvalue()


def test_status_and_report_list_what_is_out(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_status(tmp_path, SNAPSHOT, state="running", idle_s=0.0)
    _, before = shown(tmp_path)
    assert "quarantine" not in before and "Tasks in quarantine" not in Page(write_report(tmp_path)).text
    error = "<b>setup</b> failed\x1b[2J"
    lines = [
        {"task_id": f"t/{i}", "source": "s", "index": i, "class": "setup", "failures": 3, "errors": [error], "step": 2}
        for i in range(7)
    ]
    (tmp_path / QUARANTINE).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    _, text = shown(tmp_path)
    assert "7 tasks, see quarantine.jsonl: ..., t/2 (setup)" in text and "t/6 (setup)" in text
    page = Page(write_report(tmp_path))
    assert "Tasks in quarantine" in page.text and "t/6" in page.text and "<b>setup</b> failed" in page.text
    assert "\x1b" not in page.text
