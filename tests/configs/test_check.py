"""Combinations that cannot run, and keys without effect: each rule, by the line that the user sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from configs.check import load_run, resolved
from configs.errors import ConfigError
from configs.problems import Problem
from configs.rules import RULES
from configs.schema import RunConfig

ENDPOINT = "grader={backend: {type: endpoint, base_url: 'https://host/v1', model: m}}"
FULL = ("grader.style=full",)
NATIVE = "grader={backend: {type: endpoint, base_url: 'https://host/v1', model: m%s}%s}"
DOCKER = "rollout.sandbox={type: docker, image: %s, docker_args: [%s]}"
CUDA_ENGINE = ("engine.device=cuda",)
CUDA_LEARNER = ("learner.device=cuda",)
CUDA = (*CUDA_ENGINE, *CUDA_LEARNER)


def refusals(file: Path, *overrides: str) -> list[str]:
    """The lines of the refusal, without the place."""
    with pytest.raises(ConfigError) as caught:
        load_run(file, overrides)
    lines = str(caught.value).splitlines()
    assert all(str(file) in line for line in lines)
    if len(lines) > 1:
        lines = lines[1:]
    return [line.split(": ", 1)[1].strip() for line in lines]


def test_the_base_of_these_tests_is_accepted(run_file: Path) -> None:
    assert load_run(run_file).config.name == "test"


ONE_PROBLEM: list[tuple[tuple[str, ...], str]] = [
    # the grader's mode, tools and budget
    *(
        (
            ("grader.mode=single", f"grader.{key}={value}"),
            f"grader.{key} = {shown}: has no effect, because grader.mode = single has no tools; remove the key",
        )
        for key, value, shown in (
            ("budget.turns", "5", "5"),
            ("budget.tokens", "900", "900"),
            ("budget.seconds", "5", "5.0"),
            ("checks.limit", "2", "2"),
            ("checks.timeout_s", "5", "5.0"),
            ("checks.enabled", "false", "false"),
            ("tool_output_chars", "500", "500"),
            ("reference_patch", "true", "true"),
        )
    ),
    (
        ("grader.mode=single", "grader.sandbox={type: jail}"),
        "grader.sandbox: has no effect, because grader.mode = single",
    ),
    (
        (NATIVE % (", tool_calling: true", ", mode: single"),),
        "grader.backend.tool_calling = true: has no effect, because grader.mode = single has no tools",
    ),
    (
        (NATIVE % (", structured: json_object", ""),),
        "grader.backend.structured = json_object: has no effect, because grader.backend.tool_calling = true",
    ),
    *(
        (
            (*FULL, "grader.checks.enabled=false", f"grader.{key}"),
            f"grader.{shown}: has no effect, because grader.checks.enabled = false; remove the key",
        )
        for key, shown in (
            ("checks.limit=2", "checks.limit = 2"),
            ("checks.timeout_s=5", "checks.timeout_s = 5.0"),
            ("sandbox={type: jail}", "sandbox"),
        )
    ),
    (
        ("grader.checks.limit=2",),
        "grader.checks.limit = 2: has no effect, because grader.style = compact offers no commands; remove the key, or",
    ),
    (
        ("grader.checks.enabled=true",),
        "grader.checks.enabled = true: has no effect, because grader.style = compact offers no commands",
    ),
    ((*FULL, "grader.checks.timeout_s=120"), "grader.checks.timeout_s = 120.0: is not below grader.timeout_s = 120"),
    (("grader.budget.seconds=120",), "grader.budget.seconds = 120.0: is not below grader.timeout_s = 120, which would"),
    (
        ("grader.budget.tokens=1024",),
        "grader.budget.tokens = 1024: has no effect, because grader.backend.engine.max_model_len = 1024 is",
    ),
    (
        ("grader.max_tokens=512",),
        "grader.max_tokens = 512: leaves no room in grader.backend.engine.max_model_len = 1024 for a prompt and two",
    ),
    (
        (NATIVE % ("", ", budget: {tokens: 700}"),),
        "grader.max_tokens = 400: leaves no room in grader.budget.tokens = 700 for a prompt and two answers",
    ),
    (
        (NATIVE % (", max_concurrency: 2", ", workers: 3"),),
        "grader.backend.max_concurrency = 2: is below grader.workers = 3, of which each sends one request at least",
    ),
    (
        (NATIVE % (", request_timeout_s: 121", ""),),
        "grader.backend.request_timeout_s = 121.0: has no effect, because grader.timeout_s = 120 ends the group first",
    ),
    # canaries
    (
        ("grader.canaries.window=9",),
        "grader.canaries.window = 9: has no effect, because grader.canaries.share = 0 turns canaries off; raise share",
    ),
    (("grader.canaries.alarm_below=0.5",), "grader.canaries.alarm_below = 0.5: has no effect"),
    (
        ("grader.canaries={share: 0.1, path: nowhere}",),
        "nowhere: no such folder; give a folder of stored groups with labels (relative to the configuration file), or",
    ),
    # containers
    *(
        (
            (DOCKER % ("python:3.11", arguments),),
            f"rollout.sandbox.docker_args: holds what looks like a secret ({name}=...), which would stand in the run "
            f"folder; write -e {name}, which passes the variable on from the environment",
        )
        for arguments, name in (
            ("-e, API_KEY=abc", "API_KEY"),
            ("--env=GITHUB_TOKEN=abc", "GITHUB_TOKEN"),
            ("-eDB_PASSWORD=abc", "DB_PASSWORD"),
            ("-e, MY_SECRET=abc", "MY_SECRET"),
            ("--env, AWS_CREDENTIALS=abc", "AWS_CREDENTIALS"),
        )
    ),
    (
        (DOCKER % ("python:3.11", "-e, PROXY=http://u:p@h"),),
        "rollout.sandbox.docker_args: holds what looks like a secret, which would stand in the run folder",
    ),
    (
        ("grader.style=full", "grader.sandbox={type: docker, image: a, docker_args: [-e, A_KEY=b]}"),
        "grader.sandbox.docker_args: holds what looks like a secret (A_KEY=...)",
    ),
    (
        (DOCKER % ("python:3.11", "--network=none"),),
        "rollout.sandbox.docker_args = [--network=none]: cuts the sandbox's server off (--network=none)",
    ),
    ((DOCKER % ("--privileged", ""),), "rollout.sandbox.image = --privileged: is not the name of an image; give e.g."),
    ((DOCKER % ("u:p@host/image", ""),), "rollout.sandbox.image: may hold a secret; give the bare name"),
    (
        ("rollout.sandbox={type: remote, hosts: ['http://a:1', 'http://a:1']}",),
        "rollout.sandbox.hosts = ['http://a:1', 'http://a:1']: names http://a:1 twice",
    ),
    # the run's folder, and Ray
    (("ray.address=host",), "ray.address = host: is not the address of a cluster; write auto, HOST:PORT (e.g. 10."),
    (("ray.address=http://h:6379",), "ray.address = http://h:6379: is not the address of a cluster"),
    (("ray.address=h:80",), "ray.address = h:80: is not the address of a cluster"),
    (("ray.address=h:99999",), "ray.address = h:99999: is not the address of a cluster"),
    (("ray.address=local",), "ray.address = local: starts a Ray of its own, as null does; write address: null"),
    # secrets, addresses, resources
    (
        (ENDPOINT, "grader.backend.api_key_env=sk-proj-1"),
        "grader.backend.api_key_env: is not the name of an environment",
    ),
    ((ENDPOINT, "grader.backend.base_url=https://u:sk@h/v1"), "grader.backend.base_url: may hold a secret"),
    ((ENDPOINT, "grader.backend.base_url=https://h/v1?key=sk"), "grader.backend.base_url: may hold a secret"),
    ((ENDPOINT, "grader.backend.base_url=http://"), "grader.backend.base_url = http://: is not an address"),
    (("rollout.sandbox={type: remote, hosts: [foo]}",), "rollout.sandbox.hosts = [foo]: is not an address"),
    (
        ("rollout.resources.gpus=1",),
        "rollout.resources.gpus = 1.0: would leave GPUs idle, because these workers use none",
    ),
    (
        ("grader.resources.gpus=1",),
        "grader.resources.gpus = 1.0: would leave GPUs idle, because these workers use none",
    ),
    (
        ("engine.resources.custom={GPU: 1}",),
        "engine.resources.custom.GPU = 1.0: is no custom resource; use cpus and gpus",
    ),
    # sources and groups
    (("sources={}", "eval=null", "algorithm.mode=outcome", "grader=null"), "sources: no source has a quota"),
    (
        ("sources.code.groups_per_step=0", "sources.chat.groups_per_step=0", "grader=null"),
        "sources: no source has a quota; set groups_per_step above 0",
    ),
    (
        ("sources.more={type: minirepo, groups_per_step: 1}",),
        "sources.more.seed = 0: gives the same tasks as sources.code; choose another one",
    ),
    (("sources.a/b={type: files, groups_per_step: 1}",), "sources.a/b: is not a usable name"),
    (("algorithm.min_valid=7",), "algorithm.min_valid = 7: is above algorithm.group_size = 6"),
    (("scheduler.max_inflight_groups=2",), "scheduler.max_inflight_groups = 2: is below the 3 groups of one batch"),
    (("sources.code.kinds=[boundary, boundary]",), "sources.code.kinds = [boundary, boundary]: names boundary twice"),
    # modes and graders
    (
        ("algorithm.mode=discount", "algorithm.lambda_max=1.2"),
        "algorithm.lambda_max = 1.2: has no effect, because algorithm.mode = discount has no cap",
    ),
    (("algorithm.mode=downweight", "algorithm.lambda_max=1.5"), "algorithm.lambda_max = 1.5: has no effect"),
    (("algorithm.mode=redistribute_exact", "algorithm.lambda_max=2"), "algorithm.lambda_max = 2.0: has no effect"),
    (
        ("algorithm.mode=outcome", "grader=null", "algorithm.lambda_max=2"),
        "algorithm.lambda_max = 2.0: has no effect, because algorithm.mode = outcome has no cap",
    ),
    (
        ("algorithm.mode=outcome", "grader=null", "algorithm.rubric.t3=0.1"),
        "algorithm.rubric: has no effect, because algorithm.mode = outcome uses no quality factors; remove the key",
    ),
    (("algorithm.mode=outcome",), "grader: has no effect, because algorithm.mode = outcome uses no grades; set grader"),
    (("grader=null",), "grader: is missing, and algorithm.mode = redistribute needs grades; add a grader, or choose"),
    (
        ("sources.code.groups_per_step=0",),
        "grader: has no effect, because no code source has a quota, and only code groups are graded; set grader: null",
    ),
    (
        ("sources.code.groups_per_step=0", "grader=null", "algorithm.mode=discount"),
        "algorithm.mode = discount: has no effect, because no code source has a quota",
    ),
    # budgets
    (
        ("rollout.limits.max_total_tokens=1025",),
        "rollout.limits.max_total_tokens = 1025: does not fit engine.max_model_len = 1024",
    ),
    (
        ("rollout.limits.max_turn_tokens=1024",),
        "rollout.limits.max_turn_tokens = 1024: leaves no room for a prompt in max_total_tokens = 1024; lower it",
    ),
    (
        ("learner.max_tokens_per_microbatch=1000",),
        "learner.max_tokens_per_microbatch = 1000: is below rollout.limits.max_total_tokens = 1024",
    ),
    (
        ("rollout.limits.command_timeout_s=61",),
        "rollout.limits.command_timeout_s = 61.0: is above command_budget_s = 60",
    ),
    (("rollout.limits.wall_s=60",), "rollout.limits.wall_s = 60.0: is not above command_budget_s = 60"),
    (
        ("scheduler.abort_after_s=300",),
        "scheduler.abort_after_s = 300.0: is not above rollout.limits.wall_s = 300: the run could end before lost",
    ),
    (
        ("grader.timeout_s=2400",),
        "scheduler.abort_after_s = 900.0: is not above grader.timeout_s = 2400: the run could end before a slow",
    ),
    (
        (NATIVE % ("", ", endpoint_wait_s: 900"),),
        "scheduler.abort_after_s = 900.0: is not above grader.endpoint_wait_s = 900: the run could end before groups",
    ),
    (
        ("grader.endpoint_wait_s=60",),
        "grader.endpoint_wait_s = 60.0: has no effect, because grader.backend.type = vllm has no endpoint",
    ),
    (
        ("scheduler.pause_masked_above=null", "scheduler.pause_masked_window=32"),
        "scheduler.pause_masked_window = 32: has no effect, because scheduler.pause_masked_above is null",
    ),
    (("scheduler.abort_after_s=50",), "scheduler.abort_after_s = 50.0: is not above stall_after_s = 50"),
    (
        ("grader.max_tokens=1024",),
        "grader.max_tokens = 1024: leaves no room for a prompt in grader.backend.engine.max_",
    ),
    # devices
    (
        ("engine.gpu_memory_utilization=0.9",),
        "engine.gpu_memory_utilization = 0.9: has no effect, because engine.device = cpu; use kv_cache_gib",
    ),
    (
        ("grader.backend.engine.gpu_memory_utilization=0.9",),
        "grader.backend.engine.gpu_memory_utilization = 0.9: has no effect, because grader.backend.engine.device = cpu",
    ),
    (
        (*CUDA_ENGINE, "engine.kv_cache_gib=2"),
        "engine.kv_cache_gib = 2.0: has no effect, because engine.device = cuda; use gpu_memory_utilization",
    ),
    ((*CUDA_ENGINE, "engine.threads=2"), "engine.threads = 2: has no effect, because engine.device = cuda"),
    (("engine.tensor_parallel_size=2",), "engine.tensor_parallel_size = 2: works with device cuda only; set it to 1"),
    (("engine.weight_transfer=nccl",), "engine.weight_transfer = nccl: works with device cuda only; choose ray_object"),
    (
        (*CUDA_ENGINE, "engine.weight_transfer=nccl"),
        "engine.weight_transfer = nccl: needs learner.device = cuda as well; choose ray_object for a CPU learner",
    ),
    (
        (*CUDA, "engine.tensor_parallel_size=2", "engine.resources.gpus=1", "engine.weight_transfer=nccl"),
        "engine.resources.gpus = 1.0: does not fit the 2 GPUs that one actor uses; set it to 2",
    ),
    (
        ("engine.device=cuda", "engine.tensor_parallel_size=2"),
        "engine.weight_transfer = ray_object: reaches engines on one GPU only, and engine.tensor_parallel_size = 2",
    ),
    (("engine.resources.gpus=1",), "engine.resources.gpus = 1.0: would leave GPUs idle, because device = cpu"),
    (
        ("engine.device=cuda", "engine.tensor_parallel_size=3", "engine.weight_transfer=nccl", *CUDA_LEARNER),
        "engine.tensor_parallel_size = 3: does not divide the 4 attention heads of policy; change it",
    ),
    (("learner.device=cuda", "learner.resources.gpus=2"), "learner.resources.gpus = 2.0: does not fit the 1 GPUs"),
    (
        ("learner.device=cuda", "learner.dtype=bfloat16"),
        "learner.zero_stage = 0: would accumulate gradients in bfloat16; raise it to 1 or more",
    ),
    ((*CUDA_LEARNER, "learner.threads=2"), "learner.threads = 2: has no effect, because learner.device = cuda"),
    (
        ("learner.offload_optimizer=true", "learner.zero_stage=2"),
        "learner.offload_optimizer = true: has no effect on learner.device = cpu; set it to false",
    ),
    (
        (*CUDA_LEARNER, "learner.offload_optimizer=true"),
        "learner.offload_optimizer = true: needs learner.zero_stage >= 1; raise the stage",
    ),
    # the grader's side
    (
        ("grader.backend.engine.weight_transfer=ray_object",),
        "grader.backend.engine.weight_transfer = ray_object: has no effect, because the grader's weights are never",
    ),
    (
        (ENDPOINT, "grader.backend.base_url=host:8000"),
        "grader.backend.base_url = host:8000: is not an address; give e.g. https://host/v1",
    ),
    # evaluation, telemetry, Ray, mixing
    (("eval.source=nope",), "eval.source = nope: is not among the sources (code, chat); choose one"),
    (("eval.before=false", "eval.after=false"), "eval: has no effect, because before and after"),
    (
        ("telemetry.wandb.mode=disabled", "telemetry.wandb.project=x"),
        "telemetry.wandb.project = x: has no effect, because telemetry.wandb.mode = disabled; remove the key",
    ),
    (
        ("algorithm.mode=outcome", "grader=null", "telemetry.archive=none"),
        "telemetry.archive = none: has no effect, because there is no grader, and only graded groups are kept",
    ),
    (
        ("telemetry.wandb.project=a/b",),
        "telemetry.wandb.project = a/b: is not a name that W&B takes; write at most 128",
    ),
    (("telemetry.wandb={mode: disabled, entity: me}",), "telemetry.wandb.entity = me: has no effect"),
    (
        ("ray.address=auto", "ray.object_store_mib=99"),
        "ray.object_store_mib = 99: has no effect, because ray.address = auto joins a running cluster",
    ),
    (
        ("sources={chat: {type: arith, groups_per_step: 1}}", "grader=null", "eval=null", "rollout.sandbox.type=jail"),
        "rollout.sandbox: has no effect, because only single-turn sources are used; remove the key",
    ),
    (
        ("sources={chat: {type: arith, groups_per_step: 1}}", "grader=null", "eval=null", "rollout.limits.max_turns=3"),
        "rollout.limits.max_turns = 3: has no effect, because only single-turn sources are used",
    ),
    (
        (
            "sources={chat: {type: arith, groups_per_step: 1}}",
            "grader=null",
            "eval=null",
            "rollout.action_format=fenced",
        ),
        "rollout.action_format = fenced: has no effect, because only single-turn sources are used",
    ),
    (
        ("sources={chat: {type: arith, groups_per_step: 1}}", "grader=null", "eval=null", "algorithm.lambda_max=2"),
        "algorithm.lambda_max = 2.0: has no effect, because no code source has a quota",
    ),
    (
        ("sources={chat: {type: arith, groups_per_step: 1}}", "grader=null", "eval=null", "algorithm.rubric.t3=0.1"),
        "algorithm.rubric: has no effect, because no code source has a quota",
    ),
    (
        ("scheduler.asynchronous=false", "scheduler.max_staleness=1"),
        "scheduler.max_staleness = 1: has no effect, because scheduler.asynchronous = false trains on tokens of the",
    ),
    (
        ("scheduler.overlap=false",),
        "scheduler.overlap = false: needs steps that do not overlap either; set scheduler.asynchronous to false, and",
    ),
    (
        ("sources.chat.min_concurrency=4", "sources.chat.max_concurrency=3"),
        "sources.chat.min_concurrency = 4: is above max_concurrency = 3; lower it, or raise max_concurrency",
    ),
    (
        ("sources.chat.groups_per_step=0", "scheduler.alpha=0.3"),
        "scheduler.alpha = 0.3: has no effect, because only one source has a quota; remove the key",
    ),
    (
        ("sources={code: {type: minirepo, groups_per_step: 1}}", "scheduler.alpha=0.3"),
        "scheduler.alpha = 0.3: has no effect, because there is only one source; remove the key",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), ONE_PROBLEM, ids=[expected[:50] for _, expected in ONE_PROBLEM])
def test_refused_with_one_line(run_file: Path, overrides: tuple[str, ...], expected: str) -> None:
    lines = refusals(run_file, *overrides)
    assert len(lines) == 1
    assert expected in lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.mode=outcome", "grader=null"),
        ("algorithm.lambda_max=2", "algorithm.rubric.t3=0.1"),
        (ENDPOINT,),
        (*CUDA_ENGINE, "engine.gpu_memory_utilization=0.8", *CUDA_LEARNER, "engine.weight_transfer=nccl"),
        (*CUDA_LEARNER, "learner.zero_stage=1", "learner.offload_optimizer=true", "learner.dtype=bfloat16"),
        ("learner.zero_stage=3", "learner.world_size=2"),
        ("learner.zero_stage=1", "learner.dtype=bfloat16"),
        ("engine.gpu_memory_utilization=null",),
        (*CUDA_ENGINE, "engine.resources.gpus=0.5", *CUDA_LEARNER, "learner.resources.gpus=0.5"),
        ("grader.backend.engine.device=cuda", "grader.backend.engine.tensor_parallel_size=4"),
        ("sources.chat.groups_per_step=0",),
        ("eval=null",),
        ("eval.before=false",),
        ("loss.objective={name: ppo_clip, dual_clip: 2}", "loss.aggregation=token_mean"),
        ("rollout.sandbox={type: remote, hosts: ['http://a:1']}",),
        ("ray.address=auto",),
        ("ray.address=10.0.0.1:6379",),
        ("ray.address='[::1]:6379'",),
        ("ray.address=ray://head:10001", "ray.object_store_mib=null"),
        ("ray.object_store_mib=75",),
        ("grader.mode=single",),
        ("grader.mode=single", "grader.scope=candidate", "grader.second_pass=true", "grader.repair_rounds=0"),
        ("grader.budget={turns: 6, tokens: 900, seconds: 60}", "grader.alarms.window=9"),
        (*FULL, "grader.checks={limit: 2, timeout_s: 5}", "grader.sandbox={type: jail}", "grader.tool_output_chars=99"),
        ("grader.checks.enabled=false",),
        ("grader.canaries={share: 0.1, window: 5, alarm_below: 0.5}",),
        ("grader.canaries={share: 0.1, path: policy}",),
        (NATIVE % (", structured: json_object, tool_calling: false, prices: {prompt_usd_per_mtok: 3}", ""),),
        (NATIVE % (", structured: json_object", ", mode: single"),),
        (DOCKER % ("python@sha256:0123", "-e, API_KEY, --env=TOKENIZERS_PARALLELISM=false, --env-file=keys.env"),),
        ("output=~/runs",),
    ],
)
def test_combinations_that_run(run_file: Path, overrides: tuple[str, ...]) -> None:
    assert load_run(run_file, overrides).config.steps == 2


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (("config.json",), "lacks config.json; give a complete checkpoint folder"),
        (("model.safetensors", "tokenizer.json"), "lacks tokenizer.json, *.safetensors; give a complete"),
    ],
)
def test_an_incomplete_checkpoint(run_file: Path, lost: tuple[str, ...], expected: str) -> None:
    for name in lost:
        (run_file.parent / "policy" / name).unlink()
    (line,) = refusals(run_file)
    assert line.startswith(f"engine.model = {run_file.parent / 'policy'}: {expected}")


def test_missing_checkpoint_folders_are_named_one_by_one(run_file: Path) -> None:
    lines = refusals(run_file, "engine.model=a", "learner.model=a", "grader.backend.engine.model=b")
    assert [line.split(" = ")[0] for line in lines] == ["engine.model", "grader.backend.engine.model"]
    assert all("no such folder; give a checkpoint in Hugging Face format" in line for line in lines)


def test_engines_serve_the_policy_that_is_trained(run_file: Path) -> None:
    (line,) = refusals(run_file, "learner.model=grader")
    assert line.startswith(f"learner.model = {run_file.parent / 'grader'}: differs from engine.model")


def test_a_context_longer_than_the_model(run_file: Path) -> None:
    (line,) = refusals(run_file, "engine.max_model_len=4096")
    assert line.startswith("engine.max_model_len = 4096: is above the 2048 positions of policy")


def test_weights_that_are_not_safetensors(run_file: Path) -> None:
    (run_file.parent / "policy" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (line,) = refusals(run_file)
    assert "cannot be read (model.safetensors is not a safetensors file)" in line


def test_problems_of_several_rules_come_together(run_file: Path) -> None:
    lines = refusals(run_file, "eval.source=x", "algorithm.min_valid=9", "engine.gpu_memory_utilization=0.5")
    assert [line.split(" = ")[0] for line in lines] == [
        "algorithm.min_valid",
        "engine.gpu_memory_utilization",
        "eval.source",
    ]


def test_a_problem_names_the_line_of_its_key(run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("{source: code}", "\n  tasks: 3\n  source: nowhere"))
    with pytest.raises(ConfigError, match=f"^{run_file}:17: eval.source = nowhere"):
        load_run(run_file)


def test_every_rule_is_exercised_above(run_file: Path) -> None:
    config = load_run(
        run_file,
    ).config
    assert all(list(rule(config)) == [] for rule in RULES)
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.mode=downweight",),
        ("algorithm.mode=outcome", "grader=null"),
        (*CUDA_ENGINE, *CUDA_LEARNER),
        ("telemetry.wandb.mode=disabled", "ray.address=auto"),
        ("grader.mode=single",),
        ("scheduler.asynchronous=false",),
        ("scheduler.asynchronous=false", "scheduler.overlap=false"),
        (*FULL, "grader.checks.enabled=false"),
        ("grader.canaries.share=0.1",),
        (NATIVE % ("", ""),),
        ("sources={chat: {type: arith, groups_per_step: 1}}", "grader=null", "eval=null"),
    ],
)
def test_what_is_kept_of_a_run_can_be_run_again_and_means_the_same(run_file: Path, overrides: tuple[str, ...]) -> None:
    config = load_run(run_file, [*overrides]).config
    again = run_file.parent / "again.yaml"
    again.write_text(yaml.safe_dump(resolved(config)))
    assert load_run(again).config == config


def test_what_is_kept_holds_defaults_but_no_key_without_effect(run_file: Path) -> None:
    kept = resolved(load_run(run_file, ["algorithm.mode=discount"]).config)
    assert kept["algorithm"]["group_size"] == 6
    assert "lambda_max" not in kept["algorithm"]
    assert json.loads(json.dumps(kept)) == kept
    assert RunConfig.model_validate(kept).algorithm.mode == "discount"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("tokenizer.json", "", "tokenizer.json: Expecting value"),
        ("tokenizer.json", "[]", "tokenizer.json does not hold an object"),
    ],
)
def test_a_broken_file_of_a_checkpoint_is_named(run_file: Path, file: str, text: str, expected: str) -> None:
    (run_file.parent / "policy" / file).write_text(text)
    [line] = refusals(run_file)
    assert f"cannot be read ({expected}" in line


def test_a_strange_architecture_is_no_crash(run_file: Path) -> None:
    (run_file.parent / "policy" / "config.json").write_text('{"architectures": {"a": 1}, "model_type": "llama"}')
    assert load_run(run_file).config.name == "test"


def test_a_path_that_is_too_long_is_no_folder(run_file: Path) -> None:
    [line] = refusals(run_file, f"engine.model=/{'a' * 5000}", f"learner.model=/{'a' * 5000}")
    assert "no such folder" in line


def test_a_secret_is_not_repeated(run_file: Path) -> None:
    for override in (
        DOCKER % ("python:3.11", "-e, API_KEY=hunter-2"),
        "rollout.sandbox={type: docker, image: a, docker_args: -e API_KEY=hunter-2}",
        "rollout.sandbox={type: docker, image: a, password: hunter-2}",
        "grader.backend.api_key=hunter-2",
        ENDPOINT.replace("model: m", "model: m, api_key_env: hunter-2"),
        "grader.backend.base_url=https://me:hunter-2@host/v1",
    ):
        with pytest.raises(ConfigError) as caught:
            load_run(run_file, [override])
        assert "hunter-2" not in str(caught.value)


def test_a_cache_too_small_for_one_sequence(run_file: Path) -> None:
    described = json.loads((run_file.parent / "policy" / "config.json").read_text())
    described |= {"num_hidden_layers": 4, "hidden_size": 128, "num_key_value_heads": 2}
    (run_file.parent / "policy" / "config.json").write_text(json.dumps(described))
    # 2 x 4 layers x 2 heads x 32 = 512 numbers of 4 bytes a token, 1024 tokens: 2 MiB = 0.00195 GiB.
    assert load_run(run_file, ["engine.kv_cache_gib=0.002"]).config.name == "test"
    [line] = refusals(run_file, "engine.kv_cache_gib=0.0019")
    assert line.startswith("engine.kv_cache_gib = 0.0019: is less than the 0.00195 GiB of one sequence of engine.max_")
    assert load_run(run_file, ["engine.kv_cache_gib=0.001", "engine.dtype=bfloat16"]).config.name == "test"


def test_an_empty_folder_of_canaries(run_file: Path) -> None:
    (run_file.parent / "groups").mkdir()
    [line] = refusals(run_file, "grader.canaries={share: 0.1, path: groups}")
    assert line.endswith(f"path = {run_file.parent / 'groups'}: is empty; give a folder of stored groups with labels")


def test_one_more_rule_comes_with_the_others(run_file: Path) -> None:
    more = Problem(path=("sources", "code", "kinds"), message="is odd; change it")
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, ["eval.source=x"], also=lambda _: [more])
    assert [line.split(": ", 1)[1] for line in str(caught.value).splitlines()[2:]] == [
        "sources.code.kinds: is odd; change it"
    ]


def test_an_output_folder_below_a_file(run_file: Path) -> None:
    [line] = refusals(run_file, f"output={run_file}/runs")
    assert line.endswith(f"output = {run_file}/runs: cannot be made, because {run_file} is no folder; give another one")
