"""What the record of an engine says of payloads: sound ones are passed, every kind of damage is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from rollout.trajectory import Payload
from tests.bench import harness
from tests.bench.exact import EngineCall, appended, differences, read_calls, read_payload, write_payload

POLICY = str(harness.POLICY)
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


# ---- a whole run ----------------------------------------------------------------------------------------------------


def calls_of(name: str, prompt: list[int], replies: list[list[int]]) -> list[EngineCall]:
    """Calls that append one shown token each, with the probabilities of the shipped policy, one prefix at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    calls, shown = [], list(prompt)
    for number, reply in enumerate(replies):
        begin, logprobs = tuple(shown), []
        for token in reply:
            with torch.inference_mode():
                last = model(torch.tensor([shown])).logits[0, -1]
            logprobs.append(float(last.log_softmax(-1)[token]))
            shown.append(token)
        calls.append(
            EngineCall(
                request_id=f"{name}/{number}",
                prompt_ids=begin,
                token_ids=tuple(reply),
                logprobs=tuple(logprobs),
                versions=(0,) * len(reply),
            )
        )
        shown.append(9)
    return calls


@pytest.fixture(scope="module")
def sound_calls() -> dict[str, list[EngineCall]]:
    return {
        name: calls_of(name, [5, 40, 41, slot], [[60, 61, 4], [62, 4]]) for slot, name in ((7, "g/0.0"), (8, "g/1.0"))
    }


class Run:
    """What a training with two trajectories left, to be damaged before it is read."""

    def __init__(self, folder: Path, calls: dict[str, list[EngineCall]]) -> None:
        self.folder = folder
        self.calls = dict(calls)
        payloads = {name: appended(given) for name, given in calls.items()}
        self.payloads = {name: payload for name, payload in payloads.items() if payload is not None}
        self.rows: list[dict[str, Any]] = [
            {
                "id": name,
                "valid": True,
                "passed": slot == 0,
                "status": "submitted",
                "turns": 2,
                "drift": 0,
                "contexts": 1,
                "payload_sha256": payload.sha256(),
            }
            for slot, (name, payload) in enumerate(self.payloads.items())
        ]
        self.metrics = {
            "step": 1,
            "learner/logprob_gap_max": 1e-6,
            "trajectories/drift_mean": 0.0,
            "trajectories/contexts_mean": 1.0,
        }

    def read(self) -> list[str]:
        for name in ("run", "calls", "given"):
            (self.folder / name).mkdir()
        group = {"outcome": "trained", "trajectories": self.rows}
        (self.folder / "run" / "groups.jsonl").write_text(json.dumps(group) + "\n")
        (self.folder / "run" / "metrics.jsonl").write_text(json.dumps(self.metrics) + "\n")
        lines = [json.dumps(asdict(call)) + "\n" for calls in self.calls.values() for call in calls]
        (self.folder / "calls" / "1.jsonl").write_text("".join(lines))
        for name, payload in self.payloads.items():
            write_payload(self.folder / "given" / f"{quote(name, safe='')}.npz", payload)
        found = harness.read(
            "mini",
            self.folder / "run",
            self.folder / "calls",
            self.folder / "given",
            steps=1,
            at_least=2,
            tolerance=1e-3,
        )
        return found.problems


def other_token(run: Run) -> None:
    payload = run.payloads["g/0.0"]
    payload.token_ids[5] += 1


def other_digest(run: Run) -> None:
    run.rows[0]["payload_sha256"] = "0" * 64


def other_probability(run: Run) -> None:
    """Wherever it stands: the engine's answer, the payload and its digest agree."""
    first = run.calls["g/0.0"][0]
    run.calls["g/0.0"] = [
        replace(first, logprobs=(first.logprobs[0] - 0.01, *first.logprobs[1:])),
        *run.calls["g/0.0"][1:],
    ]
    payload = appended(run.calls["g/0.0"])
    assert payload is not None
    run.payloads["g/0.0"] = payload
    run.rows[0]["payload_sha256"] = payload.sha256()


DAMAGE: dict[str, tuple[Callable[[Run], Any], str]] = {
    "nothing": (lambda run: None, ""),
    "token": (other_token, "g/0.0/0: is the beginning of no context"),
    "digest": (other_digest, "g/0.0: what the engine answered has another digest"),
    "probability": (other_probability, "recomputed log-probabilities differ by 0.01"),
    "not given": (lambda run: run.payloads.pop("g/1.0"), "the learner was given 1 trajectories, groups.jsonl has 2"),
    "unseen drift": (lambda run: run.rows[1].update(drift=1, contexts=2), "g/1.0: drift = 1, yet the engine was asked"),
    "drift's mean": (
        lambda run: run.metrics.update({"trajectories/drift_mean": 0.5}),
        "trajectories/drift_mean is [0.5]",
    ),
    "learner's gap": (
        lambda run: run.metrics.update({"learner/logprob_gap_max": 0.5}),
        "the learner's log-probabilities",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_a_run_left_is_held_against_the_engine(
    tmp_path: Path, sound_calls: dict[str, list[EngineCall]], name: str
) -> None:
    damage, words = DAMAGE[name]
    run = Run(tmp_path, sound_calls)
    damage(run)
    problems = run.read()
    assert problems == [] if not words else any(words in problem for problem in problems), problems
