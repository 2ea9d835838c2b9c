"""`gagar tasks`, and configurations with sources of listed tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.check import load_run
from configs.errors import ConfigError, GagarError
from orchestrator.cli import app
from orchestrator.cli_config import task_sources

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "data" / "tasks"
CONFIGS = sorted((ROOT / "configs" / "tasks").glob("*.yaml"))


def gagar(*words: object) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.output, result.exception


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configurations_are_whole(config: Path) -> None:
    loaded = load_run(config, also=task_sources).config
    assert list(loaded.sources) == [config.stem] and loaded.steps == 2


def test_there_is_a_configuration_for_each_format() -> None:
    assert [path.stem for path in CONFIGS] == ["folder", "harbor", "mimo", "swebench"]


def test_files_that_only_an_image_has_need_sandboxes_of_images() -> None:
    config = ROOT / "configs" / "tasks" / "mimo.yaml"
    with pytest.raises(ConfigError, match=r"sources\.mimo\.path: 4 of its tasks .* jails have none"):
        load_run(config, ["sources.mimo.repos=null"], also=task_sources)
    docker = 'rollout.sandbox={type: docker, image: "a", docker_args: ["--memory=1g", "--pids-limit=9", "--network=n"]}'
    load_run(config, ["sources.mimo.repos=null", docker], also=task_sources)


def test_the_same_stream_twice_is_a_mistake_and_two_files_are_not(tmp_path: Path) -> None:
    config = ROOT / "configs" / "tasks" / "harbor.yaml"
    again = "sources.again={type: harbor, groups_per_step: 1, path: %s}"
    with pytest.raises(ConfigError, match=r"sources\.again\.seed = 0: gives the same tasks as sources\.harbor"):
        load_run(config, [again % (TASKS / "harbor")])
    load_run(config, [again % tmp_path])


def test_check_says_what_is_wrong_and_where(tmp_path: Path) -> None:
    output, error = gagar("tasks", "check", ROOT / "configs" / "tasks" / "swebench.yaml")
    assert error is None
    assert output == f"{TASKS}/swebench.jsonl: 4 tasks can be used, 0 cannot\n"
    rows = [json.loads(line) for line in (TASKS / "swebench.jsonl").read_text().splitlines()]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"problem_statement": ""}) + "\n" for row in rows[:1]))
    output, error = gagar("tasks", "check", file, "--repos", TASKS / "repos")
    assert isinstance(error, ConfigError)
    assert output == (
        f"{file}:1: acme__clock-1: problem_statement = '': is empty; give text\n{file}: 0 tasks can be used, 1 cannot\n"
    )
    _, error = gagar("tasks", "check", tmp_path / "gone.jsonl")
    assert isinstance(error, ConfigError) and "no such file or folder" in str(error)
    _, error = gagar("tasks", "check", ROOT / "configs" / "quickstart.yaml")
    assert isinstance(error, ConfigError) and "none of them reads tasks from files" in str(error)


def test_validate_runs_a_task_in_real_jails_and_names_those_that_are_not_fit(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "stock"
    subprocess.run(["cp", "-r", str(TASKS / "folder" / "stock"), str(tmp_path / "copy")], check=True, timeout=60)
    task.parent.mkdir()
    (tmp_path / "copy").rename(task)
    output = tmp_path / "outcomes.jsonl"
    words = ("tasks", "validate", task.parent, "--output", output)
    said, error = gagar(*words)
    assert error is None, said
    assert said == "1/1 stock: sound\n1 of 1 sound\n"
    (task / "repo" / "shop" / "stock.py").write_text("def total(counts):\n    return sum(counts)\n")
    (task / "reference.patch").unlink()
    said, error = gagar(*words)
    assert isinstance(error, GagarError) and "1 of 1 tasks are not fit to train on" in str(error)
    assert said.startswith("1/1 stock: start_passes\n") and said.endswith("1 of 1 start_passes: stock\n")
    assert [json.loads(line)["judgement"] for line in output.read_text().splitlines()] == ["sound", "start_passes"]


def test_help_stays_quick() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import orchestrator.cli"],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "orchestrator.cli_tasks" in loaded
    assert not {"envs.formats.listing", "configs.schema", "swerex"} & loaded
