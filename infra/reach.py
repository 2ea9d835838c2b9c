"""`gagar doctor`'s look at other machines: whether the servers that a configuration names answer, with its keys.

Every look is bounded in time. What servers say is shown without secrets; keys are sent, never printed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from configs.schema import EndpointGraderBackend, RemoteSandbox, RunConfig, WandbConfig
from infra.findings import Finding, Level
from infra.scrub import hide, key_variables, scrub
from infra.wandb_sink import wandb_mode

if TYPE_CHECKING:
    import httpx

ANSWER_S = 15.0
"""What a server gets to answer."""
RAY_S = 40.0
"""What a cluster gets; importing Ray takes some of it."""
SKEW_S = 30.0
"""Clocks that differ by more make latencies of graders, and tokens that expire, wrong."""
_WANDB = "https://api.wandb.ai"
_SAID = 160
"""Characters of a server's answer that are shown."""


def reachable(config: RunConfig | None) -> Iterator[Finding]:
    """Look at every server that the configuration names."""
    if config is None:
        return
    hide(key_variables(config))
    if config.grader is not None and isinstance(config.grader.backend, EndpointGraderBackend):
        yield from _endpoint(config.grader.backend)
    if isinstance(config.rollout.sandbox, RemoteSandbox):
        yield _sandboxes(config.rollout.sandbox)
    if config.ray.address is not None:
        yield _ray(config.ray.address)
    yield from _wandb(config.telemetry.wandb)


# ---- the grader's endpoint -------------------------------------------------------------------------------------------


def _endpoint(backend: EndpointGraderBackend) -> Iterator[Finding]:
    """One question with an answer of one token, to the model that is to grade."""
    import httpx

    url = backend.base_url.rstrip("/") + "/chat/completions"
    key = os.environ.get(backend.api_key_env)
    question = {"model": backend.model, "messages": [{"role": "user", "content": "Say 1."}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.post(url, json=question, headers=headers, timeout=ANSWER_S)
    except httpx.HTTPError as error:
        yield _fail(
            "endpoint",
            f"{backend.base_url} cannot be reached: {_why(error)}",
            "check grader.backend.base_url, name resolution, proxies (HTTPS_PROXY) and the firewall",
        )
        return
    yield _judged(backend, answer)
    yield from _skew(backend.base_url, answer)


def _judged(backend: EndpointGraderBackend, answer: httpx.Response) -> Finding:
    said = f"{backend.base_url} answers {answer.status_code}"
    if answer.is_success:
        took = f"{answer.elapsed.total_seconds():.1f} s"
        return Finding(
            name="endpoint", level=Level.OK, detail=f"{said} as {backend.model} in {took}, the key is accepted"
        )
    said += f": {scrub(' '.join(answer.text.split()))[:_SAID]}"
    if answer.status_code in (401, 403):
        return _fail("endpoint", said, f"put a key that this endpoint accepts into {backend.api_key_env}")
    if answer.status_code == 404:
        return _fail("endpoint", said, "check grader.backend.base_url (up to /v1) and grader.backend.model")
    if answer.status_code == 429:
        remedy = "lower grader.backend.max_concurrency, or ask for a larger quota; the key itself is accepted"
        return Finding(name="endpoint", level=Level.WARN, detail=said, remedy=remedy)
    remedy = "it is reachable, but did not answer a plain question; read what it says, and try again"
    return Finding(name="endpoint", level=Level.WARN, detail=said, remedy=remedy)


def _skew(where: str, answer: httpx.Response) -> Iterator[Finding]:
    """By the server's own clock."""
    try:
        skew_s = parsedate_to_datetime(answer.headers["date"]).timestamp() - time()
    except (KeyError, ValueError, TypeError):
        return
    if abs(skew_s) <= SKEW_S:
        yield Finding(name="clock", level=Level.OK, detail=f"within {SKEW_S:g} s of {where}")
    else:
        yield Finding(
            name="clock",
            level=Level.WARN,
            detail=f"{abs(skew_s):.0f} s {'behind' if skew_s > 0 else 'ahead of'} {where}",
            remedy="switch time synchronisation on (timedatectl set-ntp true)",
        )


# ---- sandboxes, W&B --------------------------------------------------------------------------------------------------


def _sandboxes(sandbox: RemoteSandbox) -> Finding:
    """SWE-ReX servers answer /is_alive to whoever has the token."""
    import httpx

    headers = {"X-API-Key": os.environ.get(sandbox.token_env, "")}
    silent = []
    for host in sandbox.hosts:
        try:
            answer = httpx.get(f"{host.rstrip('/')}/is_alive", headers=headers, timeout=ANSWER_S)
            if not answer.is_success:
                silent.append(f"{host} answers {answer.status_code}")
        except httpx.HTTPError as error:
            silent.append(f"{host}: {_why(error)}")
    answering = f"{len(sandbox.hosts) - len(silent)} of {len(sandbox.hosts)} servers answer"
    if not silent:
        return Finding(name="sandbox hosts", level=Level.OK, detail=answering)
    return Finding(
        name="sandbox hosts",
        level=Level.FAIL if len(silent) == len(sandbox.hosts) else Level.WARN,
        detail=f"{answering}; {'; '.join(silent[:3])}",
        remedy=f"start swerex-remote there, with the token that {sandbox.token_env} holds (401: another token)",
    )


def _wandb(wandb: WandbConfig) -> Iterator[Finding]:
    """Only where a run would go online; any answer will do."""
    import httpx

    if wandb_mode(wandb, environ=os.environ, home=Path.home()) != "online":
        return
    url = os.environ.get("WANDB_BASE_URL") or _WANDB
    try:
        answer = httpx.get(url, timeout=ANSWER_S)
        yield Finding(name="wandb server", level=Level.OK, detail=scrub(f"{url} answers {answer.status_code}"))
    except httpx.HTTPError as error:
        yield Finding(
            name="wandb server",
            level=Level.WARN,
            detail=scrub(f"{url} cannot be reached: {_why(error)}"),
            remedy="check proxies and WANDB_BASE_URL; a run goes on offline, and `wandb sync` sends it later",
        )


# ---- Ray -------------------------------------------------------------------------------------------------------------

_ASK_RAY = """
import json, sys, ray
from ray._private import services
from ray._raylet import GcsClient
address = services.canonicalize_bootstrap_address_or_die(sys.argv[1])
found = GcsClient(address=address).internal_kv_get(b"CLUSTER_METADATA", b"cluster")
print("gagar:" + json.dumps({"address": address, "mine": ray.__version__, **json.loads(found or b"{}")}))
"""


def _ray(address: str) -> Finding:
    """In a process of its own: Ray's clients wait for a cluster that does not answer longer than anybody would."""
    remedy = (
        "start it (ray start --head), check the address and the firewall, and bring its token (RAY_AUTH_TOKEN_PATH)"
    )
    if address.startswith("ray://"):
        return _port(address.removeprefix("ray://"), remedy)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_RAY, address], capture_output=True, text=True, timeout=RAY_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _fail("ray", f"{address} does not answer within {RAY_S:g} s", remedy)
    lines = [line for line in done.stdout.splitlines() if line.startswith("gagar:")]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return _fail("ray", f"{address}: {scrub(last)[:_SAID]}", remedy)
    about = json.loads(lines[0].removeprefix("gagar:"))
    theirs = (about.get("ray_version", "unknown"), about.get("python_version", "unknown"))
    mine = (about["mine"], ".".join(map(str, sys.version_info[:3])))
    if theirs[0] != mine[0] or theirs[1].split(".")[:2] != mine[1].split(".")[:2]:
        return _fail(
            "ray",
            f"{about['address']} runs Ray {theirs[0]}, Python {theirs[1]}; here are Ray {mine[0]}, Python {mine[1]}",
            "use one image, or one requirements file, on all nodes",
        )
    return Finding(name="ray", level=Level.OK, detail=f"{about['address']} answers, Ray {theirs[0]} as here")


def _port(address: str, remedy: str) -> Finding:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port or 10001)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        return _fail("ray", f"{address} cannot be reached: {error}", remedy)
    return Finding(name="ray", level=Level.OK, detail=f"{address} takes connections; its version was not asked")


def _fail(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, level=Level.FAIL, detail=detail, remedy=remedy)


def _why(error: Exception) -> str:
    return scrub(str(error) or type(error).__name__)[:_SAID]
