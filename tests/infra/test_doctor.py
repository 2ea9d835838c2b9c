"""What `gagar doctor` finds on this machine, and how it judges a configuration it cannot run here."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import RunConfig
from infra.doctor import diagnose
from infra.findings import Level


def config(**sections: object) -> RunConfig:
    base = {
        "name": "test",
        "steps": 1,
        "sources": {"chat": {"type": "arith", "groups_per_step": 1}},
        "engine": {"model": "policy"},
        "learner": {"model": "policy"},
        "eval": None,
    }
    return RunConfig.model_validate({**base, **sections})


def test_this_machine_can_run_the_project() -> None:
    findings = {finding.name: finding for finding in diagnose(None)}
    assert {name for name, finding in findings.items() if finding.level is Level.FAIL} == set()
    assert findings["git"].detail.startswith("git version")
    assert findings["packages"].detail == "as in requirements/cpu.txt"


def test_every_finding_that_is_not_ok_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("KEY_OF_TEST", raising=False)
    cluster = config(
        engine={"model": "policy", "device": "cuda", "resources": {"gpus": 1}},
        grader={"backend": {"type": "endpoint", "base_url": "http://h/v1", "model": "m", "api_key_env": "KEY_OF_TEST"}},
        ray={"object_store_mib": 10**9},
        output="/proc/nowhere",
    )
    findings = {finding.name: finding for finding in diagnose(cluster)}
    assert findings["git"].remedy == "apt-get install git"
    assert findings["gpu"].level is Level.FAIL
    assert findings["key"].detail == "KEY_OF_TEST is not set"
    assert "--shm-size" in findings["/dev/shm"].remedy
    assert all(finding.remedy for finding in findings.values() if finding.level is not Level.OK)


def test_secrets_are_named_but_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "s3cret")
    backend = {"type": "endpoint", "base_url": "http://h/v1", "model": "m", "api_key_env": "KEY_OF_TEST"}
    findings = diagnose(config(grader={"backend": backend}))
    assert any(finding.detail == "KEY_OF_TEST is set" for finding in findings)
    assert not any("s3cret" in finding.detail + finding.remedy for finding in findings)


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in diagnose(config(output=str(tmp_path / "new" / "runs")))}
    assert findings["disk"].level is Level.OK
    assert str(tmp_path) in findings["disk"].detail
