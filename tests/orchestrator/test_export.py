"""`gagar export`: a checkpoint's policy as a folder that transformers loads, and nothing that is damaged."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from scripted import ScriptedLearner
from typer.testing import CliRunner

from configs.errors import ConfigError
from infra.errors import StorageError
from orchestrator import cli, cli_experiment
from orchestrator.checkpoint import Checkpoints
from orchestrator.export import export_policy
from orchestrator.manifest import write_manifest

STEPS = (2, 10)


def write_model(folder: Path, seed: int) -> None:
    """A tiny model with all that belongs to it."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    GenerationConfig(max_new_tokens=7).save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)


class ModelLearner(ScriptedLearner):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    async def export_hf(self, path: Path) -> None:
        path.mkdir()
        write_model(path, self.seed)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "learn"
    folder.mkdir(parents=True)
    checkpoints = Checkpoints(folder, keep=3)
    for step in STEPS:
        asyncio.run(checkpoints.save(step, cast(Any, ModelLearner(step)), {"mixer": {}}))
    return folder


def say(_: str) -> None:
    pass


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_transformers_loads_it_and_it_says_what_the_checkpoint_says(run_dir: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "models" / "learned"
    result = CliRunner().invoke(cli.app, ["export", str(run_dir), str(out)])
    assert result.exit_code == 0, result.output
    assert "step-000010" in result.output
    tokens = torch.tensor([[1, 5, 9, 33]])
    logits = {}
    for name, folder in (("out", out), ("policy", run_dir / "checkpoints" / "step-000010" / "policy")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits[name] = model(tokens).logits
    assert torch.equal(logits["out"], logits["policy"])
    assert (
        AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "t3"}], tokenize=False)
        == "t3"
    )
    assert GenerationConfig.from_pretrained(out).max_new_tokens == 7
    assert not list(out.parent.glob(".*")), "nothing half written stays"


def test_a_step_can_be_chosen_and_a_checkpoint_be_named(run_dir: Path, tmp_path: Path) -> None:
    step = run_dir / "checkpoints" / "step-000002"
    assert export_policy(run_dir, tmp_path / "a", step=2, force=False, say=say) == step
    assert export_policy(step, tmp_path / "b", step=None, force=False, say=say) == step
    weights = (step / "policy" / "model.safetensors").read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == weights


def test_what_is_damaged_is_not_exported(run_dir: Path, tmp_path: Path) -> None:
    newest = run_dir / "checkpoints" / "step-000010"
    flip(newest / "policy" / "model.safetensors")
    for source, step in ((newest, None), (run_dir, 10)):
        with pytest.raises(StorageError, match=r"model\.safetensors: its content is not what was written"):
            export_policy(source, tmp_path / "out", step=step, force=False, say=say)
    told: list[str] = []
    used = export_policy(run_dir, tmp_path / "out", step=None, force=False, say=told.append)
    assert used.name == "step-000002" and "step-000010 is refused" in told[0]
    flip(used / "policy" / "config.json")
    with pytest.raises(StorageError, match="no checkpoint of this run can be used"):
        export_policy(run_dir, tmp_path / "other", step=None, force=False, say=say)


def test_damage_of_the_optimiser_does_not_keep_the_policy_from_being_exported(run_dir: Path, tmp_path: Path) -> None:
    flip(run_dir / "checkpoints" / "step-000010" / "learner" / "steps")
    assert export_policy(run_dir, tmp_path / "out", step=None, force=False, say=say).name == "step-000010"


def test_nothing_is_overwritten_without_being_asked(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(ConfigError, match=r"out: is there already; .*--force"):
        export_policy(run_dir, out, step=None, force=False, say=say)
    assert (out / "mine").read_text() == "kept"
    export_policy(run_dir, out, step=None, force=True, say=say)
    assert not (out / "mine").exists() and (out / "config.json").is_file()
    with pytest.raises(ConfigError, match="what is to be exported lies in it"):
        export_policy(run_dir, run_dir.parent, step=None, force=True, say=say)
    assert run_dir.is_dir()


@pytest.fixture
def plain_run(tmp_path: Path) -> Path:
    """A run whose policies are no models, but files all the same."""
    folder = tmp_path / "runs" / "plain"
    for step in STEPS:
        policy = folder / "checkpoints" / f"step-{step:06d}" / "policy"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text("{}")
        (policy.parent / "state.json").write_text("{}")
        write_manifest(policy.parent)
    return folder


@pytest.mark.parametrize("what", ["checkpoint", "policy of one", "run", "other run", "file", "link", "loose link"])
def test_runs_checkpoints_and_what_is_no_folder_are_never_replaced(plain_run: Path, tmp_path: Path, what: str) -> None:
    other = plain_run / "checkpoints" / "step-000002"
    out = {"checkpoint": other, "policy of one": other / "policy", "run": plain_run}.get(what, tmp_path / "out")
    if "link" in what:
        out.symlink_to(other / "policy" if what == "link" else tmp_path / "nowhere")
    elif what == "file":
        out.write_text("mine")
    elif what == "other run":
        (out / "checkpoints").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"cannot be replaced \(a link"):
        export_policy(plain_run, out, step=10, force=True, say=say)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["policy/../../../evil", "policy//etc/evil", "policy/./evil", "policy/a\0b", "/evil"])
def test_a_manifest_leads_nowhere_else(plain_run: Path, tmp_path: Path, name: str) -> None:
    checkpoint = plain_run / "checkpoints" / "step-000010"
    facts = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**facts, name: facts["policy/config.json"]}))
    (plain_run / "evil").write_bytes((checkpoint / "policy" / "config.json").read_bytes())
    with pytest.raises(StorageError, match="is no path inside the checkpoint"):
        export_policy(checkpoint, tmp_path / "a" / "b" / "out", step=None, force=False, say=say)
    assert not (tmp_path / "a").exists()


def test_folders_with_odd_names_are_no_checkpoints(plain_run: Path, tmp_path: Path) -> None:
    (plain_run / "checkpoints" / "step-\u00b2").mkdir()
    assert export_policy(plain_run, tmp_path / "out", step=None, force=False, say=say).name == "step-000010"


def test_what_is_no_checkpoint_is_told_from_what_is(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run with checkpoints nor a checkpoint"):
        export_policy(tmp_path, tmp_path / "out", step=None, force=False, say=say)
    with pytest.raises(ConfigError, match=r"--step 3: .* those of steps 2, 10"):
        export_policy(run_dir, tmp_path / "out", step=3, force=False, say=say)
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        export_policy(run_dir / "checkpoints" / "step-000002", tmp_path / "out", step=2, force=False, say=say)


def test_eval_holds_a_checkpoint_against_its_manifest(run_dir: Path) -> None:
    step = run_dir / "checkpoints" / "step-000010"
    assert cli_experiment.policy_folder(step) == cli_experiment.policy_folder(step / "policy") == step / "policy"
    flip(step / "policy" / "model.safetensors")
    for given in (step, step / "policy"):
        with pytest.raises(StorageError, match=r"model\.safetensors: its content is not what was written"):
            cli_experiment.policy_folder(given)


def test_it_needs_no_torch(run_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from orchestrator.export import export_policy\n"
        f"export_policy(Path({str(run_dir)!r}), Path({str(tmp_path / 'out')!r}), step=None, force=False, say=print)\n"
        "assert not {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environ)
