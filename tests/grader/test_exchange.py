"""M2.6, envelope: a reply counts only for exactly what was sent."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grader_parts import CLEAN, HARDCODED, NOISY, request_of, task

from grader.evidence import CheckResult
from grader.exchange import accept, base_state_of, lost_reply
from grader.scripted import ScriptedGrader
from grader.verdict import FallbackReason, Grade

OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)]


def exchange() -> tuple[Any, Any]:
    request, transcripts = request_of(OUTCOMES)
    return request, ScriptedGrader().reply(request, *transcripts)


def test_a_reply_to_what_was_sent_is_accepted_as_it_is() -> None:
    request, reply = exchange()
    assert accept(request, reply) is reply
    assert reply.grade.candidates["g1/0.0"].tier == "T1"


def test_transcripts_in_another_order_give_the_same_grade() -> None:
    request, transcripts = request_of(OUTCOMES)
    assert ScriptedGrader().reply(request, *transcripts) == ScriptedGrader().reply(request, *transcripts[::-1])


@pytest.mark.parametrize(
    "change",
    [
        {"group_id": "g2"},
        {"attempt": 1},
        {"base_state": "0" * 64},
        {"order_seed": 6},
        {"policy_versions": {}},
        {"policy_versions": {f"g1/{i}.0": (3, 5) for i in range(4)}},
        {"policy_versions": {f"g1/{i}.1": (3, 4) for i in range(4)}},
        {"grade": Grade(candidates={}, hacks={})},
        {"grade": None},
        {"fallback_reason": FallbackReason.TIMEOUT},
    ],
)
def test_anything_else_is_a_mismatch(change: dict[str, Any]) -> None:
    request, reply = exchange()
    seen = accept(request, dataclasses.replace(reply, **change))
    assert seen.grade is None
    assert seen.fallback_reason is FallbackReason.MISMATCH
    assert seen.detail


def test_swapped_replies_of_two_groups_move_nothing() -> None:
    request, reply = exchange()
    other = dataclasses.replace(
        request,
        group_id="g2",
        trajectories=tuple(
            dataclasses.replace(t, group_id="g2", trajectory_id=t.trajectory_id.replace("g1", "g2"))
            for t in request.trajectories
        ),
    )
    assert accept(other, reply).fallback_reason is FallbackReason.MISMATCH
    assert accept(request, dataclasses.replace(reply, group_id="g2")).fallback_reason is FallbackReason.MISMATCH


def test_a_grade_of_a_failing_trajectory_is_a_mismatch() -> None:
    request, reply = exchange()
    flipped = tuple(dataclasses.replace(t, passed=False) if i == 0 else t for i, t in enumerate(request.trajectories))
    seen = accept(dataclasses.replace(request, trajectories=flipped), reply)
    assert seen.fallback_reason is FallbackReason.MISMATCH


def test_a_fallback_stays_what_it_is() -> None:
    request, reply = exchange()
    timeout = dataclasses.replace(reply, grade=None, fallback_reason=FallbackReason.TIMEOUT)
    assert accept(request, timeout) is timeout
    lost = lost_reply(request, "the process died", run_s=1.5)
    assert accept(request, lost) is lost
    assert lost.fallback_reason is FallbackReason.WORKER_LOST


def test_base_state_depends_on_paths_and_contents() -> None:
    states = {
        base_state_of(task(files=files))
        for files in ({"a": "b"}, {"ab": ""}, {"": "ab"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {})
    }
    assert len(states) == 6
    assert base_state_of(task(files={"a": "1", "b": "2"})) == base_state_of(task(files={"b": "2", "a": "1"}))


def test_what_travels_between_processes_can() -> None:
    request, reply = exchange()
    assert pickle.loads(pickle.dumps(request)) == request
    assert pickle.loads(pickle.dumps(reply)) == reply


def test_the_audit_object_is_json_and_complete() -> None:
    _, reply = exchange()
    audit = json.loads(json.dumps(reply.audit()))
    assert json.loads(audit["verdict"])["hacks"] == []
    assert sorted(audit["labels"].values()) == [f"g1/{i}.0" for i in range(4)]
    assert audit["evidence"]["g1/0.0"] == []
    assert audit["reasons"]["g1/0.0"] == ["2 changed lines"] * 5
    assert set(audit["reasons"]) == {"g1/0.0", "g1/1.0", "g1/2.0"}
    assert (audit["checks"], audit["cost_usd"]) == ([], 0.0)


def test_the_audit_object_is_what_the_schema_describes() -> None:
    request, reply = exchange()
    path = Path(__file__).parents[2] / "orchestrator" / "groups.schema.json"
    schema = json.loads(path.read_text(encoding="utf-8"))["properties"]["grader"]
    checks = (
        CheckResult(number=1, candidate="C2", command="python3 -m unittest -q", exit_code=1, output="FAILED"),
        CheckResult(number=2, candidate="C1", command="sleep 900", exit_code=None, output=""),
    )
    checked = dataclasses.replace(reply, checks=checks, cost_usd=0.03)
    for one in (reply, checked, lost_reply(request, "the process died", run_s=1.5)):
        audit = one.audit()
        jsonschema.validate(audit, schema)
        assert set(audit) == set(schema["properties"])
    assert checked.audit()["checks"] == [
        {"number": 1, "candidate": "C2", "command": "python3 -m unittest -q", "exit_code": 1},
        {"number": 2, "candidate": "C1", "command": "sleep 900", "exit_code": None},
    ]


def test_a_fallback_keeps_its_checks_but_no_reasons() -> None:
    """What a grader ran before it failed was run all the same, and is audited (M1.10)."""
    _, reply = exchange()
    check = CheckResult(number=1, candidate="C1", command="true", exit_code=0, output="")
    audit = dataclasses.replace(
        reply, grade=None, fallback_reason=FallbackReason.TIMEOUT, detail="late", checks=(check,)
    ).audit()
    assert (audit["reasons"], audit["evidence"], audit["hacks"]) == ({}, {}, {})
    assert len(audit["checks"]) == 1
