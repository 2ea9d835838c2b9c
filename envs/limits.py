"""What a kind of sandbox cannot keep a policy from on this host, and the refusal to run with less."""

from __future__ import annotations

import os

from configs.schema import DockerSandbox, FargateSandbox, JailSandbox, SandboxConfig
from envs.jail import counts_processes
from envs.jail_filter import seccomp_program
from infra.errors import SandboxError

_OPEN_NETWORKS = ("bridge", "host", "default", "slirp4netns", "pasta")


def unenforced(config: SandboxConfig) -> tuple[str, ...]:
    """The limits that sandboxes of this kind would not have here, in words; empty if they have all.

    For sandboxes on this host, and what is always so elsewhere: what else holds on somebody else's machines cannot be
    seen from here. Pods are looked at when the first one is started.
    """
    if isinstance(config, JailSandbox):
        return _jail()
    if isinstance(config, FargateSandbox):
        return ("its tasks have a public address and a way to the internet",)
    return _docker(config) if isinstance(config, DockerSandbox) else ()


def refuse_weaker(config: SandboxConfig) -> None:
    """Raises SandboxError if a limit cannot be enforced, unless the configuration allows it."""
    if not isinstance(config, JailSandbox | DockerSandbox | FargateSandbox) or config.allow_weaker:
        return
    if missing := unenforced(config):
        raise SandboxError(
            f"sandboxes of type {config.type} would be weaker than they should be on this host: {'; '.join(missing)}. "
            "Mend it, or accept it with allow_weaker: true beside that type"
        )


def _jail() -> tuple[str, ...]:
    about = os.uname()
    missing = []
    if not counts_processes():
        missing.append(f"max_processes needs Linux 5.14 (this is {about.release})")
    if seccomp_program() is None:
        missing.append(f"no filter of system calls for {about.machine}, so memory can be hidden from memory_mib")
    return tuple(missing)


def _docker(config: DockerSandbox) -> tuple[str, ...]:
    given: dict[str, str] = {}
    for argument, following in zip(config.docker_args, (*config.docker_args[1:], ""), strict=False):
        name, equals, value = argument.partition("=")
        given[name] = value if equals else following
    missing = []
    if not {"--memory", "-m"} & set(given):
        missing.append("docker_args bound no memory (--memory=1g)")
    if "--pids-limit" not in given:
        missing.append("docker_args bound no processes (--pids-limit=256)")
    network = given.get("--network", given.get("--net", "default"))
    if network.partition(":")[0] in _OPEN_NETWORKS:
        missing.append(f"the network {network!r} may lead outside (docker_args: --network=NAME of an internal one)")
    return tuple(missing)
