"""What the configuration of sandboxes refuses, and which keys of theirs are hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.check import load_run
from configs.errors import ConfigError
from envs.limits import unenforced
from envs.sandbox import in_session
from infra.nodes import demands
from infra.scrub import key_variables


def sandbox(kind: str, more: str = "") -> str:
    return f"rollout.sandbox={{type: {kind}, image: 'a:1'{more}}}"


@pytest.mark.parametrize("kind", ["docker", "modal", "daytona", "kubernetes", "fargate"])
def test_kinds_that_services_start_are_read(run_file: Path, kind: str) -> None:
    config = load_run(run_file, [sandbox(kind, ", warm: 1, start_retries: 0")]).config
    assert config.rollout.sandbox.type == kind


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (sandbox("kubernetes", ", server_image: 'a b'"), r"server_image.*is not the name of an image"),
        (sandbox("docker", ", server_image: 'user:pass@host/a'"), r"server_image: may hold a secret"),
        (sandbox("daytona", ", api_key_env: 'dtn-0123'"), r"api_key_env: is not the name of an environment variable"),
        (sandbox("kubernetes", ", lifetime_s: 10"), r"lifetime_s = 10.*ends sandboxes before rollout\.limits\.wall_s"),
        (sandbox("modal", ", lifetime_s: 10"), r"lifetime_s = 10"),
        (sandbox("fargate", ", cpus: 3"), r"cpus"),
        (sandbox("remote"), r"image"),
        (sandbox("jail", ", warm: 1"), r"image|warm"),
    ],
)
def test_what_cannot_run_is_refused(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(run_file, [override])


def test_keys_are_hidden_and_given_to_the_pods_that_need_them(run_file: Path) -> None:
    config = load_run(run_file, [sandbox("daytona", ", api_key_env: BOX_KEY")]).config
    assert "BOX_KEY" in key_variables(config)
    (rollout,) = [demand for demand in demands(config) if demand.pool == "rollout"]
    assert rollout.variables == ("BOX_KEY",) and not rollout.jails


def test_tasks_of_fargate_are_always_weaker(run_file: Path) -> None:
    config = load_run(run_file, [sandbox("fargate")]).config
    assert unenforced(config.rollout.sandbox) == ("its tasks have a public address and a way to the internet",)


def test_pods_carry_the_run_and_the_start_of_its_driver(run_file: Path) -> None:
    plain = load_run(run_file).config
    assert in_session(plain) is plain
    config = load_run(run_file, [sandbox("kubernetes", ", labels: {team: rl}"), "name=a_run.7"]).config
    first, second = (in_session(config).rollout.sandbox.labels for _ in range(2))  # type: ignore[union-attr]
    assert first["team"] == "rl" and first["gagar.dev/run"] == "a_run.7"
    assert first["gagar.dev/session"] != second["gagar.dev/session"]
