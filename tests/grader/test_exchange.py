"""M2.6, envelope: a reply counts only for exactly what was sent."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from grader_parts import CLEAN, HARDCODED, NOISY, request_of, task

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
    required = {"model", "queue_s", "run_s", "turns", "prompt_tokens", "completion_tokens", "order_seed", "verdict"}
    assert required <= set(audit)
    assert json.loads(audit["verdict"])["hacks"] == []
    assert sorted(audit["labels"].values()) == [f"g1/{i}.0" for i in range(4)]
    assert audit["evidence"]["g1/0.0"] == []
