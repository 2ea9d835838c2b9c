from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from run_folder import evaluation

from orchestrator.bottleneck import CAUSES
from orchestrator.progress import (
    PoolLoad,
    Progress,
    ProgressSnapshot,
    SourceLoad,
    clock_text,
    end_table,
    progress_line,
    render,
    stall_message,
    summary_rows,
)


def load(**changes: Any) -> SourceLoad:
    given: dict[str, Any] = {"quota": 4, "rolling": 0, "grading": 0, "ready": 0, "trained": 8, "skipped": 2}
    return SourceLoad(**{**given, "reward": 0.5, **changes})


def snapshot(**changes: Any) -> ProgressSnapshot:
    given: dict[str, Any] = {
        "step": 2,
        "total_steps": 12,
        "activity": "waiting",
        "activity_s": 7.0,
        "pools": {"rollout": PoolLoad(busy=30, slots=48), "grader": PoolLoad(busy=1, slots=4)},
        "sources": {"minirepo": load(rolling=5, grading=3, ready=1), "arith": load(quota=1, ready=1, reward=None)},
        "living": 10,
        "max_living": 12,
        "oldest_rollout_s": 40.0,
        "oldest_grading_s": 118.0,
        "cap_rate": 0.125,
    }
    return ProgressSnapshot(**{**given, **changes})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[io.StringIO, Console]:
    out = io.StringIO()
    return out, Console(file=out, width=100, force_terminal=False)


# ---- live progress --------------------------------------------------------------------------------------------------


def test_away_from_a_terminal_one_line_an_interval() -> None:
    out, console = plain()
    clock = Clock()
    progress = Progress(12, 10.0, console=console, clock=clock)
    for now in (1.0, 5.0, 10.9, 11.0, 12.0):
        clock.now = now
        progress.update(snapshot())
    clock.now = 21.0
    progress.event("policy engine ready 21 s")
    progress.close()
    line = (
        "step 2/12 waiting | rollout 30/48 | grader 1/4 | "
        "minirepo: 5 rolling, 3 grading, 1/4 ready, 8 trained, 2 skipped, reward 0.50 | "
        "arith: 0 rolling, 0 grading, 1/1 ready, 8 trained, 2 skipped | cap 12%"
    )
    assert out.getvalue().splitlines() == [f"[0:01] {line}", f"[0:11] {line}", "[0:21] policy engine ready 21 s"]


def test_on_a_terminal_the_display_holds_pools_states_and_rewards() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    progress = Progress(12, 10.0, console=console, clock=Clock())
    progress.update(snapshot())
    progress.event("[bold]not markup[/bold]")
    progress.close()
    shown = out.getvalue()
    for text in ("step 2/12", "30/48 busy", "1/4 busy", "waiting 7 s", "cap rate 12%", "1/4", "0.50"):
        assert text in shown
    assert "[0:00] [bold]not markup[/bold]" in shown


def test_an_alarm_stays_in_sight_while_it_is_on() -> None:
    line = progress_line(snapshot(alarms=("canary_agreement", "fallback_rate")), 1.0)
    assert line.endswith("cap 12% | ALARM canary_agreement, fallback_rate")
    assert "ALARM" not in progress_line(snapshot(), 1.0)
    out, console = plain()
    console.print(render(snapshot(alarms=("fallback_rate",)), 1.0))
    assert "ALARM fallback_rate" in out.getvalue()


def test_clock_text() -> None:
    assert [clock_text(s) for s in (7.9, 754.0, 3723.0)] == ["0:07", "12:34", "1:02:03"]


# ---- stalls ---------------------------------------------------------------------------------------------------------


def test_a_stall_behind_the_grader_names_it() -> None:
    stalled = snapshot(
        pools={"rollout": PoolLoad(busy=0, slots=48), "grader": PoolLoad(busy=1, slots=4)},
        sources={"minirepo": load(grading=3, ready=1), "arith": load(quota=1, ready=1)},
    )
    assert stall_message(stalled, 120.0) == (
        "no progress for 120 s: training waits for minirepo groups (1 of 4 ready); "
        "3 groups are at the graders (1 of 4 slots busy, the oldest since 118 s); rollout pool idle"
    )


def test_a_stall_behind_rollouts_names_them() -> None:
    stalled = snapshot(sources={"minirepo": load(rolling=1, ready=3)}, oldest_grading_s=None)
    assert stall_message(stalled, 130.4) == (
        "no progress for 130 s: training waits for minirepo groups (3 of 4 ready); "
        "1 group is rolling out (30 of 48 slots busy, the oldest since 40 s)"
    )


def test_a_source_that_gets_no_groups_is_named_with_the_reason() -> None:
    sources = {"minirepo": load(rolling=12, ready=4), "arith": load(quota=2)}
    full = stall_message(snapshot(sources=sources, living=12), 60.0)
    assert full.endswith("no arith group is under way (12 of 12 in flight; the in-flight limit is reached)")
    free = stall_message(snapshot(sources=sources, living=9), 60.0)
    assert free.endswith("no arith group is under way (9 of 12 in flight; the mixer admits none)")


def test_a_stall_in_the_learner_names_it_and_not_the_queues_it_holds_up() -> None:
    message = stall_message(snapshot(activity="learning", activity_s=300.0, sources={"minirepo": load(ready=2)}), 300.0)
    assert message.startswith("no progress for 300 s: the training loop has been learning since 300 s")
    assert "training waits" not in message
    assert "under way" not in message


# ---- end ------------------------------------------------------------------------------------------------------------


def test_the_end_table_adds_up() -> None:
    metrics: list[dict[str, Any]] = [
        {
            "step": 1,
            "grading/tier1_share": 0.25,
            "redistribution/lambda_capped_rate": 0.0,
            "overlap/share": 0.5,
            "time/rollout_s": 20.0,
            "time/learning_s": 10.0,
        },
        {"step": 2, "time/rollout_s": 10.0, "time/learning_s": 10.0, "learner/loss": None},
        {
            "step": 3,
            "grading/tier1_share": 0.5,
            "redistribution/lambda_capped_rate": 0.1,
            "overlap/share": 0.0,
            "time/rollout_s": 10.0,
        },
    ]
    evals = [evaluation("before", 0, 0.4), evaluation("after", 3, 0.55)]
    assert summary_rows(metrics, evals, {"start-up": 40.0}) == [
        ("Held-out pass rate, minirepo", "40.0% -> 55.0% (+15.0 points), avg@3 over 60 tasks"),
        ("T1 share of graded passes", "25% (step 1) -> 50% (step 3)"),
        ("Cap rate, mean over steps", "5.0%"),
        ("Grading beside rollouts", "25% of grading time, in 1 of 3 steps"),
        ("Where the time went", "start-up 40 s (40%), rollout 40 s (40%), learning 20 s (20%); 100 s in all"),
    ]


def test_the_end_table_says_what_bounded_the_run() -> None:
    causes = {f"bottleneck/{cause}": 0.0 for cause in CAUSES}
    step = {"step": 1, "time/step_s": 10.0, **causes, "bottleneck/grader": 0.6, "bottleneck/learner": 0.4}
    ((name, text),) = summary_rows([{**step, "bottleneck/queued_groups": 2.5}], [], {})
    assert name == "Bottleneck"
    assert text == (
        "add graders: they bound 60 % of the step (the learner waited while every grader slot was busy and 2.5 groups "
        "queued for one); grader 60 %, learner 40 %"
    )


def test_the_end_table_of_a_run_without_data_is_empty_and_half_an_evaluation_says_so() -> None:
    assert summary_rows([], [], {}) == []
    assert summary_rows([], [evaluation("before", 0, None)], {}) == []
    (row,) = summary_rows([], [evaluation("before", 0, 0.4), evaluation("after", 3, None)], {})
    assert row == ("Held-out pass rate, minirepo", "before training: 40.0%, avg@3 over 60 tasks")
    out, console = plain()
    console.print(end_table([], [evaluation("before", 0, 0.4)]))
    assert "before training: 40.0%" in out.getvalue()
