"""The command line: help, exit codes, messages, and that looking at a configuration loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from configs.errors import ConfigError, GagarError
from orchestrator import cli, cli_experiment

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "numpy", "wandb")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A configuration that is valid except that its model folder is missing."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: test\nsteps: 2\nsources: {chat: {type: arith, groups_per_step: 1}}\n"
        "engine: {model: policy}\nlearner: {model: policy}\neval: null\n"
    )
    return file


@pytest.fixture
def complete(run_file: Path) -> Path:
    """The same with a model folder that has everything but useful weights."""
    folder = run_file.parent / "policy"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}')
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[1000,2],"data_offsets":[0,8000]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8000))
    return run_file


def gagar(*arguments: str, check: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; `check` is Python that runs at its end."""
    code = f"import sys; from orchestrator import cli\ntry: cli.main()\nfinally: {check or 'pass'}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_help_and_config_check_load_nothing_heavy(complete: Path) -> None:
    loaded = f"print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    for arguments in (["--help"], ["train", "--help"], ["config", "check", str(complete)]):
        done = gagar(*arguments, check=loaded)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize(
    "command",
    [
        *(["train"], ["sft"], ["eval"], ["experiment"], ["audit"], ["report"], ["status"], ["doctor"]),
        *(["config", "check"], ["config", "show"]),
    ],
)
def test_every_command_shows_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"Example: gagar {' '.join(command)} " in " ".join(result.output.split())


def test_a_configuration_that_cannot_run_is_one_message_and_exit_code_2(run_file: Path) -> None:
    done = gagar("train", str(run_file), "steps=none")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        f"gagar: {run_file}, override 'steps=none': steps = 'none': must be a whole number above 0"
    )
    assert "Traceback" not in done.stderr


def test_a_missing_checkpoint_folder_is_found_before_anything_starts(run_file: Path) -> None:
    done = gagar("train", str(run_file), check=f"print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))")
    assert done.returncode == 2
    assert done.stdout == "heavy: []\n"
    assert f"{run_file}:4: engine.model = {run_file.parent / 'policy'}: no such folder" in done.stderr


def test_other_failures_have_exit_code_1_and_name_their_boundary(tmp_path: Path) -> None:
    done = gagar("status", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.startswith("gagar: storage: ")
    assert "Traceback" not in done.stderr


def test_unknown_options_and_commands_are_refused(complete: Path) -> None:
    assert gagar("trian").returncode == 2
    done = gagar("train", str(complete), "--resum")
    assert done.returncode == 2
    assert "--resume" in done.stderr


def test_dry_run_prints_what_would_start(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(complete.parent)
    result = CliRunner().invoke(cli.app, ["train", str(complete), "--name", "mine", "--dry-run", "steps=7"])
    assert result.exit_code == 0, result.output
    shown, plan = result.output.split("\nruns/mine: 7 steps\n")
    assert plan.startswith("  start            at step 0\n")
    assert yaml.safe_load(shown)["name"] == "mine"
    assert "LlamaForCausalLM, 2,000 parameters" in plan
    assert "1 groups, 6 trajectories, at most 6,144 tokens" in plan
    assert not (complete.parent / "runs").exists()


def test_a_bug_kind_that_does_not_exist_is_found_with_the_rest_and_its_line(run_file: Path) -> None:
    text = run_file.read_text().replace(
        "sources: {chat:", "sources:\n  code: {type: minirepo, groups_per_step: 1, kinds: [typo]}\n  chat: {"
    )
    run_file.write_text(text.replace("chat: { {", "chat: {").replace("groups_per_step: 1}}", "groups_per_step: 1}"))
    done = gagar("config", "check", str(run_file), "algorithm.mode=outcome")
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert f"  {run_file}:6: engine.model = {run_file.parent / 'policy'}: no such folder" in done.stderr
    assert said[-1].startswith(f"  {run_file}:4: sources.code.kinds = [typo]: unknown bug kind 'typo'; choose from ")
    again = gagar("config", "check", str(run_file), "sources.code.kinds=[typo]")
    assert f"{run_file}, override 'sources.code.kinds=[typo]': sources.code.kinds = [typo]: unknown" in again.stderr


def test_a_name_of_digits_is_a_name(complete: Path) -> None:
    result = CliRunner().invoke(cli.app, ["train", str(complete), "--dry-run", "--name", "2024"])
    assert result.exit_code == 0, result.output
    assert "runs/2024: 2 steps" in result.output


def test_sft_and_arms_point_at_files_of_their_kind(complete: Path) -> None:
    assert "configs/sft/policy.yaml" in gagar("sft", str(complete.parent / "none.yaml")).stderr
    arm = gagar("config", "check", str(complete), "--arm", str(complete.parent / "none.yaml"))
    assert "configs/arms/outcome.yaml" in arm.stderr


def test_config_show_can_be_run_again(complete: Path) -> None:
    shown = CliRunner().invoke(cli.app, ["config", "show", str(complete), "algorithm.group_size=4"])
    again = complete.parent / "again.yaml"
    again.write_text(shown.output)
    assert "group_size: 4" in shown.output
    assert CliRunner().invoke(cli.app, ["config", "show", str(again)]).output == shown.output


def test_arms_and_overrides_reach_the_configuration(complete: Path) -> None:
    arm = complete.parent / "arm.yaml"
    arm.write_text("algorithm: {group_size: 3}\n")
    shown = CliRunner().invoke(cli.app, ["config", "show", str(complete), "--arm", str(arm), "seed=5"])
    data = yaml.safe_load(shown.output)
    assert (data["algorithm"]["group_size"], data["seed"]) == (3, 5)


def test_eval_refuses_what_is_no_checkpoint(complete: Path) -> None:
    overrides = ["eval={source: chat}", "--checkpoint", str(complete.parent / "nothing")]
    result = CliRunner().invoke(cli.app, ["eval", str(complete), *overrides])
    assert isinstance(result.exception, ConfigError)
    assert "not a checkpoint (it is no folder)" in str(result.exception)
    without = CliRunner().invoke(cli.app, ["eval", str(complete)])
    assert isinstance(without.exception, ConfigError)
    assert "eval.source" in str(without.exception)


def test_a_checkpoint_of_a_run_is_its_policy_folder(complete: Path) -> None:
    step = complete.parent / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (complete.parent / "policy").rename(step / "policy")
    assert cli_experiment.policy_folder(step) == step / "policy"
    assert cli_experiment.policy_folder(step / "policy") == step / "policy"


def test_every_command_ends_in_one_line_for_any_gagar_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gagar", "status", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == cli.EXIT_FAILURE
    assert issubclass(ConfigError, GagarError)
