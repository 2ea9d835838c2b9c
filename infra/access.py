"""A Ray that a run starts for itself: reachable from this host only, and only with a token of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LOOPBACK_DEVICE = "lo"

_TASK_EVENTS = "RAY_task_events_report_interval_ms"
"""0: nobody keeps a line of every call that was ever made; there is no dashboard to show them, and Ray's control store
would grow by some 80 MiB an hour."""
_TAKEN = (
    *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"),
    _TASK_EVENTS,
)


@contextmanager
def own_ray() -> Iterator[None]:
    """While the body runs, every Ray that starts here is on the loopback address, and asks for a token made for this
    run. The token lies in a file that only this user can read, and goes with the run.

    Ray puts a reachable address in the place of a loopback one that `ray.init` is given, unless told, by a variable
    named after other systems, that it is to be no cluster.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

    before = {name: os.environ.get(name) for name in _TAKEN}
    folder = Path(tempfile.mkdtemp(prefix="gagar-ray-"))  # of mode 0700
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    _set(
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": None,
            "RAY_AUTH_TOKEN_PATH": str(path),
            ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
            _TASK_EVENTS: "0",
        }
    )
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    # Ray reads these once in a process: what an earlier session of it left does not count.
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")
    try:
        yield
    finally:
        _set(before)
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def stay_on_host() -> None:
    """In an actor of a Ray that is on the loopback address: what torch, gloo, NCCL and vLLM open for themselves stays
    there too. On a cluster nothing is changed."""
    import ray

    if ray.is_initialized() and ray.util.get_node_ip_address() == LOOPBACK:
        os.environ["VLLM_HOST_IP"] = LOOPBACK
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK_DEVICE
