"""What the record of an engine says of payloads: sound ones are passed, every kind of damage is found."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from rollout.trajectory import Payload
from tests.bench.exact import EngineCall, appended, differences, read_calls, read_payload, write_payload

# Two calls, the second goes on where the first ended; a third one branches off after the first reply.
FIRST = EngineCall(
    request_id="g/0.0/0", prompt_ids=(1, 2, 3), token_ids=(7, 8), logprobs=(-0.5, -0.25), versions=(0, 0)
)
SECOND = EngineCall(
    request_id="g/0.0/1", prompt_ids=(1, 2, 3, 7, 8, 4), token_ids=(9,), logprobs=(-1.5,), versions=(1,)
)
BRANCH = EngineCall(
    request_id="g/0.0/2", prompt_ids=(1, 2, 3, 7, 8, 5), token_ids=(9, 9), logprobs=(-2.0, -3.0), versions=(1, 2)
)
SOUND = Payload(
    token_ids=np.array([1, 2, 3, 7, 8, 4, 9, 1, 2, 3, 7, 8, 5, 9, 9], np.int32),
    loss_mask=np.array([0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], np.bool_),
    logprobs=np.array([0, 0, 0, -0.5, -0.25, 0, -1.5, 0, 0, 0, 0, 0, 0, -2.0, -3.0], np.float32),
    versions=np.array([-1, -1, -1, 0, 0, -1, 1, -1, -1, -1, -1, -1, -1, 1, 2], np.int32),
    contexts=(0, 7),
)
CALLS = [FIRST, SECOND, BRANCH]


def changed(name: str, at: int, value: float) -> Payload:
    array = getattr(SOUND, name).copy()
    array[at] = value
    return replace(SOUND, **{name: array})


def test_what_the_engine_answered_is_found_in_every_context(tmp_path: Path) -> None:
    assert differences(SOUND, CALLS) == []
    write_payload(tmp_path / "p.npz", SOUND)
    assert read_payload(tmp_path / "p.npz").sha256() == SOUND.sha256()
    lines = [json.dumps(asdict(call)) + "\n" for call in CALLS]
    (tmp_path / "1.jsonl").write_text(lines[0] + lines[2])
    (tmp_path / "2.jsonl").write_text(lines[1].replace("g/0.0", "g/1.0"))
    other = replace(SECOND, request_id="g/1.0/1")
    assert read_calls(tmp_path) == {"g/0.0": [FIRST, BRANCH], "g/1.0": [other]}


@pytest.mark.parametrize(
    ("payload", "calls", "words"),
    [
        (changed("token_ids", 3, 6), CALLS, "g/0.0/0: is the beginning of no context"),
        (changed("token_ids", 12, 4), CALLS, "g/0.0/2: is the beginning of no context"),
        (changed("logprobs", 4, -0.3), CALLS, "g/0.0/0: other log-probabilities"),
        (changed("versions", 14, 1), CALLS, "g/0.0/2: other policy versions"),
        (changed("loss_mask", 6, 0), CALLS, "g/0.0/1: is the beginning of no context, or bears no loss"),
        (changed("loss_mask", 10, 1), CALLS, "1 tokens bear loss and were never sampled"),
        (changed("logprobs", 5, -0.1), CALLS, "have a probability or a version"),
        (changed("versions", 0, 0), CALLS, "have a probability or a version"),
        (replace(SOUND, contexts=(0,)), CALLS, "g/0.0/2: is the beginning of no context"),
        (SOUND, [*CALLS, replace(SECOND, request_id="g/0.0/3")], "g/0.0/3: is the beginning of no context"),
        (SOUND, [FIRST, SECOND], "2 tokens bear loss and were never sampled"),
    ],
)  # fmt: skip
def test_damage_is_found(payload: Payload, calls: list[EngineCall], words: str) -> None:
    assert any(words in line for line in differences(payload, calls))


def test_the_payload_of_calls_that_append() -> None:
    made = appended([FIRST, SECOND])
    assert made is not None
    assert made.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 9]
    assert made.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert made.logprobs.tolist() == [0, 0, 0, -0.5, -0.25, 0, -1.5]
    assert made.versions.tolist() == [-1, -1, -1, 0, 0, -1, 1]
    assert appended(CALLS) is None
    assert appended([FIRST, replace(SECOND, prompt_ids=(1, 2, 3, 7, 4))]) is None
