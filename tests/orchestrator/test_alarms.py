"""The graders' rolling figures, and when an alarm on them begins, ends and is told (M7)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from run_folder import canary_line
from scripted import grader_config, run_config

from grader.verdict import FallbackReason
from orchestrator.alarms import Alarm, GraderWatch
from orchestrator.observer import RunObserver
from orchestrator.progress import Progress


def test_figures_are_of_the_last_groups_and_canaries() -> None:
    watch = GraderWatch(grader_config(alarms={"window": 4}, canaries={"window": 2}))
    assert watch.scalars() == {}
    for reason in (FallbackReason.SCHEMA, None, None, FallbackReason.TIMEOUT, FallbackReason.UNRESOLVED_EVIDENCE):
        watch.group(reason)
    # The last four: two valid verdicts, one invalid, one timeout without any.
    assert watch.scalars() == pytest.approx(
        {"grader/fallback_rate": 0.5, "grader/validity_rate": 2 / 3, "alarm/fallback_rate": 0.0}
    )
    for line in (canary_line(0.0, -1.0), canary_line(0.5, 0.2), canary_line(1.0, None)):
        watch.canary(line)
    figures = {k: v for k, v in watch.scalars().items() if k.startswith(("canary/", "alarm/canary"))}
    assert figures == pytest.approx(
        {
            "canary/tier_agreement": 0.75,
            "canary/kendall_tau_b": 0.2,
            "canary/validity_rate": 1.0,
            "alarm/canary_agreement": 0.0,
        }
    )


def test_the_fallback_alarm_begins_when_the_window_cannot_come_out_well_and_ends_once() -> None:
    watch = GraderWatch(grader_config(alarms={"window": 4, "fallback_above": 0.5}))
    told = [watch.group(r) for r in (FallbackReason.TIMEOUT, FallbackReason.TIMEOUT, FallbackReason.NOT_JSON)]
    assert [len(changes) for changes in told] == [0, 0, 1]
    (begun,) = told[-1]
    assert begun.on and begun.name == "fallback_rate"
    assert begun.text.startswith("3 of the last 3 groups fell back") and "timeout 2, not_json 1" in begun.text
    assert watch.alarms == ("fallback_rate",) and watch.scalars()["alarm/fallback_rate"] == 1.0
    assert watch.group(FallbackReason.TIMEOUT) == [], "told once"
    assert watch.group(None) == watch.group(None) == [], "half of the window: at the threshold it stays"
    (ended,) = watch.group(None)
    assert not ended.on and watch.alarms == () and watch.scalars()["alarm/fallback_rate"] == 0.0


def test_the_canary_alarm_waits_for_a_full_window() -> None:
    watch = GraderWatch(grader_config(canaries={"window": 3, "alarm_below": 0.6}))
    assert watch.canary(canary_line(0.0, None)) == watch.canary(canary_line(0.5, None)) == []
    (begun,) = watch.canary(canary_line(1.0, None))
    assert begun.on and begun.text.startswith("50% of the tiers in the last 3 canaries are right, below")
    assert watch.canary(canary_line(0.0, None)) == []
    assert watch.canary(canary_line(None, None, "timeout")) == [], "the mean of .0, 1.0 is still below"
    (ended,) = [change for _ in range(3) for change in watch.canary(canary_line(1.0, None))]
    assert not ended.on


def test_an_alarm_does_not_come_and_go_at_its_threshold() -> None:
    watch = GraderWatch(
        grader_config(alarms={"window": 10, "fallback_above": 0.5}, canaries={"window": 2, "alarm_below": 0.6})
    )
    reasons = ([FallbackReason.NOT_JSON] * 6 + [None] * 5) * 4
    groups = [a for reason in reasons for a in watch.group(reason)]
    assert [(a.name, a.on) for a in groups] == [("fallback_rate", True)], "of any ten 5 or 6 fell back"
    assert [a.on for _ in range(10) for a in watch.group(None)] == [False]
    canaries = [a for value in [0.7, 0.45, 0.7, 0.55] * 4 for a in watch.canary(canary_line(value, None))]
    assert [(a.name, a.on) for a in canaries] == [("canary_agreement", True)], "of 2 canaries 57 or 62 % are right"
    assert [a.on for _ in range(2) for a in watch.canary(canary_line(0.7, None))] == [False]


def test_canaries_without_any_verdict_leave_the_agreement_alarm_as_it_is() -> None:
    watch = GraderWatch(grader_config(canaries={"window": 2, "alarm_below": 0.6}))
    lost = canary_line(None, None, "worker_lost")
    assert watch.canary(lost) == watch.canary(lost) == []
    assert watch.scalars() == {"alarm/canary_agreement": 0.0}, "no agreement, no validity: no key"
    told = [change for value in (0.0, 0.0) for change in watch.canary(canary_line(value, None))]
    assert [a.on for a in told] == [True]
    assert watch.canary(lost) == watch.canary(lost) == [] and watch.alarms == ("canary_agreement",)


def test_the_window_over_canaries_survives_a_resume_and_an_alarm_that_is_still_on_is_told_again() -> None:
    config = grader_config(canaries={"window": 3, "alarm_below": 0.6})
    past = [canary_line(0.0, None, number=n) for n in range(5)]
    watch = GraderWatch(config, past)
    assert watch.scalars()["canary/tier_agreement"] == 0.0 and watch.scalars()["alarm/canary_agreement"] == 1.0
    (again,) = watch.canary(canary_line(1.0, None))
    assert again.on and "33%" in again.text


def test_an_alarm_is_one_line_on_the_console_and_an_alert(tmp_path: Path) -> None:
    class Telemetry:
        alerts: list[tuple[str, str]]

        def __init__(self) -> None:
            self.alerts = []

        def alert(self, title: str, text: str) -> None:
            self.alerts.append((title, text))

    out, telemetry = io.StringIO(), Telemetry()
    progress = Progress(3, 10.0, console=Console(file=out, width=100), clock=lambda: 0.0)
    observer = RunObserver(run_config(), tmp_path, cast(Any, telemetry), progress)
    observer.on_alarm(Alarm(name="fallback_rate", on=True, text="3 of 4"))
    observer.on_alarm(Alarm(name="fallback_rate", on=False, text="2 of 4"))
    assert out.getvalue().splitlines() == [
        "[0:00] ALARM fallback_rate: 3 of 4",
        "[0:00] alarm fallback_rate is over: 2 of 4",
    ]
    assert telemetry.alerts == [
        ("scripted: ALARM fallback_rate", "3 of 4"),
        ("scripted: alarm fallback_rate is over", "2 of 4"),
    ]
