"""A Ray cluster on this machine: nodes in processes of their own, made by `ray start`, and the wires between them.

Each node that is added has a network namespace of its own and a veth pair to one switch (a bridge). So it has an
address and ports of its own, and its wire can be cut without a word to either end, or made slow. The harness moves into
a new namespace for that, with the head and the driver: nothing of the machine's own network is touched, and everything
vanishes with the last process. It takes root and Debian's iproute2. Without them the nodes share 127.0.0.1: they can be
killed and stopped, but not cut off.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.bench import driven
from tests.bench.driven import Driven, Process

ROLES: Collection[str] = ("gcs", "raylet", "ray agent", "ray worker", "ray node", driven.LINGERS)
"""Of processes that belong to a node, not to the run that uses it."""
LOOPBACK = "127.0.0.1"
STORE_BYTES = 300 * 2**20
_UP = "Ray runtime started"
_TOO_SLOW = "timed out during startup"
_CLONE_NEWNET = 0x40000000
_SWITCH = "lan"
_LAN = "10.213.0"


class NetworkMissing(RuntimeError):
    """What namespaces and wires need and this machine has not."""


class Network:
    """The switch, in a namespace of the harness."""

    def __init__(self) -> None:
        """Moves the calling thread, and so all processes that it starts from now on, into a new namespace.

        Raises:
            NetworkMissing: no iproute2, no right to make namespaces, or a kernel without bridges.
        """
        for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
            if shutil.which(program) is None:
                raise NetworkMissing(f"there is no program `{program}`: apt-get install {package}")
        self._made = 0
        _new_namespace()
        _ip("link", "set", "lo", "up")
        # Of its own accord a bridge takes the lowest address of its ports, which come and go.
        _ip("link", "add", _SWITCH, "address", "02:00:00:00:00:01", "type", "bridge")
        _ip("address", "add", f"{_LAN}.1/24", "dev", _SWITCH)
        _ip("link", "set", _SWITCH, "up")

    def wire(self) -> Wire:
        """A new namespace, wired to the switch."""
        self._made += 1
        home = _namespace()
        try:
            _new_namespace()
            there = _namespace()
        finally:
            _call("setns", home, _CLONE_NEWNET)
            os.close(home)
        wire = Wire(address=f"{_LAN}.{self._made + 1}", port=f"port{self._made}", namespace=there)
        _ip("link", "add", wire.port, "type", "veth", "peer", "name", "eth0")
        _ip("link", "set", "eth0", "netns", wire.path)
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{wire.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            _ip(*words, inside=wire)
        wire.mend()
        _ip("link", "set", wire.port, "up")
        return wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """From a node's namespace to the switch."""

    address: str
    port: str
    namespace: int
    """An open file that keeps it."""

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.namespace}"

    @property
    def prefix(self) -> Sequence[str]:
        """Makes a command run at its far end."""
        return ("nsenter", f"--net={self.path}")

    def cut(self) -> None:
        """As when a switch loses the port: both ends keep their carrier, and what they send goes nowhere."""
        _ip("link", "set", self.port, "nomaster")

    def mend(self) -> None:
        """Plug it in."""
        _ip("link", "set", self.port, "master", _SWITCH)

    def slow(self, rate: str) -> None:
        """`rate`, as tc writes it ("256kbit"), in each direction; packets wait for up to 400 ms and are then lost."""
        limit = ("root", "tbf", "rate", rate, "burst", "8kb", "latency", "400ms")
        _run("tc", "qdisc", "replace", "dev", self.port, *limit)
        _run(*self.prefix, "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def fast(self) -> None:
        """No limit any more."""
        _run("tc", "qdisc", "del", "dev", self.port, "root")
        _run(*self.prefix, "tc", "qdisc", "del", "dev", "eth0", "root")

    def remove(self) -> None:
        """The namespace ends with its last process, and with it the wire."""
        os.close(self.namespace)


class Node:
    """One Ray node."""

    def __init__(
        self,
        name: str,
        *arguments: str,
        address: str,
        out: Path,
        environment: Mapping[str, str],
        wire: Wire | None,
    ) -> None:
        self.name, self.wire, self._address = name, wire, address
        self._ray = str(Path(sys.executable).with_name("ray"))
        self._console, self._environment = out / "console" / f"node-{name}.txt", environment
        self._command = [
            *(wire.prefix if wire else ()),
            *(self._ray, "start", "--block"),
            *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"),
            # Nodes that share an address must not hand out the same ports.
            *("--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"),
            *arguments,
        ]
        self._run = self._start()

    def _start(self) -> Driven:
        self._console.unlink(missing_ok=True)
        return Driven(self._command, console=self._console, environment=self._environment)

    def ready(self, tries: int = 8, timeout_s: float = 180.0) -> None:
        """Waits for its raylet. Ray gives it 30 s, which a busy machine can exceed, so that is tried again.

        Raises:
            RuntimeError: none comes.
        """
        for left in reversed(range(tries)):
            driven.wait_for(lambda: _UP in self._run.text() or self._run.ended, timeout_s)
            if _UP in self._run.text() and not self._run.ended:
                return
            self._end()
            if not left or _TOO_SLOW not in self._run.text():
                break
            self._run = self._start()
        raise RuntimeError(f"the node {self.name} did not start: {self._run.text()[-800:]}")

    def processes(self) -> list[Process]:
        """All that live on it, its `ray start` first."""
        pid = self._run.process.pid
        return [p for p in driven.descendants() if p.pid == pid] + driven.descendants(pid)

    @property
    def raylet(self) -> Process | None:
        """Its main process, where it lives."""
        return next((p for p in self.processes() if p.role == "raylet"), None)

    @property
    def ended(self) -> bool:
        """Whether its `ray start` has."""
        return self._run.ended

    def drain(self, reason: str, deadline_s: int) -> None:
        """Tells the cluster that the node will leave, as the pods of `gagar infra render` do before they stop.

        Raises:
            RuntimeError: the cluster refuses.
        """
        raylet = self.raylet
        node_id = re.search(r"--node_id=(\w+)", raylet.command) if raylet else None
        command = [
            *(self._ray, "drain-node", "--address", self._address, "--node-id", node_id[1] if node_id else ""),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", reason),
            *("--deadline-remaining-seconds", str(deadline_s)),
        ]
        environment = {**os.environ, **self._environment}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"the node {self.name} cannot be drained: {done.stderr[-600:]}")

    def freeze(self) -> None:
        """Stops every process."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)

    def leave(self) -> None:
        """As a service manager asks it to."""
        self._run.signal(signal.SIGTERM)

    def kill(self) -> None:
        """As when its machine loses power."""
        self._end()
        if self.wire is not None:
            self.wire.remove()
            self.wire = None

    def _end(self) -> None:
        driven.end_all(self.processes())
        self._run.process.wait()
        self._run.clean()


class Cluster:
    """A head, and nodes that come and go."""

    def __init__(self, out: Path, *, labels: str = "", resources: Mapping[str, float] | None = None) -> None:
        """Starts the head with a token of its own. `out`: consoles go into its folder `console`."""
        self.network: Network | None = None
        self.no_network = ""
        """Why there are no namespaces."""
        try:
            self.network = Network()
        except (NetworkMissing, OSError) as error:
            self.no_network = str(error)
        self._out = out
        self._folder = Path(tempfile.mkdtemp(prefix="gn-", dir="/tmp"))  # of mode 0700
        (self._folder / "token").write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._folder / "token")}
        """Of everything that joins."""
        host = f"{_LAN}.1" if self.network else LOOPBACK
        port = free_port()
        self.address = f"{host}:{port}"
        head = ("--head", f"--port={port}", f"--node-ip-address={host}", f"--temp-dir={self._folder / 'r'}")
        head += ("--no-monitor", "--include-dashboard=false")  # they would only make its start longer
        self.nodes = [self._node("head", None, *head, *_offers(labels, resources))]

    def add(self, *, labels: str = "", resources: Mapping[str, float] | None = None) -> Node:
        """One more node, on its way; `Node.ready` waits for it."""
        wire = self.network.wire() if self.network else None
        where = (f"--address={self.address}", f"--node-ip-address={wire.address if wire else LOOPBACK}")
        node = self._node(str(len(self.nodes)), wire, *where, *_offers(labels, resources))
        self.nodes.append(node)
        return node

    def _node(self, name: str, wire: Wire | None, *arguments: str) -> Node:
        return Node(name, *arguments, address=self.address, out=self._out, environment=self.environment, wire=wire)

    def shutdown(self) -> None:
        """Ends all nodes; removes what they left."""
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _offers(labels: str, resources: Mapping[str, float] | None) -> list[str]:
    named = [f"--labels={labels}"] if labels else []
    return [*named, "--num-cpus=2", f"--resources={json.dumps(dict(resources or {}))}"]


def _namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _new_namespace() -> None:
    try:
        _call("unshare", _CLONE_NEWNET)
    except PermissionError as error:
        raise NetworkMissing("only root may make network namespaces (CAP_SYS_ADMIN)") from error


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _ip(*words: str, inside: Wire | None = None) -> None:
    _run(*(inside.prefix if inside else ()), "ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise NetworkMissing(f"{' '.join(command)}: {done.stderr.strip()}")
