"""`gagar doctor`'s look at sandboxes: starts a real one, because kernels and containers may forbid what it needs."""

from __future__ import annotations

import asyncio
import time

from configs.schema import (
    DaytonaSandbox,
    JailSandbox,
    KubernetesSandbox,
    ModalSandbox,
    RemoteSandbox,
    RunConfig,
    SandboxConfig,
)
from infra.errors import SandboxError
from infra.findings import Finding, Level

NAME = "sandbox"
LIMITS = "sandbox limits"
_ELSEWHERE = (ModalSandbox, DaytonaSandbox, KubernetesSandbox, RemoteSandbox)
JAIL_REMEDY = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined), or use "
    "rollout.sandbox={type: docker, image: ...}"
)
OTHER_REMEDY = "see that the service of rollout.sandbox answers from this host; docs/security.md names what each needs"


def probe_sandbox(config: RunConfig | None) -> Finding:
    """Start one sandbox of the configured kind (without a configuration: a jail), run git in it, end it."""
    sandbox = config.rollout.sandbox if config is not None else JailSandbox()
    remedy = JAIL_REMEDY if isinstance(sandbox, JailSandbox) else OTHER_REMEDY
    start_s = time.monotonic()
    try:
        code, output = asyncio.run(_git_version(sandbox))
    except SandboxError as error:
        return Finding(name=NAME, level=Level.FAIL, detail=str(error), remedy=remedy)
    if code != 0:
        return Finding(
            name=NAME,
            level=Level.FAIL,
            detail=f"git does not run inside: {output}",
            remedy="install git under /usr on this host (apt-get install git), or in the sandbox's image",
        )
    took = f"{time.monotonic() - start_s:.1f} s to start and end"
    if missing := _unenforced(sandbox):
        return Finding(
            name=NAME,
            level=Level.WARN,
            detail=f"{sandbox.type} works, with less than it should keep from a policy: {'; '.join(missing)}",
            remedy="mend it and remove allow_weaker, or train only policies that you trust not to look for it",
        )
    return Finding(name=NAME, level=Level.OK, detail=f"{sandbox.type} works, {output} inside, {took}")


def _unenforced(config: SandboxConfig) -> tuple[str, ...]:
    from envs.limits import unenforced

    return unenforced(config)


def probe_limits(config: RunConfig | None) -> Finding:
    """Which limits of the configured kind of sandbox would not hold on this host."""
    from envs.limits import unenforced

    sandbox = config.rollout.sandbox if config is not None else JailSandbox()
    missing = unenforced(sandbox)
    if not missing:
        where = "of its hosts cannot be seen from here" if isinstance(sandbox, _ELSEWHERE) else "all hold here"
        return Finding(name=LIMITS, level=Level.OK, detail=f"limits of {sandbox.type}: {where}")
    allowed = getattr(sandbox, "allow_weaker", False)
    return Finding(
        name=LIMITS,
        level=Level.WARN if allowed else Level.FAIL,
        detail="; ".join(missing),
        remedy="mend it; docs/security.md says what each limit keeps a policy from"
        if allowed
        else "mend it, or accept it with rollout.sandbox.allow_weaker=true",
    )


async def _git_version(config: SandboxConfig) -> tuple[int | None, str]:
    from envs.sandbox import make_provider

    provider = make_provider(config)
    try:
        sandbox = await provider.start()
        try:
            result = await sandbox.run("git --version", timeout_s=20.0)
        finally:
            await sandbox.close()
    finally:
        await provider.close()
    return result.exit_code, result.output.strip()
