"""The doctor's sandbox is a real one, and one that cannot start is a finding with a remedy."""

from __future__ import annotations

import pytest

from configs.schema import RunConfig
from infra.findings import Level
from orchestrator.probe import probe_sandbox


def test_a_jail_starts_here_and_has_git() -> None:
    finding = probe_sandbox(None)
    assert finding.level is Level.OK, finding
    assert finding.detail.startswith("jail works, git version")


def test_servers_that_do_not_answer_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "x")
    sandbox = {"type": "remote", "hosts": ["http://127.0.0.1:9"], "token_env": "TOKEN_OF_TEST", "start_timeout_s": 2}
    config = RunConfig.model_validate(
        {
            "name": "test",
            "steps": 1,
            "sources": {"chat": {"type": "arith", "groups_per_step": 1}},
            "engine": {"model": "policy"},
            "learner": {"model": "policy"},
            "rollout": {"sandbox": sandbox},
        }
    )
    finding = probe_sandbox(config)
    assert finding.level is Level.FAIL
    assert "docs/security.md" in finding.remedy
