"""Wrong values: what a message says of the type and range that a key takes, and of what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.load import load
from configs.schema import RunConfig
from configs.secrecy import is_secret, names_secret, redact, secret_in_argument
from configs.sft_schema import SftRecipe


def told(file: Path, override: str) -> str:
    """The message."""
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, file, [override])
    text = str(caught.value)
    assert text.startswith(f"{file}, override ")
    return text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # whole numbers
        ("steps='4'", "steps = '4': must be a whole number above 0; write steps: 4"),
        ("steps=4.4", "steps = 4.4: must be a whole number above 0; write steps: 4"),
        ("steps=[4]", "steps = [4]: must be a whole number above 0; write steps: 4"),
        ("steps=[4, 5]", "steps = [4, 5]: must be a whole number above 0; write e.g. steps: 1"),
        ("steps={a: 4}", "steps = {a: 4}: must be a whole number above 0; write e.g. steps: 1"),
        ("steps=null", "steps = null: must be a whole number above 0; write e.g. steps: 1"),
        ("steps=1,000", "steps = '1,000': must be a whole number above 0; write steps: 1000"),
        ("steps=1e300", "steps = 1.0e+300: must be a whole number above 0; lower it"),
        (
            "steps=9999999999999",
            "steps = 9999999999999: is beyond what any machine can do (the limit is 1000000000000)",
        ),
        ("seed=no", "seed = false: must be a whole number of at least 0 and below 2147483648; write e.g. seed: 0"),
        ("seed=null", "of at least 0 and below 2147483648; remove the key (default 0)"),
        ("grader.repair_rounds=2", "repair_rounds = 2: must be a whole number from 0 to 1; lower it (default 1)"),
        ("ray.object_store_mib=74", " = 74: must be a whole number of at least 75 or null; raise it (default 512)"),
        (
            "ray.object_store_mib=none",
            " = 'none': must be a whole number of at least 75 or null; write object_store_mib: null",
        ),
        # numbers
        ("learner.optimizer.lr='1e-4'", "lr = '1e-4': must be a finite number above 0; write lr: 0.0001"),
        ("learner.optimizer.lr=1e-4x", "lr = 1e-4x: must be a finite number above 0; write the number alone, in the"),
        (
            "grader.timeout_s=10min",
            "timeout_s = 10min: must be a finite number above 0; write the number alone, in the",
        ),
        (
            "learner.optimizer.lr=.nan",
            "lr = .nan: must be a finite number above 0; write e.g. lr: 0.0001 (default 0.0001",
        ),
        ("grader.timeout_s=1e10", "grader.timeout_s = 10000000000.0: is beyond what any machine can do"),
        ("engine.gpu_memory_utilization=80%", "above 0 and below 1 or null; write gpu_memory_utilization: 0.8"),
        ("grader.canaries.share=0.6", "share = 0.6: must be a finite number from 0 to 0.5; lower it (default 0.0)"),
        # flags
        ("eval.before='yes'", "eval.before = 'yes': must be true or false; write before: true"),
        ("eval.before=0", "eval.before = 0: must be true or false; write before: false"),
        ("eval.before=null", "eval.before = null: must be true or false; remove the key (default true)"),
        # text
        ("name=2024", 'name = 2024: must be text that is not empty; write name: "2024"'),
        ("name=[a]", "name = [a]: must be text that is not empty; write name: a"),
        ("name=", "name = null: must be text that is not empty; write e.g. name: some-text"),
        ("name=''", "name = '': must be text that is not empty; write e.g. name: some-text"),
        ("rollout.system_prompt=true", '= true: must be text that is not empty or null; write system_prompt: "true"'),
        # choices
        ("engine.dtype=FLOAT32", "dtype = FLOAT32: not a choice; did you mean float32? choose one of 'float32', 'bf"),
        (
            "engine.dtype=null",
            "dtype = null: must be one of 'float32', 'bfloat16' or 'float16'; remove the key (default",
        ),
        ("telemetry.wandb.mode=off", "'offline' or 'disabled'; write mode: disabled"),
        ("grader.mode=[single]", "grader.mode = [single]: must be one of 'agent' or 'single'; write mode: single"),
        # lists
        ("sources.code.kinds=boundary", "must be a list of values, each text; write kinds: [boundary]"),
        ("sources.code.kinds=a, b", "must be a list of values, each text; write kinds: [a, b]"),
        (
            "learner.optimizer.betas=[]",
            "learner.optimizer.betas = []: must be a list of 2 values, each a finite number of",
        ),
        (
            "learner.optimizer.betas=[0.9]",
            "betas = [0.9]: must be a list of 2 values, each a finite number of at least 0",
        ),
        (
            "loss.objective={name: ratio_mask, bounds_positive: 5}",
            "must be a list of 2 values, each a finite number above 0; write e.g. bounds_positive: [0.2, 5.0]",
        ),
        (
            "loss.objective={name: ratio_mask, bounds_positive: [a, 5]}",
            "bounds_positive.0 = a: must be a finite number above 0; write e.g. 1",
        ),
        # sections
        (
            "engine=fast",
            "engine = fast: must be a section (model, replicas, dtype, device, max_model_len, max_num_seqs",
        ),
        (
            "eval=false",
            "must be a section (source, tasks, samples, seed, before, after, ...) or null; write eval: null",
        ),
        ("grader=off", "style, repair_rounds, reference_patch, ...) or null; write grader: null"),
        ("grader.backend=vllm", "must be a section with type: 'vllm' or 'endpoint'; write it as `key: value` lines"),
        (
            "sources=null",
            "must be a section of names, each with a section with type: 'minirepo', 'files', 'arith', 'swe",
        ),
        ("engine.resources.custom={a: -1}", "engine.resources.custom.a = -1: must be a finite number above 0; rai"),
    ],
)
def test_what_a_key_takes_and_what_was_meant(run_file: Path, override: str, expected: str) -> None:
    text = told(run_file, override)
    assert expected in text
    assert f"{override.split('=')[0].removesuffix('.custom')}" in text
    assert "change the value" not in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("~steps", "steps: is required; add it: a whole number above 0"),
        ("~learner.model", "learner.model: is required; add it: text that is not empty"),
        ("~sources.code.groups_per_step", "groups_per_step: is required; add it: a whole number of at least 0"),
        ("grader.backend.engine.resources.memory=1", "unknown key; remove it; known here: cpus, gpus, custom"),
        (
            "grader.backend.engine.adapter=1",
            "unknown key; remove it; known here: model, replicas, dtype, device, max_mo",
        ),
        (
            "sources.chat.kinds=[a]",
            "kinds = [a]: unknown key; only sections with type: 'minirepo' have it; remove it; known",
        ),
        (
            "grader.backend.base_url=x",
            "unknown key; only sections with type: 'endpoint' have it; remove it; known here: ",
        ),
    ],
)
def test_keys_that_are_missing_or_unknown(run_file: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, run_file, [override])
    assert expected in str(caught.value)


def test_a_recipe_is_not_taken_for_a_run_nor_the_other_way_round(run_file: Path) -> None:
    recipe = run_file.parent / "recipe.yaml"
    recipe.write_text("output: x\ndata: {type: policy}\nmodel: {}\ntraining: {tokens: 1}\n")
    for model, file, expected in (
        (RunConfig, recipe, "is a recipe (gagar sft), not the configuration of a run (gagar train); give one"),
        (SftRecipe, run_file, "is the configuration of a run (gagar train), not a recipe (gagar sft); give one"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(model, file)
        assert str(caught.value).startswith(f"{file}: {expected}")


def test_a_list_of_the_wrong_length_is_one_problem(run_file: Path) -> None:
    assert "\n" not in told(run_file, "learner.optimizer.betas=[]")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("name='my run'", "digits, '.', '_' and '-', and must start with a letter or a digit; write e.g. name: my-run"),
        ("name=.hidden", "write e.g. name: hidden"),
        ("name=..", "write e.g. name: my-run"),
        (f"name={'a' * 240}", "has 240 characters and the folder of a run takes 239; give a shorter name"),
        (f"output=a/{'b' * 256}/c", "is longer than file systems take (255 bytes a folder, 3,500 in all)"),
        (f"output={'b/' * 2000}", "is longer than file systems take"),
        (f"output={'ü' * 128}", "is longer than file systems take"),
        ("output=~no-such-user/x", "is not a usable path"),
        ('output="a\\0b"', "output = 'a\\x00b': must be one line of text; remove the line breaks and control"),
        ('engine.model="a\\nb"', "engine.model = 'a\\nb': must be one line of text; remove the line breaks"),
        ("output=''", "must be text that is not empty; write e.g. output: runs"),
        (
            "algorithm.rubric.weight_approach=0.5",
            "algorithm.rubric: the weights sum to 1.2 (weight_approach=0.5, weight_p",
        ),
        ("rollout.system_prompt=''", "= '': must be text that is not empty or null; write system_prompt: null"),
        ("algorithm.group_size=10000000000000", "is beyond what any machine can do"),
        ("algorithm.rubric={t1_first: 0.5}", "must not rise in this order: t1_first=0.5, t1_rest=0.9, t2_high=0.85"),
    ],
)
def test_paths_that_a_file_system_refuses(run_file: Path, override: str, expected: str) -> None:
    assert expected in told(run_file, override)


def test_the_longest_name_is_fine(run_file: Path) -> None:
    assert len(load(RunConfig, run_file, [f"name={'a' * 239}"]).config.name) == 239
    assert load(RunConfig, run_file, ["output=~/runs"]).config.output == str(Path.home() / "runs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: !!int x\n", ":1: not valid YAML ('x' cannot be read as int"),
        ("steps: !!bool x\n", ":1: not valid YAML ('x' cannot be read as bool"),
        ("name: x\nsteps: !!binary eA==\n", ":2: not valid YAML ('eA==' is neither text nor a number"),
        (
            f"steps: {'9' * 5000}\n",
            ":1: not valid YAML ('9999999999999999999999999999999999999999' cannot be read as int",
        ),
        (f"steps: 0x{'f' * 5000}\n", ":1: not valid YAML ('0xffffffffffffffffffffffffffffffffffffff' is neither text"),
        ("name: x\n[a]: 3\n", ":2: not valid YAML (a key must be one word)"),
        ("name: x\nsteps: \x07\n", ":2: not valid YAML (character U+0007 is not allowed); remove it"),
    ],
)
def test_yaml_that_holds_no_plain_values(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, file)
    assert str(caught.value).startswith(f"{file}{expected}")


def test_a_date_is_text(run_file: Path) -> None:
    assert load(RunConfig, run_file, ["name=2026-11-30"]).config.name == "2026-11-30"


def test_a_missing_file_names_files_of_its_kind(tmp_path: Path, run_file: Path) -> None:
    missing = tmp_path / "missing.yaml"
    for refuse, example in (
        (lambda: load(RunConfig, missing), "configs/quickstart.yaml"),
        (lambda: load(SftRecipe, missing), "configs/sft/policy.yaml"),
        (lambda: load(RunConfig, run_file, arms=[missing]), "configs/arms/outcome.yaml"),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert f"{missing}: no such file; give the path of one, e.g. " in str(caught.value)
        assert example in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("API_KEY=abc", "API_KEY"),
        ("--env=GITHUB_TOKEN=abc", "GITHUB_TOKEN"),
        ("-eDB_PASSWORD=abc", "DB_PASSWORD"),
        ("-e=apiKey=abc", "apiKey"),
        ("-iteMY_SECRET=abc", "MY_SECRET"),
        ("--label=com.example.token=abc", "com.example.token"),
        ("--api-key=abc", "--api-key"),
        ("X=sk-proj-0123456789", ""),
        ("HTTPS_PROXY=http://me:pw@proxy", ""),
        ("API_KEY=", None),
        ("API_KEY", None),
        ("--env=API_KEY", None),
        ("-eAPI_KEY", None),
        ("--env-file=keys.env", None),
        ("TOKENIZERS_PARALLELISM=false", None),
        ("--mount=type=secret,id=key,src=/x", None),
        ("--security-opt=no-new-privileges", None),
        ("--network=none", None),
    ],
)
def test_secrets_in_arguments(argument: str, name: str | None) -> None:
    assert secret_in_argument(argument) == name


def test_what_looks_like_a_secret_is_hidden() -> None:
    assert names_secret("grader.backend.api_key")
    assert not names_secret("grader.backend.api_key_env")
    assert not names_secret("rollout.limits.max_total_tokens")
    assert is_secret("https://me:pw@host")
    assert redact("docker_args=[-e, API_KEY=abc, HOME=/x]") == "docker_args=[-e, API_KEY=***, HOME=/x]"
    assert redact("{api_key: 'a b', model: m}") == "{api_key: ***, model: m}"
    assert redact("base_url=https://me:pw@host/v1") == "base_url=https://***@host/v1"
    assert redact("api_key_env=hunter-2") == "api_key_env=***"
    assert redact("api_key_env=MY_API_KEY") == "api_key_env=MY_API_KEY"
    assert redact("rollout.limits.max_total_tokens=5") == "rollout.limits.max_total_tokens=5"
