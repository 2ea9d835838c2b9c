"""A payload that is lost with its node, in a real cluster of two."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from learner.payloads import PayloadsLost


def test_the_error_survives_pickling_and_says_how_many() -> None:
    error = pickle.loads(pickle.dumps(PayloadsLost({"g/0.0": "gone", "g/1.0": "gone too"})))
    assert error.reasons == {"g/0.0": "gone", "g/1.0": "gone too"}
    assert "2 trajectories" in str(error) and "g/0.0" in str(error)


@pytest.mark.e2e
def test_a_payload_lost_with_its_node_is_noticed_and_the_others_are_kept() -> None:
    scenario = Path(__file__).with_name("payload_scenario.py")
    done = subprocess.run(
        (sys.executable, str(scenario)), cwd=scenario.parents[2], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["is_loss"], seen
    assert list(seen["gone"]) == ["1"] and "payload lost with its node" in seen["gone"]["1"]
    assert seen["held"] == [], "a share is held whole or not at all"
    assert seen["rest"] == [100_000], "the rank goes on with what is left"
