"""What the configuration of other harnesses refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.check import load_run
from configs.errors import ConfigError


def test_harnesses_are_read(run_file: Path, tmp_path: Path) -> None:
    assert load_run(run_file).config.rollout.harness.type == "builtin"
    mini = load_run(run_file, ["rollout.harness={type: mini_swe_agent, tool_calls: true}"]).config.rollout.harness
    assert mini.type == "mini_swe_agent" and mini.tool_calls
    command = ["rollout.harness={type: command, command: run it, paths: [" + str(tmp_path) + "]}"]
    assert load_run(run_file, command).config.rollout.harness.type == "command"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.harness={type: command, command: x}", "rollout.sandbox={type: remote, hosts: ['http://a:1']}"],
            r"rollout\.harness\.type = command: reaches the gateway by a socket",
        ),
        (
            ["rollout.harness={type: command, command: x, paths: [/no/where]}"],
            r"rollout\.harness\.paths.*names /no/where, which is no folder",
        ),
        (
            ["rollout.harness={type: mini_swe_agent, config_file: /no/where.yaml}"],
            r"rollout\.harness\.config_file.*is no file",
        ),
        (
            ["rollout.harness={type: mini_swe_agent}", "rollout.action_format=fenced"],
            r"rollout\.action_format.*has no effect",
        ),
    ],
)
def test_what_a_harness_cannot_use_is_refused(run_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(run_file, overrides)
