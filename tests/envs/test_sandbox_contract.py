"""Every kind of sandbox keeps the same contract; the kinds that can run here do so for real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from configs.schema import DockerSandbox, JailSandbox, ModalSandbox, RemoteSandbox
from envs.containers import DockerProvider
from envs.hosted import ModalProvider
from envs.remote import RemoteProvider
from envs.jail import JailProvider, find_bwrap
from envs.sandbox import Sandbox, SandboxProvider, make_provider
from infra.errors import SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN_ENV = "GAGAR_TEST_TOKEN"


def host_mounts() -> list[str]:
    words = []
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            words += ["--symlink", str(entry.readlink()), str(entry)]
        elif entry.name not in ("proc", "dev", "tmp", "workspace"):
            words += ["--ro-bind", str(entry), str(entry)]
    return words


@pytest.fixture(scope="module")
def remote_server() -> Iterator[str]:
    """A plain SWE-ReX server on loopback, in a jail of its own so that its /workspace and /tmp are not the host's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = "from swerex.server import main; main()"
    words = ["-c", server, "--host", "127.0.0.1", "--port", str(port), "--auth-token", "secret"]
    process = subprocess.Popen(
        [find_bwrap(), *host_mounts(), "--unshare-pid", "--proc", "/proc", "--dev", "/dev", "--die-with-parent",
         "--tmpfs", "/tmp", "--tmpfs", "/workspace", "--ro-bind", sys.prefix, sys.prefix,  # may lie below /tmp
         "--setenv", "HIDDEN", "x", "--", sys.executable, *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(200):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None, "the server ended"
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["jail", "remote"])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    if request.param == "jail":
        provider = make_provider(JailSandbox())
        assert isinstance(provider, JailProvider)
    else:
        os.environ[TOKEN_ENV] = "secret"
        address = request.getfixturevalue("remote_server")
        provider = make_provider(
            RemoteSandbox(type="remote", hosts=(address,), token_env=TOKEN_ENV, start_timeout_s=10)
        )
        assert isinstance(provider, RemoteProvider)
    yield provider
    await provider.close()
    os.environ.pop(TOKEN_ENV, None)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider: SandboxProvider) -> AsyncIterator[Sandbox]:
    sandbox = await provider.start()
    yield sandbox
    await sandbox.close()


async def test_output_and_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo out; echo err >&2; pwd; exit 3", timeout_s=20)
    assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\n/workspace\n", 3, False)
    assert 0 < result.duration_s < 20
    assert (await sandbox.run("kill -9 $$", timeout_s=20)).exit_code == 137


async def test_commands_share_files_but_no_shell_state(sandbox: Sandbox) -> None:
    await sandbox.run("mkdir d; cd d; x=1; echo 'a b' > 'c d'", timeout_s=20)
    assert (await sandbox.run("pwd; echo [$x]; cat 'd/c d'", timeout_s=20)).output == "/workspace\n[]\na b\n"


async def test_time_out_kills_descendants(sandbox: Sandbox) -> None:
    command = "(setsid bash -c 'sleep 1.2; touch /workspace/late' &) ; echo early; sleep 60"
    result = await sandbox.run(command, timeout_s=0.5)
    assert (result.output, result.exit_code, result.timed_out) == ("early\n", None, True)
    assert result.duration_s < 10
    assert (await sandbox.run("sleep 1.5; ls", timeout_s=20)).output == ""


async def test_what_a_command_leaves_in_the_background_ends_with_it(sandbox: Sandbox) -> None:
    assert (await sandbox.run("(sleep 1; touch late) & echo now", timeout_s=20)).output == "now\n"
    assert (await sandbox.run("sleep 1.3; ls", timeout_s=20)).output == ""


async def test_standard_input_is_empty_and_the_environment_small(sandbox: Sandbox) -> None:
    assert (await sandbox.run("cat; echo $HIDDEN $HOME", timeout_s=5)).output == "/tmp\n"


async def test_files_go_in_and_out_exactly(sandbox: Sandbox) -> None:
    files = {"a.txt": "x", "deep/er/b.py": "print('ü')\n\n", "empty": "", "quo'te $x\"": "\\ \t'EOF'\nEOF\n"}
    await sandbox.write_files(files)
    for path, content in files.items():
        assert await sandbox.read_file(path) == content
    assert await sandbox.read_file("none") is None
    assert await sandbox.read_file("deep") is None
    await sandbox.write_files({})


async def test_large_files(sandbox: Sandbox) -> None:
    content = "".join(f"{i}\n" for i in range(60_000))
    await sandbox.write_files({"large": content, "small": "s"})
    assert await sandbox.read_file("large") == content
    assert await sandbox.read_file("small") == "s"


async def test_files_replace_what_stands_in_their_way(sandbox: Sandbox) -> None:
    await sandbox.run(
        "mkdir -p f/x kept; echo 1 > kept/k; echo 2 > p; ln -s /tmp link; ln -s /etc/hosts l2", timeout_s=20
    )
    await sandbox.write_files({"f": "F", "p/q": "Q", "link/z": "Z", "l2": "L", "kept/new": "N"})
    assert (
        await sandbox.run("cat f p/q link/z l2 kept/k kept/new; test -L link || echo real", timeout_s=20)
    ).output == ("FQZL1\nNreal\n")


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "."])
async def test_paths_outside_the_workspace_are_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(ValueError, match="relative to the workspace"):
        await sandbox.write_files({path: "x"})


async def test_very_long_output_loses_its_middle(sandbox: Sandbox) -> None:
    result = await sandbox.run("echo first; head -c 9000000 /dev/zero | tr '\\0' x; echo; echo last", timeout_s=30)
    assert result.output.startswith("first\nxxx")
    assert result.output.endswith("xxx\nlast\n")
    assert "bytes cut]" in result.output
    assert len(result.output) < 8_600_000


async def test_output_that_is_no_text(sandbox: Sandbox) -> None:
    assert (await sandbox.run("printf 'a\\xffb'", timeout_s=20)).output == "a\\xffb"


async def test_a_sandbox_starts_empty(provider: SandboxProvider) -> None:
    first = await provider.start()
    await first.write_files({"x": "1"})
    await first.close()
    await first.close()
    with pytest.raises(SandboxError):
        await first.run("true", timeout_s=1)
    second = await provider.start()
    assert (await second.run("ls -A", timeout_s=20)).output == ""
    await second.close()


async def test_a_remote_server_serves_one_sandbox_at_a_time(
    remote_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "secret")
    config = RemoteSandbox(type="remote", hosts=(remote_server,), token_env=TOKEN_ENV, start_timeout_s=0.5)
    first = await RemoteProvider(config).start()
    with pytest.raises(SandboxError, match="all are taken"):
        await RemoteProvider(config).start()
    await first.close()
    await (await RemoteProvider(config).start()).close()


async def test_a_remote_server_that_refuses_or_is_not_there(
    remote_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    with pytest.raises(SandboxError, match=TOKEN_ENV):
        RemoteProvider(RemoteSandbox(type="remote", hosts=(remote_server,), token_env=TOKEN_ENV))
    monkeypatch.setenv(TOKEN_ENV, "wrong")
    for host in (remote_server, "http://127.0.0.1:9"):
        config = RemoteSandbox(type="remote", hosts=(host,), token_env=TOKEN_ENV, start_timeout_s=0.3)
        with pytest.raises(SandboxError, match="sandbox lost while"):
            await RemoteProvider(config).start()


async def test_docker_and_modal_come_from_configuration_alone() -> None:
    docker = make_provider(
        DockerSandbox(
            type="docker",
            image="img:1",
            runtime="podman",
            docker_args=("--memory=1g",),
            allow_weaker=True,
            start_timeout_s=5,
        )
    )
    assert isinstance(docker, DockerProvider)
    deployment = docker.deployment()
    assert type(deployment).__name__ == "DockerDeployment"
    settings = docker.settings
    assert (settings.image, settings.container_runtime, settings.startup_timeout) == ("img:1", "podman", 5)
    assert settings.docker_args == ["--memory=1g"]
    modal = make_provider(ModalSandbox(type="modal", image="img:2", start_timeout_s=7))
    assert isinstance(modal, ModalProvider)
    assert (modal.settings.image, modal.settings.startup_timeout) == ("img:2", 7)


async def test_a_host_without_docker_is_a_sandbox_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="docker"):
        await make_provider(DockerSandbox(type="docker", image="img", allow_weaker=True)).start()
