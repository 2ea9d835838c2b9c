"""What drives the policy, and where its commands run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from configs.problems import Problem
from configs.rules.findings import check_address, check_variable, hidden, idle, problem, repeated, sandboxes_of
from configs.schema import (
    BuiltinHarness,
    CommandHarness,
    DaytonaSandbox,
    DockerSandbox,
    JailSandbox,
    RemoteSandbox,
    RunConfig,
    ServiceSandbox,
)
from configs.secrecy import is_secret, secret_in_argument


def harness(config: RunConfig) -> Iterator[Problem]:
    """What a harness that is not ours needs, and what it leaves without effect."""
    chosen = config.rollout.harness
    if isinstance(chosen, BuiltinHarness):
        return
    why = f"rollout.harness.type = {chosen.type} reads commands in its own way"
    yield from idle(config, "rollout.action_format", why)
    if isinstance(chosen, CommandHarness):
        if not isinstance(config.rollout.sandbox, JailSandbox):
            yield problem(
                config,
                "rollout.harness.type",
                "reaches the gateway by a socket that only jails are shown; choose rollout.sandbox.type jail",
            )
        for folder in chosen.paths:
            if not os.path.isdir(folder):
                yield problem(config, "rollout.harness.paths", f"names {folder}, which is no folder; give one that is")
    elif chosen.config_file is not None and not os.path.isfile(chosen.config_file):
        yield problem(config, "rollout.harness.config_file", "is no file; give a configuration of mini-swe-agent")


def remote_sandbox(config: RunConfig) -> Iterator[Problem]:
    """Addresses of servers, and the variable with their token."""
    for key, sandbox in sandboxes_of(config):
        if isinstance(sandbox, RemoteSandbox):
            for host in sandbox.hosts:
                yield from check_address(config, f"{key}.hosts", host, "http://host:port")
            yield from check_variable(config, f"{key}.token_env", sandbox.token_env)
            if twice := repeated(sandbox.hosts):
                yield problem(config, f"{key}.hosts", f"names {twice} twice; each sandbox needs a server of its own")


def containers(config: RunConfig) -> Iterator[Problem]:
    """Arguments of docker run are kept in the run folder, so no secret may stand in them; and what would not start."""
    for key, sandbox in sandboxes_of(config):
        if isinstance(sandbox, ServiceSandbox):
            for field in ("image", "server_image"):
                image = getattr(sandbox, field, None) or "none"
                if re.search(r"\s|^-", image):
                    yield problem(config, f"{key}.{field}", "is not the name of an image; give e.g. python:3.11")
                if is_secret(f"https://{image}") and "@sha256:" not in image:
                    yield hidden(
                        f"{key}.{field}", "may hold a secret; give the bare name, and log in with docker login"
                    )
        if isinstance(sandbox, DaytonaSandbox):
            yield from check_variable(config, f"{key}.api_key_env", sandbox.api_key_env)
        if isinstance(sandbox, ServiceSandbox):
            wall_s = config.rollout.limits.wall_s
            if key == "rollout.sandbox" and sandbox.lifetime_s < wall_s:
                yield problem(
                    config,
                    f"{key}.lifetime_s",
                    f"ends sandboxes before rollout.limits.wall_s = {wall_s:g} s does; raise it, or lower that",
                )
        if not isinstance(sandbox, DockerSandbox):
            continue
        for argument, following in zip(sandbox.docker_args, (*sandbox.docker_args[1:], ""), strict=False):
            if (name := secret_in_argument(argument)) is not None:
                yield hidden(
                    f"{key}.docker_args",
                    f"holds what looks like a secret{f' ({name}=...)' if name else ''}, which would stand in the run "
                    f"folder; write -e {name or 'NAME'}, which passes the variable on from the environment",
                )
            if argument in ("--network=none", "--net=none") or (
                argument in ("--network", "--net") and following == "none"
            ):
                yield problem(
                    config,
                    f"{key}.docker_args",
                    "cuts the sandbox's server off (--network=none); give a network without a route outside, "
                    "--network=NAME",
                )


def unused_sandbox(config: RunConfig) -> Iterator[Problem]:
    """Single-turn tasks are answered without a sandbox."""
    evaluated = config.eval.source if config.eval is not None else None
    used = [s for name, s in config.sources.items() if s.groups_per_step > 0 or name == evaluated]
    if used and all(source.type == "arith" for source in used):
        limits = [
            f"limits.{key}" for key in ("max_turns", "command_timeout_s", "command_budget_s", "observation_chars")
        ]
        for key in ("sandbox", "action_format", *limits):
            yield from idle(config, f"rollout.{key}", "only single-turn sources are used")
