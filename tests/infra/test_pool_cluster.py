"""A pool survives nodes that leave, and grows onto nodes that come, if they carry its labels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.schema import Resources
from infra.placement import actor_options, asks


@pytest.mark.e2e
def test_a_pool_grows_onto_a_new_node_and_outlives_its_loss() -> None:
    script = Path(__file__).with_name("cluster_scenario.py")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (
        line for line in done.stdout.splitlines() if line.startswith('{"accepted"')
    )  # a node that dies prints too
    seen = json.loads(line)
    assert (seen["accepted"], seen["ended"], seen["left"]) == (True, 8, True), seen["said"]
    assert (seen["lost_by_leaving"], seen["handed_back"]) == ([], 0)
    assert seen["unplaced"] == 2, "a node without the label takes no worker of this pool"
    assert seen["jobs"] == list(range(40)), "every job was done, and none twice"
    assert seen["lost"] >= 1, "work was under way on the node that left"
    assert seen["gone_is_gone"] and seen["nodes_after"]
    assert seen["restarts"] >= 2, "both are replaced; one that was sent to the dying node once more"


def test_resources_become_options_of_an_actor() -> None:
    assert actor_options(Resources()) == {"num_cpus": 0.0, "num_gpus": 0.0, "resources": None}
    resources = Resources(cpus=2, gpus=0.5, custom={"big": 1}, labels={"pool": "graders"})
    assert actor_options(resources, gpus=1) == {
        "num_cpus": 2.0,
        "num_gpus": 1,
        "resources": {"big": 1.0},
        "label_selector": {"pool": "graders"},
    }
    assert asks(resources) and not asks(Resources(labels={"pool": "graders"}))
