"""Attempts to get out of the jail, or to take its host down, in the real one. docs/security.md lists them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from hostile import HONEST, LIMITS, TASK, honest, patch_by

from envs.jail import JailedSandbox, JailProvider
from envs.sandbox import CommandResult
from envs.workspace import prepare

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRETS = {
    "WANDB_API_KEY": "planted-wandb-5d1",
    "RAY_AUTH_TOKEN": "planted-ray-77c",
    "OPENAI_API_KEY": "planted-oai-19e",
}
MARK = "planted-mark-8842"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What there is to be had on the host."""

    folder: Path
    tcp_port: int
    udp: socket.socket
    tcp: socket.socket
    abstract: str
    victim: subprocess.Popen[bytes]


def refused(result: CommandResult, host: Host) -> None:
    assert "ESCAPED" not in result.output
    assert "HELD" in result.output, result.output


def killed_for_memory(result: CommandResult, host: Host) -> None:
    assert result.exit_code == 137
    assert "[killed: more than 160 MiB of memory in all]" in result.output
    assert "ESCAPED" not in result.output


def timed_out(result: CommandResult, host: Host) -> None:
    assert result.timed_out


def nothing_left(result: CommandResult, host: Host) -> None:
    for _ in range(100):
        if not processes_with(MARK):
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {processes_with(MARK)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    script: str
    """{folder}, {port}, ... are filled in; a shell command, or Python after "py:", whose errors count as refusals."""
    check: Callable[[CommandResult, Host], None] = refused
    timeout_s: float = 25.0
    also: tuple[Callable[[CommandResult, Host], None], ...] = field(default=())


def py(script: str, **more: object) -> Attempt:
    """Python lines that must raise OSError, ValueError or MemoryError before their end."""
    lines = "".join(f"    {line}\n" for line in script.strip("\n").splitlines())
    code = (
        "import ctypes, errno, mmap, os, resource, signal, socket, sys, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(number, *args):\n"
        "    if libc.syscall(number, *args) < 0:\n"
        "        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        f"try:\n{lines}    print('ESCAPED')\n"
        "except (OSError, ValueError, MemoryError) as error:\n    print('HELD', repr(error))\n"
    )
    return Attempt(script=f"python3 -c {shlex.quote(code)}", **more)  # type: ignore[arg-type]


def sh(script: str, check: Callable[[CommandResult, Host], None] = refused, **more: object) -> Attempt:
    return Attempt(script=script, check=check, **more)  # type: ignore[arg-type]


def unread(path: str) -> Attempt:
    return sh(f"if ls -A {path} 2>/dev/null | grep -q . || cat {path} 2>/dev/null | grep -q .; then echo ESCAPED; "
              "else echo HELD; fi")  # fmt: skip


def no_secret(result: CommandResult, host: Host) -> None:
    assert "PATH=" in result.output
    assert not [value for value in SECRETS.values() if value in result.output]
    assert "socket" not in result.output
    assert "WANDB" not in result.output


def no_datagram(result: CommandResult, host: Host) -> None:
    with pytest.raises(BlockingIOError):
        host.udp.recv(10)


def no_connection(result: CommandResult, host: Host) -> None:
    with pytest.raises(BlockingIOError):
        host.tcp.accept()


def victim_lives(result: CommandResult, host: Host) -> None:
    assert host.victim.poll() is None
    assert b"\nState:\tS" in Path(f"/proc/{host.victim.pid}/status").read_bytes()


def few_processes(result: CommandResult, host: Host) -> None:
    assert 0 < int(result.output.split()[-1]) <= 42


def little_output(result: CommandResult, host: Host) -> None:
    assert len(result.output) < 8_600_000
    assert "bytes cut]" in result.output


def cpu_limit(result: CommandResult, host: Host) -> None:
    assert result.exit_code in (137, 152)
    assert not result.timed_out


def no_space(result: CommandResult, host: Host) -> None:
    assert "No space left" in result.output
    assert int(result.output.split()[-1]) <= 24 * 1024


DAEMON = """
if os.fork() == 0:
    os.setsid()
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    if os.fork() == 0:
        os.setpgid(0, 0)
        for fd in (0, 1, 2): os.close(fd)
        {stop}
        os.execvp("bash", ["{mark}", "-c", "trap '' 1 2 3 15; while :; do sleep 1; done # {mark}"])
    os._exit(0)
os.wait()
"""
FILL = (
    "i=0; while head -c 4M /dev/zero 2>&1 > {where}/f$i; do i=$((i+1)); [ $i -lt 40 ] || break; done; "
    "du -sck /workspace /tmp /dev/shm | tail -n 1 | cut -f1"
)

ATTEMPTS = {
    # network
    "tcp": py("socket.create_connection(('127.0.0.1', {port}), 3)", also=(no_connection,)),
    "tcp_outside": py("socket.create_connection(('1.1.1.1', 80), 3)"),
    "udp": py("socket.socket(2, 2).sendto(b'out', ('127.0.0.1', {udp_port}))\nraise OSError('sent to itself')",
              also=(no_datagram,)),
    "udp_outside": py("socket.socket(2, 2).sendto(b'out', ('8.8.8.8', 53))"),
    "dns": py("socket.getaddrinfo('example.com', 80)"),
    "raw_socket": py("socket.socket(2, 3, 1)"),
    "packet_socket": py("socket.socket(17, 3, 0)"),
    "vsock": py("socket.socket(40, 1)"),
    "unix_path": py("socket.socket(1, 1).connect('{folder}/socket')"),
    "unix_abstract": py("socket.socket(1, 1).connect('\\0' + '{abstract}')"),
    "server_socket": sh("if find / -xdev -type s 2>/dev/null | grep . || tail -n +2 /proc/net/unix | grep .; "
                        "then echo ESCAPED; else echo HELD; fi"),
    # the host's files
    "home": unread("{home}/.bashrc {home}/.config {home}/.ssh {home}/.cache"),
    "run_folder": unread("{folder}"),
    "repository": unread("{repository}/envs"),
    "shadow": unread("/etc/shadow"),
    "host_tmp": sh("ls -A /tmp /var /run /srv /opt /mnt /sys 2>/dev/null | grep -v : | grep . && echo ESCAPED; "
                   "echo HELD"),
    "proc_root": sh("for p in /proc/[0-9]*; do ls $p/root{folder} $p/cwd/../../{folder} 2>/dev/null && echo ESCAPED; "
                    "done; echo HELD"),
    "link_out": sh("ln -s {folder}/secret link; cat link 2>/dev/null && echo ESCAPED; echo HELD"),
    "write_system": sh("for f in /usr/x /usr/bin/git /bin/sh /etc/passwd /etc/x /x /lib/x /dev/x {python}; do "
                       "{{ : >> $f; }} 2>/dev/null && echo ESCAPED $f; done; echo HELD"),
    # others' sandboxes, secrets
    "other_files": sh("grep -rl {mark} /workspace /tmp /dev/shm /lease 2>/dev/null && echo ESCAPED; echo HELD"),
    "other_processes": sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'slee[p] 599' && echo ESCAPED; echo HELD"),
    "hidden_tests": sh("cat $(find /workspace /tmp /dev/shm -type f) /proc/[0-9]*/cmdline 2>/dev/null | "
                       "grep -aq HiddenTes[t] && echo ESCAPED; "
                       "git cat-file --batch-all-objects --batch | grep -aq HiddenTes[t] && echo ESCAPED; "
                       "[ $(git rev-list --all --reflog | wc -l) = 1 ] && echo HELD"),
    "environment": sh("env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'", no_secret),
    "next_sandbox": sh("mkdir -p /tmp/a/b; echo {mark} | tee /tmp/left /dev/shm/left left /tmp/a/b/c; "
                       "chmod 000 /tmp/a; echo HELD"),
    # processes
    "kill_outside": py("signal.signal(15, signal.SIG_IGN)\n"
                       "found = 0\n"
                       "for pid in range(2, 40000):\n"
                       "    if pid != os.getpid():\n"
                       "        try: os.kill(pid, 19 if pid == {victim} else 9); found += 1\n"
                       "        except ProcessLookupError: pass\n"
                       "raise OSError(f'found {{found}}')", also=(victim_lives,)),
    "kill_all": sh("kill -9 -1; echo HELD", also=(victim_lives,)),
    "ptrace": py("pid = os.fork()\n"
                 "if pid == 0: time.sleep(9); os._exit(0)\n"
                 "if libc.ptrace(16, pid, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'ptrace')"),
    "other_memory": py("call(310, os.getppid(), 0, 0, 0, 0, 0)"),
    "daemon": py(DAEMON.replace("{stop}", "pass") + "raise OSError('started')", also=(nothing_left,)),
    "stopped_daemon": py(DAEMON.replace("{stop}", "os.kill(os.getpid(), 19)") + "raise OSError('started')",
                         also=(nothing_left,)),
    "nohup": sh("nohup setsid bash -c 'sleep 600 # {mark}' > /dev/null 2>&1 & disown -a; echo HELD",
                also=(nothing_left,)),
    "stop_itself": sh("kill -STOP $$; kill -STOP -1", timed_out, timeout_s=1.0, also=(nothing_left,)),
    "hold_output": sh("(trap '' HUP; exec -a {mark} sleep 600) & echo HELD", also=(nothing_left,)),
    # resources
    "fork_bomb": sh(
        "python3 -c 'import os, time\nn = 0\ntry:\n  while n < 400:\n    if os.fork() == 0: time.sleep(60)\n"
        "    n += 1\nexcept OSError: print(n)'", few_processes),
    "shell_fork_bomb": sh(":(){{ :|:& }}; :; sleep 60", timed_out, timeout_s=1.5),
    "memory": py("bytearray(1 << 30)"),
    "memory_many": sh("for i in 1 2 3 4; do python3 -c 'import time; x = bytearray(100 << 20); time.sleep(20)' & done; "
                      "wait; echo ESCAPED", killed_for_memory),
    "memory_forked": sh("python3 -c 'import os, time\nfor i in range(6): os.fork() or [bytearray(60 << 20), "
                        "x := bytearray(60 << 20), time.sleep(20)]\nos.wait()'; echo ESCAPED", killed_for_memory),
    "memory_shared": sh("for i in 1 2 3; do python3 -c 'import mmap, time\nm = mmap.mmap(-1, 100 << 20)\n"
                        "for at in range(0, 100 << 20, 1 << 20): m[at:at + (1 << 20)] = bytes(1 << 20)\n"
                        "m.madvise(mmap.MADV_DONTNEED); time.sleep(20)' & done; wait; echo ESCAPED", killed_for_memory),
    "memory_memfd": py("os.memfd_create('x')"),
    "memory_sysv": py("call(29, 0, 1 << 20, 0o1600)"),
    "memory_messages": py("call(68, 0, 0o1600)"),
    "memory_locked": py("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "processes_raised": py("resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))"),
    "descriptors": py("resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))"),
    "disk_workspace": sh(FILL.replace("{where}", "/workspace"), no_space),
    "disk_tmp": sh(FILL.replace("{where}", "/tmp"), no_space),
    "disk_shm": sh(FILL.replace("{where}", "/dev/shm"), no_space),
    "file_size": py("open('big', 'wb', 0).write(bytes(9 << 20)) == 9 << 20 or open('big', 'ab', 0).write(b'x')"),
    "sparse_file": py("os.truncate(os.open('big', os.O_CREAT | os.O_RDWR), 1 << 40)"),
    "inodes": py("for i in range(20000): open(f'/tmp/{{i}}', 'w').close()"),
    "output_flood": sh("head -c 40M /dev/zero | tr '\\0' x; echo", little_output),
    "cpu": sh("python3 -c 'while True: pass'", cpu_limit, timeout_s=60.0),
    "wall": sh("sleep 60", timed_out, timeout_s=0.5),
    "deep_tree": py("for i in range(1500): os.mkdir('d'); os.chdir('d')\nraise OSError('made')"),
    # the kernel
    "mount": py("if libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) < 0: raise OSError(ctypes.get_errno(), 'mount')"),
    "remount": sh("for m in / /usr; do mount -o remount,rw $m 2>/dev/null && echo ESCAPED; done; echo HELD"),
    "user_namespace": py("if libc.unshare(0x10000000) < 0: raise OSError(ctypes.get_errno(), 'unshare')"),
    "mount_namespace": py("if libc.unshare(0x00020000) < 0: raise OSError(ctypes.get_errno(), 'unshare')"),
    "enter_namespace": py("if libc.setns(os.open('/proc/1/ns/user', 0), 0) < 0: raise OSError(1, 'setns')"),
    "chroot": py("os.chroot('/tmp')"),
    "device_node": py("os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))"),
    "devices": sh("for d in /dev/mem /dev/kmem /dev/kmsg /dev/vda /dev/sda /dev/kvm /dev/fuse /dev/net/tun; do "
                  "[ -e $d ] && echo ESCAPED $d; done; echo HELD"),
    "setuid": py("os.setuid(0)"),
    "setuid_program": sh("cp /bin/bash b; chmod 6755 b; ./b -p -c 'id -u; id -ru' | grep -q '^0' && echo ESCAPED; "
                         "for s in su mount newgrp; do timeout 1 $s -c id root < /dev/null 2>/dev/null | "
                         "grep -q uid=0 && echo ESCAPED; done; echo HELD"),
    "keyring_add": py("call(248, b'user', b'x', b'y', 1, -3)"),
    "keyring_read": py("call(250, 0, -3, 1)"),
    "proc_sys": sh("for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sys/vm/drop_caches "
                   "/proc/sysrq-trigger /proc/sys/user/max_user_namespaces; do {{ echo 1 > $f; }} 2>/dev/null && "
                   "echo ESCAPED $f; done; echo HELD"),
    "oom_score": py("open('/proc/self/oom_score_adj', 'w', 1).write('-1000\\n')"),
    "cgroup": sh("find / -xdev -name cgroup.procs 2>/dev/null | grep . && echo ESCAPED; echo HELD"),
    "bpf": py("call(321, 0, 0, 0)"),
    "io_uring": py("call(425, 1, 0)"),
    "perf": py("call(298, 0, 0, -1, -1, 0)"),
    "other_abi": py("call(0x40000000 + 319, b'x', 0)"),
    "terminal": py("import fcntl\nfcntl.ioctl(0, 0x5412, b'x')"),
}  # fmt: skip


def processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                    found.append(entry.name)
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "secret").write_text("ESCAPED")
    os.environ.update(SECRETS)
    abstract = f"gagar-test-{os.getpid()}"
    victim = subprocess.Popen(["sleep", "3600"], **({"user": 65534} if os.geteuid() == 0 else {}))  # type: ignore[call-overload]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(*kind)) for kind in ((2, 1), (2, 2), (1, 1), (1, 1))]
        tcp, udp, path, hidden = sockets
        for server, address in zip(sockets, (("127.0.0.1", 0), ("127.0.0.1", 0), f"{folder}/socket", f"\0{abstract}"),
                                   strict=True):  # fmt: skip
            server.bind(address)
            server.setblocking(False)
        for server in (tcp, path, hidden):
            server.listen()
        yield Host(folder=folder, tcp_port=tcp.getsockname()[1], udp=udp, tcp=tcp, abstract=abstract, victim=victim)
    victim.kill()
    victim.wait()
    for name in SECRETS:
        os.environ.pop(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(host: Host) -> AsyncIterator[JailProvider]:
    provider = JailProvider(LIMITS)
    yield provider
    await provider.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(provider: JailProvider) -> AsyncIterator[JailedSandbox]:
    """Another rollout's sandbox, at work."""
    sandbox = await provider.start()
    await sandbox.run(f"echo {MARK} | tee secret /tmp/secret /dev/shm/secret", timeout_s=30)
    task = asyncio.create_task(sandbox.run("sleep 599", timeout_s=3000))
    yield sandbox
    task.cancel()
    await sandbox.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def solution(provider: JailProvider) -> str:
    return await patch_by(provider, "true", {"shop/core.py": HONEST})


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_escape(name: str, provider: JailProvider, other: JailedSandbox, host: Host, solution: str) -> None:
    attempt = ATTEMPTS[name]
    script = attempt.script.format(
        folder=host.folder, port=host.tcp_port, udp_port=host.udp.getsockname()[1], abstract=host.abstract, mark=MARK,
        home=Path.home(), repository=Path(__file__).resolve().parents[2], victim=host.victim.pid,
        python="/usr/bin/python3",
    )  # fmt: skip
    sandbox = await provider.start()
    await prepare(sandbox, TASK)
    result = await sandbox.run(script, timeout_s=attempt.timeout_s)
    attempt.check(result, host)
    for check in attempt.also:
        check(result, host)
    await sandbox.close()
    fresh = await provider.start()
    assert (await fresh.run("ls -A /workspace /tmp /dev/shm", timeout_s=30)).output == (
        "/dev/shm:\n\n/tmp:\n\n/workspace:\n"
    )
    await fresh.close()
    assert (await honest(provider, solution)).passed
    assert not other._lost


async def test_the_server_keeps_no_capability(provider: JailProvider, other: JailedSandbox) -> None:
    below = [other.server.pid]
    for pid in below:
        below += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    servers = [pid for pid in below if b"jail_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"--")[-1]]
    assert servers
    for pid in servers:
        if Path(f"/proc/{pid}/exe").resolve().name.startswith("python"):
            status = Path(f"/proc/{pid}/status").read_text()
            sets = [line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapPrm", "CapAmb"))]
            assert sets == ["0" * 16] * 3
