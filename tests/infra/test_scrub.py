"""No sink lets a secret through: planted ones are looked for in everything that a run leaves and says."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from configs.schema import RunConfig, WandbConfig
from infra import scrub as scrubbing
from infra.scrub import hide, install, key_variables, scrub, scrubbed
from infra.sinks import JsonlFile
from infra.telemetry import Telemetry
from infra.waits import Waits
from infra.watchdog import Watchdog
from orchestrator.observer import RunObserver
from orchestrator.progress import Progress

PLAIN = "correct-horse/battery staple"
"""Has no shape of a key: only its variable's name says what it is."""
UNNAMED = "7Vq-mellon-7Vq"
"""Nothing but the configuration says that its variable holds a key."""
SECRETS = (PLAIN, UNNAMED)


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRADER_API_KEY", PLAIN)
    monkeypatch.setenv("WHERE_IT_IS", UNNAMED)
    monkeypatch.setattr(scrubbing._Known, "names", frozenset())
    before = logging.getLogRecordFactory()
    hide(["WHERE_IT_IS"])
    yield
    logging.setLogRecordFactory(before)
    monkeypatch.undo()
    hide(())


@pytest.mark.parametrize(
    "text",
    [
        f"key {PLAIN}, {UNNAMED}",
        json.dumps({"deep": [f"x{PLAIN}x"]}),
        "https://api/v1?key=correct-horse%2Fbattery%20staple",
        "Authorization: Bearer abcdefghijk",
        "{'authorization': 'Basic dXNlcjpwYXNz'}",
        '{"x-api-key": "hello-there-key"}',
        "sent bearer a1b2c3d4e5f6",
        "sk-ant-abc123def456",
        "hf_abcdefghijkl",
        "ghp_abcdefghijklmnop",
        "github_pat_11ABCDEF",
        "AKIAIOSFODNN7EXAMPLE",
        "http://user:pass@host/v1",
        "wandb_v1_abcdefghijkl",
        "wandb login 0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    hidden = scrub(text)
    assert "***" in hidden
    for part in (*SECRETS, "correct-horse", "abcdef", "dXNl", "hello-there", "a1b2", "IOSFO", "user:pass", "0123456"):
        assert part not in hidden


@pytest.mark.parametrize(
    "text",
    [
        "commit 0123456789abcdef0123456789abcdef01234567 of the repository",
        "api_key_env: OPENAI_API_KEY is not set",
        "total_tokens=131072, max_tokens: 5",
        "the bearer of bad news",
        "step 3/4 waiting | rollout 16/16",
        "http://host:8000/v1/chat",
        "step-000030/policy",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert scrub(text) == text


def test_numbers_short_values_and_places_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_TOKEN", "131072")
    monkeypatch.setenv("A_KEY", "yes")
    monkeypatch.setenv("SSL_KEY_FILE", "/etc/ssl/private")
    hide(())
    assert scrub("yes 131072 /etc/ssl/private") == "yes 131072 /etc/ssl/private"


@pytest.mark.parametrize("name", ["MYSQL_PWD", "SMTP_PASS", "AZURE_DEVOPS_EXT_PAT"])
def test_short_names_of_secrets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "hunter2-hunter2")
    monkeypatch.setenv("PWD", "/srv/some/where")
    hide(())
    assert scrub("hunter2-hunter2 in /srv/some/where") == "*** in /srv/some/where"


def test_json_stays_json() -> None:
    line = {"a": [f'TOKEN="{PLAIN}"', {"b": UNNAMED}], "c": 1.5, "d": None}
    assert json.loads(json.dumps(scrubbed(line))) == {"a": ['TOKEN="***"', {"b": "***"}], "c": 1.5, "d": None}


def test_log_records_and_their_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    install()
    install()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("test_scrub")
    logger.addHandler(handler)
    try:
        logger.warning("refused %s", PLAIN)
        logger.warning("no arguments, 100 %")
        try:
            raise ValueError(f"with {UNNAMED}")
        except ValueError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)
    text = stream.getvalue()
    assert "refused ***" in text and "100 %" in text and "ValueError: with ***" in text and "Traceback" in text
    assert not any(secret in text for secret in SECRETS)


def test_the_variables_of_a_configuration() -> None:
    assert key_variables(config()) == ["WHERE_IT_IS"]


def config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "planted",
            "steps": 1,
            "sources": {"chat": {"type": "arith", "groups_per_step": 1}},
            "engine": {"model": "policy"},
            "learner": {"model": "policy"},
            "grader": {
                "backend": {"type": "endpoint", "base_url": "http://h/v1", "model": "m", "api_key_env": "WHERE_IT_IS"}
            },
            "eval": None,
        }
    )


def test_no_file_of_a_run_and_no_line_of_its_console_holds_a_secret(tmp_path: Path) -> None:
    """The real sinks, each given what it may meet: an endpoint's answer that repeats the key, a task, an error."""
    out = io.StringIO()
    progress = Progress(1, 60.0, console=Console(file=out, width=200))
    echo = f'endpoint said 401: {{"authorization": "Bearer {UNNAMED}"}} ({PLAIN})'
    telemetry = Telemetry(
        tmp_path, wandb=WandbConfig(mode="offline"), config={**config().model_dump(mode="json"), "note": echo}
    )
    observer = RunObserver(config(), tmp_path, telemetry, progress)
    observer.state("failed", error=echo)
    telemetry.record_span("grade", 0.0, 1.0, error=echo)
    telemetry.log_step(1, {"x": 1.0})
    telemetry.alert("fallbacks", echo)
    progress.event(echo)
    audit = JsonlFile(tmp_path / "groups.jsonl", sync=True)
    audit.append({"fallback_detail": echo})
    audit.close()

    watchdog = Watchdog(
        tmp_path,
        Waits(),
        stall_after_s=0.1,
        abort_after_s=60.0,
        say=progress.event,
        ended=print,
        collect=lambda: ([], []),
    )
    watchdog.headline = lambda _: echo
    watchdog.start()
    with watchdog.waits.on("grading", echo):
        folders: list[Path] = []
        while not folders:
            folders = list(tmp_path.glob("stacks/*/waits.txt"))
    watchdog.close()
    telemetry.close()
    assert_clean(tmp_path)
    assert "***" in (tmp_path / "status.json").read_text() and "***" in folders[0].read_text()
    assert "***" in out.getvalue() and not any(secret in out.getvalue() for secret in SECRETS)
    assert list(tmp_path.glob("wandb/**/*.wandb")), "W&B wrote what was looked at"


def assert_clean(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for secret in SECRETS:
                assert secret.encode() not in content, path


def test_a_command_that_fails_does_not_show_it(tmp_path: Path) -> None:
    """An error of this program's own, and a fault in it, both of which carry a secret."""
    script = (
        "import sys\nfrom orchestrator import cli\nfrom infra.errors import GraderError\n"
        "def fail(): raise {error}\ncli.app = fail\ncli.main()\n"
    )
    for error in (f"GraderError('said {PLAIN}')", f"ZeroDivisionError('said {PLAIN}')"):
        ended = subprocess.run(
            [sys.executable, "-c", script.format(error=error)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert ended.returncode == 1
        assert "said ***" in ended.stderr and PLAIN not in ended.stderr + ended.stdout


def test_what_a_failed_grading_says_is_clean_before_it_reaches_the_ledger() -> None:
    from grader.exchange import GradeRequest, lost_reply

    request = GradeRequest(
        group_id="g",
        task=None,  # type: ignore[arg-type]  # not looked at
        base_state="",
        trajectories=(),
        order_seed=0,
        submitted_unix_s=0.0,
    )
    assert lost_reply(request, f"said {PLAIN}", run_s=0.0).detail == "said ***"
