from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from configs.schema import JailSandbox
from envs.jail import JailedSandbox, JailProvider, UnixRuntime
from infra.errors import SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one provider, so that its servers serve many tests

FORKS = """
import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    print(n)
"""
REPOSITORY = Path(__file__).resolve().parents[2]
HIDDEN = (REPOSITORY / "envs", Path.home() / ".bashrc", Path("/etc/shadow"), Path("/var"), Path("/lease"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[JailProvider]:
    provider = JailProvider(JailSandbox(memory_mib=256, max_processes=40, file_size_mib=4, workspace_mib=16))
    yield provider
    await provider.close()


@pytest_asyncio.fixture(loop_scope="module")
async def jail(provider: JailProvider) -> AsyncIterator[JailedSandbox]:
    jail = await provider.start()
    yield jail
    await jail.close()


async def output(jail: JailedSandbox, command: str, timeout_s: float = 10.0) -> str:
    return (await jail.run(command, timeout_s=timeout_s)).output


def processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


async def gone(mark: str) -> bool:
    for _ in range(100):
        if not processes_with(mark):
            return True
        await asyncio.sleep(0.05)
    return False


async def ended(pid: int) -> bool:
    for _ in range(100):
        if not exists(f"/proc/{pid}"):
            return True
        await asyncio.sleep(0.05)
    return False


def exists(path: str) -> bool:
    return os.path.exists(path)


def server_processes(jail: JailedSandbox) -> list[int]:
    """Host pids of the jail's process tree, bubblewrap's own included."""
    found, todo = [], [jail.server.pid]
    while todo:
        found.append(pid := todo.pop())
        todo += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


def signal_server(jail: JailedSandbox, number: int) -> None:
    """Send a signal to the server itself: the innermost process of an idle jail."""
    os.kill(server_processes(jail)[-1], number)


async def test_there_is_no_network(jail: JailedSandbox) -> None:
    assert (await output(jail, "ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev | cut -d: -f1")).split() == [
        "lo"
    ]
    script = "import socket; socket.create_connection(('127.0.0.1', 1))"
    assert "Connection refused" in await output(jail, f'python3 -c "{script}"')
    assert "unreachable" in await output(
        jail, "python3 -c \"import socket; socket.create_connection(('10.0.0.1', 80))\""
    )


async def test_the_host_is_hidden_and_read_only(jail: JailedSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    for hidden in (tmp_path, *HIDDEN):
        assert (await jail.run(f"ls {hidden}", timeout_s=10)).exit_code != 0, hidden
    for path in ("/x", "/usr/x", "/usr/lib/x", "/etc/x", "/etc/passwd", "/proc/sys/kernel/hostname"):
        assert (await jail.run(f"echo x > {path}", timeout_s=10)).exit_code != 0, path
    assert (await jail.run("echo x > /workspace/x && echo x > /tmp/x && cat x /tmp/x", timeout_s=10)).output == "x\nx\n"


async def test_the_environment_is_cleared(jail: JailedSandbox) -> None:
    names = {line.partition("=")[0] for line in (await output(jail, "env")).splitlines()}
    assert names <= {"PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "PWD", "SHLVL", "_"}
    assert (await output(jail, "pwd; whoami; id -u; cat /proc/self/uid_map | tr -s ' '")).split()[:3] == [
        "/workspace",
        "user",
        "1000",
    ]


async def test_root_of_the_host_is_not_inside(jail: JailedSandbox) -> None:
    capabilities = await output(jail, "grep -hE '^Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status | cut -f2")
    assert set(capabilities.split()) == {"0" * 16}
    assert os.stat(f"/proc/{server_processes(jail)[-1]}").st_uid != 0


async def test_a_command_sees_only_its_own_processes_and_cannot_end_the_server(jail: JailedSandbox) -> None:
    listing = await output(jail, "for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline; echo; done")
    assert "jail_server" not in listing
    assert str(os.getpid()) not in (await output(jail, "ls /proc")).split()
    await jail.run("kill -9 -1; kill -9 1; sleep 0.1", timeout_s=10)
    await jail.run("python3 -c 'import os; os.kill(os.getppid(), 9)'", timeout_s=10)
    assert await output(jail, "echo alive") == "alive\n"


async def test_a_command_ends_with_everything_it_started(jail: JailedSandbox) -> None:
    daemon = "(setsid bash -c 'exec -a left-behind-{n} sleep 600' > /dev/null 2>&1 &) &"
    result = await jail.run(daemon.format(n=1) + " echo done", timeout_s=10)
    assert (result.output, result.exit_code) == ("done\n", 0)
    assert result.duration_s < 5
    assert await gone("left-behind-1")
    result = await jail.run("echo first; " + daemon.format(n=2) + " sleep 600", timeout_s=0.5)
    assert result.timed_out
    assert result.exit_code is None
    assert result.output == "first\n"
    assert await gone("left-behind-2")


async def test_a_process_that_holds_the_output_does_not_hold_the_command(jail: JailedSandbox) -> None:
    result = await jail.run("sleep 600 & echo done", timeout_s=20)
    assert result.output == "done\n"
    assert not result.timed_out


async def test_closing_ends_the_server_and_all_processes_while_a_command_runs(provider: JailProvider) -> None:
    jail = await provider.start()
    command = "(setsid bash -c 'exec -a cut-off-$PPID-mark sleep 600' &); exec -a cut-off-mark sleep 600"
    running = asyncio.create_task(jail.run(command, timeout_s=60))
    for _ in range(100):
        if processes_with("cut-off-mark"):
            break
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    pid = jail.server.pid
    await jail.close()
    assert await gone("cut-off-")
    assert not exists(f"/proc/{pid}")
    with pytest.raises(SandboxError):
        await jail.run("true", timeout_s=1)


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_new_sandbox_finds_nothing_of_the_last(reuse: bool) -> None:
    provider = JailProvider(JailSandbox(reuse_servers=reuse))
    first = await provider.start()
    await first.run(
        "mkdir -p a/b; echo x > a/b/c; ln -s /usr d; echo y > /tmp/z; chmod 000 a; mkdir -m 000 e", timeout_s=10
    )
    await first.run("chmod 000 /workspace", timeout_s=10)
    await first.close()
    second = await provider.start()
    assert (second.server.pid == first.server.pid) is reuse
    assert (await second.run("ls -A /workspace /tmp", timeout_s=10)).output == "/tmp:\n\n/workspace:\n"
    with pytest.raises(SandboxError, match="closed"):
        await first.run("true", timeout_s=1)
    await first.close()
    await second.close()
    await provider.close()


async def test_resources_are_limited(jail: JailedSandbox) -> None:
    assert "MemoryError" in await output(jail, "python3 -c 'x = bytearray(2**29)'")
    assert (await jail.run("head -c 5M /dev/zero > big", timeout_s=10)).exit_code != 0
    assert "No space left" in await output(jail, "for i in 1 2 3 4 5 6 7; do head -c 3M /dev/zero > f$i; done")
    await output(jail, "rm -f f*")
    await jail.write_files({"fork.py": FORKS})
    assert 0 < int(await output(jail, "python3 fork.py")) <= 42


async def test_a_lost_server_is_a_sandbox_error_on_every_call(provider: JailProvider) -> None:
    jail = await provider.start()
    signal_server(jail, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(SandboxError):
            await jail.run("true", timeout_s=5)
    with pytest.raises(SandboxError):
        await jail.write_files({"a": "b"})
    with pytest.raises(SandboxError):
        await jail.read_file("a")
    await jail.close()
    assert (await (await provider.start()).run("echo new", timeout_s=5)).output == "new\n"


async def test_a_hung_server_is_a_sandbox_error(provider: JailProvider) -> None:
    jail = await provider.start()
    jail._reply_margin_s = 0.2
    signal_server(jail, signal.SIGSTOP)
    with pytest.raises(SandboxError, match="TimeoutError"):
        await jail.run("true", timeout_s=0.1)
    below = server_processes(jail)
    assert len(below) >= 2
    await jail.close()
    for pid in below:
        assert await ended(pid)


async def test_several_start_at_once(provider: JailProvider) -> None:
    jails = await asyncio.gather(*(provider.start() for _ in range(4)))
    results = await asyncio.gather(*(jail.run(f"echo {i} > me; cat *", timeout_s=10) for i, jail in enumerate(jails)))
    assert [result.output for result in results] == ["0\n", "1\n", "2\n", "3\n"]
    await asyncio.gather(*(jail.close() for jail in jails))


async def test_a_jail_that_cannot_start_says_why() -> None:
    provider = JailProvider(JailSandbox(start_timeout_s=0.01))
    with pytest.raises(SandboxError, match="did not start"):
        await provider.start()


async def test_no_other_client_finds_the_server(jail: JailedSandbox) -> None:
    assert not exists(jail.server.runtime.address)
    assert not exists(os.path.dirname(jail.server.runtime.address))


async def test_the_server_wants_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.jail.UnixRuntime", lambda address, token: UnixRuntime(address, "guess"))
    with pytest.raises(SandboxError, match="Invalid API Key"):
        await JailProvider(JailSandbox()).start()


async def test_jails_work_under_uvloop() -> None:
    """Ray's asynchronous actors run on it."""
    uvloop = pytest.importorskip("uvloop")

    async def visit() -> str:
        provider = JailProvider(JailSandbox())
        jail = await provider.start()
        printed = await output(jail, "echo hello")
        await jail.close()
        await provider.close()
        return printed

    assert await asyncio.to_thread(uvloop.run, visit()) == "hello\n"


async def test_folders_of_jails_whose_worker_was_killed_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new, other = (tmp_path / name for name in ("gagar-jail-old", "gagar-jail-new", "other"))
    for folder in (old, new, other):
        folder.mkdir()
    for folder in (old, other):
        os.utime(folder, (1.0, 1.0))
    JailProvider(JailSandbox())
    assert not old.exists()
    assert new.exists()
    assert other.exists()
