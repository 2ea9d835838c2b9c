"""Every deployment keeps the same contract: jail and remote servers as they are, the others against stand-ins of their
services.

The stand-ins (services/) refuse what the real ones would refuse: the command lines of docker and podman, objects that
are not as Kubernetes' schemas have them, and arguments that the recorded signatures of Modal's and Daytona's clients do
not take. Behind each of them is a real SWE-ReX server, so what a sandbox does is tested for real.
"""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import machine
import pytest
import pytest_asyncio

from configs.schema import (
    DaytonaSandbox,
    DockerSandbox,
    FargateSandbox,
    JailSandbox,
    KubernetesSandbox,
    ModalSandbox,
    RemoteSandbox,
    SandboxConfig,
)
from envs import deployment, workspace
from envs.jail import find_bwrap
from envs.remote import RemoteProvider
from envs.sandbox import CommandResult, Sandbox, SandboxProvider, ScriptedProvider, ScriptedSandbox, make_provider
from envs.task import ExactAnswer, Image, Needs, Split, Task, TaskKind
from envs.warm import WarmProvider
from infra.errors import BusyError, ImageError, SandboxError

SERVICES = Path(__file__).parent / "services"
pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN_ENV = "GAGAR_TEST_TOKEN"
HERE = ["jail", "remote"]
STARTED = ["docker", "podman", "modal", "daytona", "kubernetes", "kubernetes-api"]
BLOCKED = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "sandboxes"},
    "spec": {"podSelector": {"matchLabels": {"gagar.dev/sandbox": "true"}}, "policyTypes": ["Ingress", "Egress"]},
}


@dataclass
class Service:
    """What stands behind one kind of sandbox in these tests."""

    config: SandboxConfig
    living: Callable[[], int] = lambda: 0
    """Machines that run."""
    asked: Callable[[str], int] = lambda image: 0
    """How often a sandbox of an image, or the image, was asked for."""
    folder: Path | None = None


@pytest.fixture(scope="module")
def remote_server() -> Iterator[str]:
    """A plain SWE-ReX server on loopback, in a jail of its own so that its /workspace and /tmp are not the host's."""
    port = machine.free_port()
    server = "from swerex.server import main; main()"
    words = ["-c", server, "--host", "127.0.0.1", "--port", str(port), "--auth-token", "secret"]
    process = subprocess.Popen(
        [find_bwrap(), *machine.host_mounts(), "--unshare-pid", "--proc", "/proc", "--dev", "/dev", "--die-with-parent",
         "--tmpfs", "/tmp", "--tmpfs", "/workspace", "--ro-bind", sys.prefix, sys.prefix,  # may lie below /tmp
         "--setenv", "HIDDEN", "x", "--", sys.executable, *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(
    tmp_path_factory: pytest.TempPathFactory, remote_server: str
) -> AsyncIterator[Callable[[str], Service]]:
    """All of them by name."""
    patch = pytest.MonkeyPatch()
    patch.setattr(deployment, "FIRST_WAIT_S", 0.01)
    patch.setenv("HIDDEN", "a secret of the worker")
    patch.setenv(TOKEN_ENV, "secret")
    patch.setenv("DAYTONA_API_KEY", "daytona-key")
    patch.setenv("FAKE_SERVICE", str(tmp_path_factory.mktemp("service")))
    patch.setenv("FAKE_BWRAP", find_bwrap())
    patch.syspath_prepend(str(SERVICES))
    import cluster
    import daytona
    import modal

    programs, state = tmp_path_factory.mktemp("programs"), tmp_path_factory.mktemp("docker")
    for name in ("docker", "podman"):
        script = f'#!/bin/sh\nFAKE_DOCKER={state} exec {sys.executable} -I {SERVICES}/docker.py "$@"\n'
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    pods = cluster.Cluster(tmp_path_factory.mktemp("cluster"))
    pods.policies.append(BLOCKED)

    def containers() -> int:
        return len(list(state.glob("containers/*/facts.json")))

    def pulls(image: str) -> int:
        return (state / "pulls").read_text().split().count(image)

    def docker(runtime: str) -> Service:
        arguments = ("--memory=1g", "--pids-limit=256", "--network=closed")
        config = DockerSandbox.model_validate(
            {
                "type": "docker",
                "image": "base:1",
                "runtime": runtime,
                "docker_args": arguments,
                "server_image": "server:1",
                "lifetime_s": 900,  # where these tests are killed
            }
        )
        return Service(config, containers, pulls, state)

    def kubernetes(reach: str) -> Service:
        config = KubernetesSandbox.model_validate(
            {"type": "kubernetes", "image": "base:1", "namespace": "boxes", "reach": reach, "start_timeout_s": 120}
            | ({"server_image": "server:1"} if reach == "pod" else {})
        )
        return Service(
            config,
            lambda: len(pods.pods),
            lambda image: sum(pod["spec"]["containers"][0]["image"] == image for pod in pods.made),
        )

    makers: dict[str, Callable[[], Service]] = {
        "jail": lambda: Service(JailSandbox()),
        "remote": lambda: Service(
            RemoteSandbox(type="remote", hosts=(remote_server,), token_env=TOKEN_ENV, start_timeout_s=60)
        ),
        "docker": lambda: docker("docker"),
        "podman": lambda: docker("podman"),
        "modal": lambda: Service(
            ModalSandbox(type="modal", image="base:1"),
            lambda: sum(map(machine.runs, modal.GROUPS)),
            lambda image: sum(call["image"].name == image for call in modal.CREATED),
        ),
        "daytona": lambda: Service(
            DaytonaSandbox(type="daytona", image="base:1"),
            lambda: sum(map(machine.runs, daytona.GROUPS)),
            lambda image: sum(call["image"] == image for call in daytona.CREATED),
        ),
        "kubernetes": lambda: kubernetes("pod"),
        "kubernetes-api": lambda: kubernetes("api"),
    }
    async with pods.serving() as kubeconfig:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        yield lambda name: makers[name]()
    for name in ("modal", "daytona", "cluster", "recorded"):
        sys.modules.pop(name, None)
    patch.undo()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*HERE, *STARTED])
async def provider(
    request: pytest.FixtureRequest, services: Callable[[str], Service]
) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(services(request.param).config)
    yield provider
    await provider.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(provider: SandboxProvider) -> AsyncIterator[Sandbox]:
    sandbox = await provider.start()
    yield sandbox
    await sandbox.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(shared: Sandbox) -> Sandbox:
    """One for all tests of a kind, its workspace empty."""
    await shared.run("find /workspace -mindepth 1 -delete", timeout_s=20)
    return shared


def task(image: str | None = "base:1", **needs: float) -> Task:
    return Task(
        task_id="listed/train/0/7", source="listed", kind=TaskKind.CODE, split=Split.TRAIN, statement="", files={},
        verifier=ExactAnswer(answer=""), image=None if image is None else Image(name=image, folder="/testbed"),
        needs=Needs(**needs), meta={"record": "owner__repo-1"},
    )  # fmt: skip


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
    # What this one leaves in the background ends with it, too.
    assert (await sandbox.run("(sleep 0.5; touch later) & echo now", timeout_s=20)).output == "now\n"
    assert (await sandbox.run("sleep 1; ls", timeout_s=20)).output == ""


async def test_standard_input_is_empty_and_the_environment_holds_no_secrets(sandbox: Sandbox) -> None:
    assert (await sandbox.run("cat; echo $HIDDEN $HOME", timeout_s=20)).output == "/tmp\n"
    names = (await sandbox.run("env | cut -d= -f1 | sort", timeout_s=20)).output.split()
    assert not {"HIDDEN", "GAGAR_TOKEN", TOKEN_ENV, "DAYTONA_API_KEY", "KUBECONFIG"} & set(names)
    assert len(names) < 12


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


@pytest.mark.parametrize("kind", [*HERE, *STARTED])
async def test_a_sandbox_starts_empty_and_nothing_is_left_of_it(kind: str, services: Callable[[str], Service]) -> None:
    service = services(kind)
    provider, living = make_provider(service.config), service.living()
    first = await provider.start()
    await first.write_files({"x": "1"})
    await first.close()
    await first.close()
    with pytest.raises(SandboxError):
        await first.run("true", timeout_s=1)
    second = await provider.start()
    assert (await second.run("ls -A", timeout_s=20)).output == ""
    assert service.living() == living + (kind in STARTED)
    await second.close()
    await provider.close()
    assert service.living() == living


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


# ---- kinds that a service starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STARTED)
async def test_an_image_that_does_not_exist_names_its_task_and_is_asked_for_once(
    kind: str, services: Callable[[str], Service]
) -> None:
    service, image = services(kind), f"missing:{kind}"
    provider, living = make_provider(service.config), service.living()
    with pytest.raises(ImageError, match=f"^owner__repo-1: the image {image} cannot be had"):
        await workspace.start(provider, task(image))
    assert service.asked(image) == 1
    assert service.living() == living
    await provider.close()


@pytest.mark.parametrize("kind", STARTED)
async def test_a_service_without_room_is_asked_again(kind: str, services: Callable[[str], Service]) -> None:
    service, image = services(kind), f"busy:{kind}"
    provider, living = make_provider(service.config), service.living()
    sandbox = await provider.start(task(image))
    assert service.asked(image) == 3
    assert (await sandbox.run("echo up", timeout_s=20)).output == "up\n"
    await sandbox.close()
    assert service.living() == living
    await provider.close()


@pytest.mark.parametrize("kind", STARTED)
async def test_a_service_that_never_has_room_is_infrastructure(kind: str, services: Callable[[str], Service]) -> None:
    service, image = services(kind), f"never:{kind}"
    waits = {"start_timeout_s": 1.0} if kind.startswith("kubernetes") else {}  # the others say so themselves
    provider, living = make_provider(service.config.model_copy(update={"start_retries": 1, **waits})), service.living()
    with pytest.raises(BusyError) as caught:
        await provider.start(task(image))
    assert caught.value.boundary == "sandbox" and not isinstance(caught.value, ImageError)
    assert service.asked(image) == 2
    assert service.living() == living
    await provider.close()


@pytest.mark.parametrize("kind", [kind for kind in STARTED if kind != "daytona"])
async def test_a_server_that_ends_at_once_is_not_waited_for(kind: str, services: Callable[[str], Service]) -> None:
    service = services(kind)
    provider, living, began_s = make_provider(service.config), service.living(), time.monotonic()
    with pytest.raises(SandboxError) as caught:
        await provider.start(task("ends:1"))
    assert not isinstance(caught.value, BusyError | ImageError)
    assert time.monotonic() - began_s < 20
    assert service.living() == living
    await provider.close()


async def test_no_token_can_be_taken_for_an_option() -> None:
    tokens = {deployment.new_token() for _ in range(500)}  # one in 64 of other alphabets begins with "-"
    assert len(tokens) == 500 and all(token.isalnum() and len(token) >= 32 for token in tokens)


async def test_what_a_source_gives_its_tasks_reaches_containers_and_pods(services: Callable[[str], Service]) -> None:
    """The source's word goes before the image's, and that before the configuration's."""
    import modal

    asked = Image(name="base:1", folder="/testbed", memory_mib=300, cpus=3.0)
    wanted = deployment.order_of(services("docker").config, task(None, memory_mib=700))  # type: ignore[arg-type]
    assert (wanted.image, wanted.memory_mib, wanted.cpus, wanted.label) == ("base:1", 700, None, "owner__repo-1")
    given = Task(**{name: getattr(task(cpus=2.0), name) for name in Task.__slots__} | {"image": asked})
    for kind in ("docker", "modal", "kubernetes"):
        service = services(kind)
        provider = make_provider(service.config)
        sandbox = await provider.start(given)
        if kind == "docker":
            assert service.folder is not None
            (facts,) = [path.read_text() for path in service.folder.glob("containers/*/facts.json")]
            assert '"--memory=300m", "--cpus=2"' in facts
        if kind == "modal":
            assert (modal.CREATED[-1]["memory"], modal.CREATED[-1]["cpu"]) == ((300, 300), (2.0, 2.0))
            assert modal.CREATED[-1]["outbound_cidr_allowlist"] == []
        await sandbox.close()
        await provider.close()


async def test_jails_have_the_memory_and_disk_that_a_source_gives(tmp_path: Path) -> None:
    provider = make_provider(JailSandbox(memory_mib=256, workspace_mib=16))
    plain, large = await provider.start(), await provider.start(task(None, memory_mib=400, disk_mib=40))
    sizes = [(await box.run("ulimit -v; df -Pm . | tail -1", timeout_s=20)).output.split() for box in (plain, large)]
    assert [(int(words[0]), int(words[2])) for words in sizes] == [(256 * 1024, 16), (400 * 1024, 40)]
    for box in (plain, large):
        await box.close()
    again = await provider.start()
    assert (await again.run("ulimit -v", timeout_s=20)).output == f"{256 * 1024}\n"
    await again.close()
    await provider.close()


async def test_a_pod_is_closed_and_short_lived(services: Callable[[str], Service]) -> None:
    import kubernetes_validate

    from envs.pods import pod

    config = services("kubernetes").config
    assert isinstance(config, KubernetesSandbox)
    config = config.model_copy(
        update={
            "labels": {"team": "rl"}, "runtime_class": "gvisor", "pull_secret": "registry",
            "node_selector": {"pool": "boxes"}, "lifetime_s": 90.0,
        }
    )  # fmt: skip
    order = deployment.order_of(config, task("own:1", memory_mib=700, disk_mib=900))
    made = pod(config, order, "box", "secret")
    kubernetes_validate.validate(made, "1.34", strict=True)
    spec, (container,) = made["spec"], made["spec"]["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 90
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "700Mi", "ephemeral-storage": "900Mi"}
    assert made["metadata"]["labels"].items() >= {"team": "rl", "gagar.dev/sandbox": "true"}.items()
    assert made["metadata"]["annotations"]["gagar.dev/task"] == "owner__repo-1"
    assert "secret" not in str(container["command"])


async def test_a_pod_belongs_to_the_pod_of_its_worker(
    services: Callable[[str], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    from envs.pods import pod

    config = services("kubernetes").config
    assert isinstance(config, KubernetesSandbox)
    order = deployment.order_of(config, None)
    assert "ownerReferences" not in pod(config, order, "box", "t")["metadata"]
    for name, value in (("POD_NAME", "worker-0"), ("POD_UID", "u-1"), ("POD_NAMESPACE", "boxes")):
        monkeypatch.setenv(name, value)
    (owner,) = pod(config, order, "box", "t")["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "v1", "kind": "Pod", "name": "worker-0", "uid": "u-1"}
    monkeypatch.setenv("POD_NAMESPACE", "elsewhere")  # owners are of the same namespace
    assert "ownerReferences" not in pod(config, order, "box", "t")["metadata"]


async def test_pods_without_a_policy_that_closes_the_network_are_refused(
    services: Callable[[str], Service], tmp_path: Path
) -> None:
    import cluster

    open_ones = [
        {"spec": {"podSelector": {"matchLabels": {"other": "x"}}, "policyTypes": ["Egress"]}},
        {"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}},
        {"spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]}},
    ]
    pods = cluster.Cluster(tmp_path)
    pods.policies.extend(open_ones)
    config = KubernetesSandbox(type="kubernetes", image="base:1", namespace="boxes")
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(
            "KUBECONFIG", str(await stack.enter_async_context(pods.serving()))
        )
        provider = make_provider(config)
        with pytest.raises(SandboxError, match="no NetworkPolicy of namespace boxes"):
            await provider.start()
        assert pods.made == []
        pods.policies.append({"spec": {"podSelector": {}, "policyTypes": ["Egress"]}})
        await (await provider.start()).close()
        await provider.close()


async def test_the_policy_and_the_role_of_the_documentation_are_what_workers_ask_for() -> None:
    import kubernetes_validate
    import yaml

    from envs.pods import _closes, pod_labels

    page = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    policy, role = (yaml.safe_load(part.partition("```")[0]) for part in page.split("```yaml")[1:])
    for document in (policy, role):
        kubernetes_validate.validate(document, "1.34", strict=True)
    assert _closes(policy["spec"], pod_labels(KubernetesSandbox(type="kubernetes", image="base:1")))
    asked = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert asked == {
        *(("pods", verb) for verb in ("create", "get", "list", "delete")),
        *(("daemonsets", verb) for verb in ("create", "get", "delete")),
        ("pods/log", "get"), ("pods/proxy", "get"), ("pods/proxy", "create"), ("networkpolicies", "list"),
    }  # fmt: skip


async def test_leftovers_are_deleted_by_label_and_by_worker(services: Callable[[str], Service], tmp_path: Path) -> None:
    import cluster

    pods = cluster.Cluster(tmp_path)
    pods.policies.append(BLOCKED)

    def left(name: str, run: str, session: str, worker: str, phase: str = "Running") -> None:
        labels = {"gagar.dev/sandbox": "true", "gagar.dev/run": run, "gagar.dev/session": session}
        about = {"name": name, "labels": labels, "annotations": {"gagar.dev/worker": worker}}
        pods.pods[name] = {"metadata": about, "spec": {}, "status": {"phase": phase}}

    left("earlier", "mine", "0", "elsewhere.1")
    left("dead", "mine", "1", f"{platform.node()}.{2**22 + 1}")
    left("ended", "mine", "1", "elsewhere.2", "Failed")
    left("alive", "mine", "1", f"{platform.node()}.{os.getpid()}")
    left("elsewhere", "mine", "1", "elsewhere.3")
    left("another", "theirs", "9", "elsewhere.4")
    labels = {"gagar.dev/run": "mine", "gagar.dev/session": "1"}
    config = KubernetesSandbox(type="kubernetes", image="base:1", namespace="boxes", labels=labels)
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(
            "KUBECONFIG", str(await stack.enter_async_context(pods.serving()))
        )
        provider = make_provider(config)
        await (await provider.start()).close()
        await provider.close()
    assert set(pods.pods) == {"alive", "elsewhere", "another"}


async def test_images_are_pulled_to_all_nodes_before_anything_starts(
    services: Callable[[str], Service], tmp_path: Path
) -> None:
    import cluster

    pods = cluster.Cluster(tmp_path)
    config = KubernetesSandbox(
        type="kubernetes", image="base:1", namespace="boxes", server_image="server:1", node_selector={"pool": "boxes"}
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(
            "KUBECONFIG", str(await stack.enter_async_context(pods.serving()))
        )
        provider = make_provider(config)
        assert isinstance(provider, deployment.ServiceProvider)
        await provider.pull("there:1")
        with pytest.raises(ImageError, match="the image missing:1 cannot be had"):
            await provider.pull("missing:1")
        await provider.close()
    assert (pods.sets, pods.pods) == ({}, {})  # nothing is left of it
    service = services("docker")
    host = make_provider(service.config)
    assert isinstance(host, deployment.ServiceProvider)
    await host.pull("busy:pulled")
    assert service.asked("busy:pulled") == 3
    with pytest.raises(SandboxError, match="sandboxes of type modal have no place to pull"):
        await make_provider(ModalSandbox(type="modal", image="x")).pull("a:1")  # type: ignore[attr-defined]


async def test_containers_of_a_worker_that_is_gone_are_removed(services: Callable[[str], Service]) -> None:
    service = services("docker")
    first = make_provider(service.config)
    left = await first.start()
    assert service.folder is not None
    (facts,) = service.folder.glob("containers/*/facts.json")
    facts.write_text(facts.read_text().replace(f".{os.getpid()}", f".{2**22 + 1}"))
    await (await make_provider(service.config).start()).close()
    assert not facts.exists()
    with pytest.raises(SandboxError):
        await left.run("true", timeout_s=1)


async def test_a_command_may_take_longer_than_the_client_likes(
    services: Callable[[str], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp gives up after 300 s by itself, and tests of real repositories take longer."""
    provider = make_provider(services("remote").config)
    sandbox = await provider.start()
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    assert (await sandbox.run("sleep 0.8; echo done", timeout_s=20)).output == "done\n"
    monkeypatch.undo()
    await sandbox.close()


async def test_a_host_without_docker_is_a_sandbox_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="docker cannot be started"):
        await make_provider(DockerSandbox(type="docker", image="img", allow_weaker=True)).start()


@pytest.mark.parametrize("kind", ["modal", "daytona", "fargate"])
async def test_a_missing_package_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAYTONA_API_KEY", "k")
    for name in ("modal", "daytona", "boto3"):
        monkeypatch.setitem(sys.modules, name, None)
    classes = {"modal": ModalSandbox, "daytona": DaytonaSandbox, "fargate": FargateSandbox}
    more = {"allow_weaker": True} if kind == "fargate" else {}
    config = classes[kind].model_validate({"type": kind, "image": "img", **more})
    with pytest.raises(SandboxError, match=rf"gagar\[{kind}\]"):
        await make_provider(config).start()


# ---- sandboxes that are started ahead -------------------------------------------------------------------------------


def counted() -> tuple[ScriptedProvider, WarmProvider]:
    ok = CommandResult(output="", exit_code=0, timed_out=False, duration_s=0.0)
    provider = ScriptedProvider(lambda: ScriptedSandbox(lambda command: ok))
    return provider, WarmProvider(provider, 2)


async def settled(provider: ScriptedProvider, count: int) -> None:
    for _ in range(100):
        if len(provider.started) == count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{len(provider.started)} were started, not {count}")


async def test_spares_of_the_kind_last_asked_for_are_ready() -> None:
    inner, warm = counted()
    first = await warm.start(task("a:1"))
    await settled(inner, 3)  # it, and two spares
    second = await warm.start(task("a:1"))
    await settled(inner, 4)
    assert second is not first and second in inner.started[:3]
    other = await warm.start(task("b:1"))
    await settled(inner, 7)
    assert sum(box.closed for box in inner.started) == 2  # the spares of a:1 are given up
    assert other in inner.started[4:]
    await warm.close()
    assert [box for box in inner.started if not box.closed] == [first, second, other]


async def test_a_spare_that_was_lost_meanwhile_is_replaced() -> None:
    inner, warm = counted()
    await warm.start(task("a:1"))
    await settled(inner, 3)

    def gone(command: str) -> CommandResult:
        raise SandboxError("gone")

    for box in inner.started[1:]:
        box.respond = gone
    assert await warm.start(task("a:1")) not in inner.started[:3]
    await warm.close()


async def test_a_spare_of_other_needs_is_not_given_out() -> None:
    inner, warm = counted()
    await warm.start(task("a:1"))
    await settled(inner, 3)
    assert await warm.start(task("a:1", memory_mib=64)) not in inner.started[:3]
    await warm.close()


async def test_spares_come_from_configuration_alone(services: Callable[[str], Service]) -> None:
    config = services("docker").config
    assert not isinstance(make_provider(config), WarmProvider)
    assert isinstance(make_provider(config.model_copy(update={"warm": 1})), WarmProvider)
