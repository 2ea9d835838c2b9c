"""The doctor asks real servers: one that accepts the key, one that refuses and repeats it, one that is silent, none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.schema import RunConfig
from infra import allowance, reach
from infra.errors import GagarError
from infra.findings import Finding, Level
from infra.reach import reachable
from orchestrator.cli import app

KEY = "open-sesame-7731"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(reach, "ANSWER_S", 1.0)


@contextmanager
def server(code: int, text: str = "", *, skew_s: float = 0.0, hangs: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Its address up to /v1, and what it was asked."""
    asked: list[Any] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            asked.append((self.path, self.headers.get("Authorization"), json.loads(self.rfile.read(length))))
            self.answer()

        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("X-API-Key"), None))
            self.answer()

        def answer(self) -> None:
            if hangs:
                over.wait(20.0)
                return
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            import time

            return formatdate(time.time() + skew_s, usegmt=True)

        def log_message(self, *_: Any) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}/v1", asked
    finally:
        over.set()
        serving.shutdown()
        serving.server_close()


def config(address: str = "", **sections: Any) -> RunConfig:
    backend = {"type": "endpoint", "base_url": address, "model": "m", "api_key_env": "KEY_OF_TEST"}
    return RunConfig.model_validate(
        {
            "name": "test",
            "steps": 1,
            "sources": {"chat": {"type": "arith", "groups_per_step": 1}},
            "engine": {"model": "policy"},
            "learner": {"model": "policy"},
            "grader": {"backend": backend} if address else None,
            "algorithm": {"mode": "outcome"} if not address else {},
            "eval": None,
            **sections,
        }
    )


def findings(config: RunConfig) -> dict[str, Finding]:
    found = {finding.name: finding for finding in reachable(config)}
    assert not any(KEY in finding.detail + finding.remedy for finding in found.values())
    assert all(finding.remedy for finding in found.values() if finding.level is not Level.OK)
    return found


def test_a_key_that_is_accepted() -> None:
    with server(200, "{}") as (address, asked):
        found = findings(config(address))
    assert found["endpoint"].level is Level.OK and "the key is accepted" in found["endpoint"].detail
    assert found["clock"].level is Level.OK
    ((path, authorization, question),) = asked
    assert path == "/v1/chat/completions" and authorization == f"Bearer {KEY}"
    assert question["model"] == "m" and question["max_tokens"] == 1, "one cheap question"


@pytest.mark.parametrize(
    ("code", "level", "remedy"),
    [
        (401, Level.FAIL, "KEY_OF_TEST"),
        (403, Level.FAIL, "KEY_OF_TEST"),
        (404, Level.FAIL, "grader.backend.model"),
        (429, Level.WARN, "quota"),
        (503, Level.WARN, "try again"),
    ],
)
def test_an_answer_that_is_none_says_what_to_do_and_not_the_key(code: int, level: Level, remedy: str) -> None:
    with server(code, f"you sent Bearer {KEY}, which") as (address, _):
        found = findings(config(address))["endpoint"]
    assert found.level is level and remedy in found.remedy
    assert f"answers {code}: you sent Bearer ***" in found.detail


def test_a_silent_server_and_none_at_all() -> None:
    with server(200, hangs=True) as (address, _):
        assert findings(config(address))["endpoint"].level is Level.FAIL
    assert "cannot be reached" in findings(config("http://127.0.0.1:9/v1"))["endpoint"].detail


def test_a_clock_that_is_wrong() -> None:
    with server(200, "{}", skew_s=300.0) as (address, _):
        found = findings(config(address))["clock"]
    assert found.level is Level.WARN and "behind" in found.detail


def test_sandbox_servers_get_their_token() -> None:
    with server(200) as (address, asked):
        host = address.removesuffix("/v1")
        sandbox = {"type": "remote", "hosts": [host, "http://127.0.0.1:9"], "token_env": "KEY_OF_TEST"}
        found = findings(config(rollout={"sandbox": sandbox}))["sandbox hosts"]
    assert asked == [("/is_alive", KEY, None)]
    assert found.level is Level.WARN and found.detail.startswith("1 of 2 servers answer; http://127.0.0.1:9: ")


def test_wandb_is_asked_only_where_a_run_goes_online(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(config()) == {}
    monkeypatch.setenv("WANDB_MODE", "online")
    with server(404) as (address, _):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        assert findings(config())["wandb server"].level is Level.OK
    assert findings(config())["wandb server"].level is Level.WARN


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(config(ray={"address": "ray://127.0.0.1:9"}))["ray"]
    assert found.level is Level.FAIL and "127.0.0.1:9 cannot be reached" in found.detail
    monkeypatch.setattr(reach, "RAY_S", 0.05)
    found = findings(config(ray={"address": "127.0.0.1:9"}))["ray"]
    assert found.level is Level.FAIL and "does not answer within 0.05 s" in found.detail


def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process that asks prints stands for the cluster, of which there is only one here."""
    said = {"address": "h:6379", "mine": "2.60.0", "ray_version": "2.51.0", "python_version": "3.11.7"}
    monkeypatch.setattr(reach, "_ASK_RAY", f"print('gagar:' + {json.dumps(said)!r})")
    found = findings(config(ray={"address": "h:6379"}))["ray"]
    assert found.level is Level.FAIL and "runs Ray 2.51.0" in found.detail
    said["ray_version"] = "2.60.0"
    monkeypatch.setattr(reach, "_ASK_RAY", f"print('gagar:' + {json.dumps(said)!r})")
    assert findings(config(ray={"address": "h:6379"}))["ray"].level is Level.OK


# ---- containers, and the command -------------------------------------------------------------------------------------


def test_a_container_s_share_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**29}\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable: {2**24} kB\n")
    assert allowance.cores(tmp_path) == 0.5
    assert allowance.memory_left_bytes(tmp_path, meminfo) == 2**30 + 2**29
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert allowance.cores(tmp_path) >= 1.0
    assert allowance.memory_left_bytes(tmp_path, meminfo) == 2**34


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    for name, value in {
        "cpu/cpu.cfs_quota_us": "25000",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(2**30),
        "memory/memory.usage_in_bytes": str(2**29),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value)
    assert allowance.cores(tmp_path) == 0.25
    assert allowance.memory_left_bytes(tmp_path) <= 2**29


def test_the_command_fails_when_a_check_does_and_speaks_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from infra import doctor
    from orchestrator import probe

    bad = Finding(name="git", level=Level.FAIL, detail="not found", remedy="apt-get install git")
    fine = Finding(name="sandbox", level=Level.OK, detail="jail works")
    monkeypatch.setattr(doctor, "diagnose", lambda _: [bad])
    monkeypatch.setattr(probe, "probe_sandbox", lambda _: fine)
    monkeypatch.setattr(probe, "probe_limits", lambda _: fine)
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(told.stdout)[0] == {
        "name": "git",
        "level": "fail",
        "detail": "not found",
        "remedy": "apt-get install git",
    }
    assert isinstance(told.exception, GagarError) and told.exception.exit_code == 1
    monkeypatch.setattr(doctor, "diagnose", lambda _: [fine])
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
