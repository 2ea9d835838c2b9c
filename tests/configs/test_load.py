"""Reading configurations: merging, overrides, and what a mistake is told like."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.load import load
from configs.schema import AdvantageMode, PpoClipLoss, RunConfig


def message(file: Path, *overrides: str, arms: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, file, overrides, arms)
    return str(caught.value)


def test_model_folders_are_relative_to_the_file(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = load(RunConfig, run_file).config
    assert config.engine.model == str(run_file.parent / "policy")
    assert config.learner.model == config.engine.model
    assert config.output == "runs"


def test_an_absolute_model_folder_stays(run_file: Path) -> None:
    assert load(RunConfig, run_file, ["engine.model=/models/x"]).config.engine.model == "/models/x"


@pytest.mark.parametrize(
    ("override", "expected"),
    [("learner.optimizer.lr=1e-4", 1e-4), ("learner.optimizer.lr=3E-3", 3e-3), ("learner.optimizer.lr=0.5", 0.5)],
)
def test_numbers_with_an_exponent(run_file: Path, override: str, expected: float) -> None:
    assert load(RunConfig, run_file, [override]).config.learner.optimizer.lr == expected


def test_overrides_of_every_shape(run_file: Path) -> None:
    overrides = [
        "sources.chat.groups_per_step=0",
        "loss.objective={name: ppo_clip, clip_low: 0.1}",
        "learner.optimizer.betas=[0.8, 0.99]",
        "eval=null",
        "telemetry.wandb.entity='a=b'",
        "algorithm.length_penalty.exponent=2",
    ]
    config = load(RunConfig, run_file, overrides).config
    assert config.sources["chat"].groups_per_step == 0
    assert isinstance(config.loss.objective, PpoClipLoss)
    assert config.loss.objective.clip_low == 0.1
    assert config.learner.optimizer.betas == (0.8, 0.99)
    assert config.eval is None
    assert config.telemetry.wandb.entity == "a=b"
    assert config.algorithm.length_penalty is not None
    assert config.algorithm.length_penalty.exponent == 2


def test_later_overrides_win_and_a_tilde_restores_the_default(run_file: Path) -> None:
    config = load(RunConfig, run_file, ["steps=3", "steps=4", "seed=9", "~seed"]).config
    assert (config.steps, config.seed) == (4, 0)


def test_arms_are_merged_in_order_and_overrides_come_last(run_file: Path) -> None:
    first, second = run_file.parent / "first.yaml", run_file.parent / "second.yaml"
    first.write_text("algorithm: {mode: discount, group_size: 3}\n")
    second.write_text("algorithm: {mode: outcome}\ngrader: null\n")
    config = load(RunConfig, run_file, ["algorithm.group_size=5"], [first, second]).config
    assert config.algorithm.mode is AdvantageMode.OUTCOME
    assert config.algorithm.group_size == 5
    assert config.grader is None


def test_an_arm_of_another_type_replaces_the_section(run_file: Path) -> None:
    arm = run_file.parent / "arm.yaml"
    arm.write_text("grader: {backend: {type: endpoint, base_url: 'http://h/v1', model: m}, timeout_s: 7}\n")
    grader = load(RunConfig, run_file, arms=[arm]).config.grader
    assert grader is not None
    assert grader.backend.type == "endpoint"
    assert grader.timeout_s == 7


def test_a_mistake_in_an_arm_names_the_arm_and_its_line(run_file: Path) -> None:
    arm = run_file.parent / "arm.yaml"
    arm.write_text("algorithm:\n  mode: discount\n  group_size: one\n")
    assert message(run_file, arms=(arm,)).startswith(
        f"{arm}:3: algorithm.group_size = one: must be a whole number of at least 2"
    )


def test_anchors_and_merge_keys_work(run_file: Path) -> None:
    run_file.write_text(
        run_file.read_text().replace("{model: policy}", "{model: &p policy}").replace(": policy\n", ": *p\n")
    )
    config = load(RunConfig, run_file).config
    assert config.learner.model == config.engine.model


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=0", "steps = 0: must be a whole number above 0; raise it"),
        ("steps=two", "steps = two: must be a whole number above 0; write e.g. steps: 1"),
        (
            "algorithm.group_size=1",
            "algorithm.group_size = 1: must be a whole number of at least 2; raise it (default 6)",
        ),
        ("learner.zero_stage=4", "learner.zero_stage = 4: must be a whole number from 0 to 3; lower it (default 0)"),
        ("algorithm.mode=outcom", "algorithm.mode = outcom: not a choice; did you mean outcome?"),
        ("engine.dtype=int8", "engine.dtype = int8: not a choice; choose one of 'float32', 'bfloat16' or 'float16'"),
        ("sources.chat.type=arit", "sources.chat.type = arit: unknown type; did you mean arith?"),
        ("sources.new={groups_per_step: 1}", "sources.new.type: is required"),
        ("loss.objective={bounds_positive: [0.5, 2]}", "loss.objective.name: is required"),
        ("loss.objective.name=ppo", "loss.objective.name = ppo: unknown name; choose one of"),
        ("engin.model=x", "engin: unknown key; did you mean engine?"),
        (
            "learner.optimizer.learning_rat=1",
            "learner.optimizer.learning_rat = 1: unknown key; remove it; known here: lr",
        ),
        ("learner.lr=1", "learner.lr = 1: unknown key; did you mean learner.optimizer.lr?"),
        ("sources.code.kind=[a]", "sources.code.kind = [a]: unknown key; did you mean sources.code.kinds?"),
        (
            "grader.backend.engine.modle=x",
            "grader.backend.engine.modle = x: unknown key; did you mean grader.backend.engine.model?",
        ),
        (
            "rollout.sandbox={type: remote, hosts: []}",
            "rollout.sandbox.hosts = []: must be a list of one value or more, each text; write e.g. hosts: [some-text]",
        ),
        ("eval=3", "eval = 3: must be a section"),
        ("name=a/b", "name = a/b: may hold only the letters A-Z and a-z, digits"),
        (
            "algorithm.length_penalty={full_excess: 0.5, free_excess: 1}",
            "algorithm.length_penalty: full_excess=0.5 must be above free_excess=1.0; raise full_excess",
        ),
        ("algorithm.rubric.t3=0.9", "algorithm.rubric: factors must not rise"),
        (
            "loss.objective={name: ratio_mask, bounds_negative: [2, 3]}",
            "loss.objective: bounds_negative=[2, 3] must contain 1",
        ),
    ],
)
def test_one_mistake_one_line_with_place_key_value_and_remedy(run_file: Path, override: str, expected: str) -> None:
    text = message(run_file, override)
    assert text.startswith(f"{run_file}, override {override!r}: {expected}")
    assert "\n" not in text


def test_a_missing_key_and_the_line_of_its_section(run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("  model: policy\n", "  world_size: 1\n"))
    assert message(run_file) == f"{run_file}:13: learner.model: is required; add it: text that is not empty"


def test_every_mistake_is_in_one_message(run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("steps: 2", "steps: -1").replace("groups_per_step: 1", "quota: 1"))
    lines = message(run_file, "learner.dtype=f32").splitlines()
    assert lines[0] == f"{run_file} has 4 problems:"
    assert lines[1] == f"  {run_file}:2: steps = -1: must be a whole number above 0; raise it"
    assert (
        lines[2] == f"  {run_file}:5: sources.chat.groups_per_step: is required; add it: a whole number of at least 0"
    )
    assert lines[3].startswith(
        f"  {run_file}:7: sources.chat.quota = 1: unknown key; remove it; known here: groups_per_"
    )
    assert lines[4].startswith(
        f"  {run_file}, override 'learner.dtype=f32': learner.dtype = f32: not a choice; did you"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "not an override; write key.path=value"),
        ("=3", "not an override"),
        ("a..b=3", "not an override"),
        ("steps.more=3", "steps = 2 is not a section; set steps as a whole"),
        ("engine={model: [", "is not a YAML value"),
        ("~algorithm.mode", "does not set algorithm.mode; leave the override out"),
        ("~engine.dtype", "does not set engine.dtype; leave the override out"),
    ],
)
def test_overrides_that_cannot_be_read(run_file: Path, override: str, expected: str) -> None:
    text = message(run_file, override)
    assert text.startswith(f"override {override!r}: ")
    assert expected in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1,\nb: 2\n", ":3: not valid YAML"),
        ("name: x\nname: y\n", ":2: name is given twice (first in line 1); remove one of them"),
        ("engine:\n  model: x\n  dtype: float32\n  model: y\n", ":4: engine.model is given twice (first in line 2)"),
        ("- 1\n", ": holds a list, not sections"),
        (
            "name: !!python/object/apply:os.system ['true']\n",
            ":1: not valid YAML (tag tag:yaml.org,2002:python/object",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert message(file).startswith(f"{file}{expected}")


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "none.yaml")
    assert "cannot be read" in message(tmp_path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=true", "steps = true: must be a whole number above 0"),
        ("learner.optimizer.lr=.inf", "learner.optimizer.lr = .inf: must be a finite number"),
        ("rollout.sampling.temperature=.inf", "rollout.sampling.temperature = .inf: must be a finite number"),
        (
            "learner.optimizer.betas=[0.9, 1.0]",
            "learner.optimizer.betas.1 = 1.0: must be a finite number of at least 0 and below 1; lower it",
        ),
        ("seed=-1", "seed = -1: must be a whole number of at least 0 and below 2147483648; raise it"),
        ("seed=2147483648", "seed = 2147483648: must be a whole number of at least 0 and below 2147483648; lower it"),
        ("engine.model=~no-such-user/x", "is not a usable path"),
        ("rollout.sandbox={type: jail, type: docker}", "rollout.sandbox.type is given twice"),
    ],
)
def test_values_that_would_fail_later(run_file: Path, override: str, expected: str) -> None:
    assert expected in message(run_file, override)


def test_a_key_of_another_kind_is_not_suggested_for_itself(run_file: Path) -> None:
    text = message(run_file, "loss.objective={name: ppo_clip, bounds_positive: [0.2, 5]}")
    assert "only sections with name: 'ratio_mask' have it; remove it; known here: name, clip_low" in text


def test_a_section_that_holds_itself(run_file: Path) -> None:
    run_file.write_text(run_file.read_text() + "ray: &a {address: *a}\n")
    assert "a section holds itself" in message(run_file)
