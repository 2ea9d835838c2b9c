"""What `gagar infra render` writes is taken by the programs that it is for, and runs the configuration it came from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from configs.check import find_problems, load_run
from configs.errors import ConfigError
from configs.load import load
from configs.schema import Resources, RunConfig
from infra.nodes import Demand, NodeSize, NodeType, demands, dns_label, node_types
from infra.render import Choices, Target, render, store_bytes
from orchestrator.cli_infra import command_line, parse_hosts

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
KUBERNETES = "1.34"
COMMAND = "gagar infra render mine.yaml --target x"
CLUSTER = ("engine.model=/models/policy", "learner.model=/models/policy")
LABELLED = (
    *CLUSTER,
    "engine.resources={gpus: 2, cpus: 4, labels: {pool: gpus}}",
    "learner.resources={gpus: 1, cpus: 4, labels: {pool: 'in(gpus,spare)'}}",
    "rollout.resources={cpus: 8, custom: {rollout_node: 1}, labels: {pool: sandboxes}}",
    "grader.resources={cpus: 1, labels: {pool: graders, zone: '!b'}}",
)


def cluster(*overrides: str) -> RunConfig:
    return load(RunConfig, ROOT / "configs" / "cluster.yaml", [*CLUSTER, *overrides]).config


def quickstart(*overrides: str) -> RunConfig:
    return load_run(ROOT / "configs" / "quickstart.yaml", ["output=/shared/runs", *overrides]).config


def files(config: RunConfig, target: Target, **choices: Any) -> dict[str, str]:
    return render(config, target, Choices(command=COMMAND, size=NodeSize(), **choices))


def objects(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def of_kind(text: str, kind: str) -> dict[str, Any]:
    (found,) = (document for document in objects(text) if document["kind"] == kind)
    return found


def containers(spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod spec, container) of a RayCluster's spec."""
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            yield group["template"]["spec"], container


# ---- the fields of KubeRay v1.6.2 (ray.io/v1) that we write; pod templates are checked as Kubernetes' own -----------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AuthOptions(Strict):
    mode: Literal["disabled", "token"]
    secretName: str


class HeadGroup(Strict):
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(Strict):
    groupName: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int = Field(ge=0)
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class ClusterSpec(Strict):
    rayVersion: str
    authOptions: AuthOptions
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class JobSpec(Strict):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
    backoffLimit: int = Field(ge=0)
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: int = Field(ge=0)
    submitterPodTemplate: dict[str, Any]
    rayClusterSpec: ClusterSpec


def check_kubernetes(text: str) -> None:
    """Every object, and every pod template inside KubeRay's."""
    for document in objects(text):
        if document["apiVersion"] != "ray.io/v1":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
            continue
        spec = document["spec"]
        cluster_spec = spec.get("rayClusterSpec", spec)
        if document["kind"] == "RayJob":
            JobSpec.model_validate(spec)
        else:
            ClusterSpec.model_validate(spec)
        templates = [cluster_spec["headGroupSpec"]["template"]]
        templates += [group["template"] for group in cluster_spec["workerGroupSpecs"]]
        templates += [spec["submitterPodTemplate"]] if "submitterPodTemplate" in spec else []
        for number, template in enumerate(templates):
            pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": f"pod-{number}"}}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)


# ---- node types -----------------------------------------------------------------------------------------------------


def test_pools_are_packed_into_as_few_nodes_as_hold_them() -> None:
    # 24 engines x 2 GPUs + 16 ranks x 1 GPU = 64 GPUs = 8 nodes of 8; 4 CPUs an actor let a node of 32 hold 8 of them.
    # 32 workers x 8 CPUs = 4 a node of 32 = 8 nodes; 4 graders x 1 CPU are one more.
    gpu, cpu = node_types(demands(cluster()), NodeSize(cpus=32, gpus=8, memory_gib=128))
    assert (gpu.name, gpu.count, gpu.gpus, gpu.pools) == ("gpu", 8, 8, ("engine", "learner"))
    assert (cpu.name, cpu.count, cpu.cpus, cpu.gpus) == ("cpu", 9, 32, 0)
    assert cpu.jails and not gpu.jails
    assert cpu.variables == ("GRADER_API_KEY",) and gpu.variables == ()


def test_nodes_carry_labels_and_resources_that_the_selectors_ask_for() -> None:
    config = load(RunConfig, ROOT / "configs" / "cluster.yaml", LABELLED).config
    types = {node.name: node for node in node_types(demands(config), NodeSize())}
    assert {name: dict(node.labels) for name, node in types.items()} == {
        "gpus": {"pool": "gpus"},  # of in(gpus,spare) the first, so it shares nodes with pool: gpus
        "sandboxes": {"pool": "sandboxes"},
        "graders": {"pool": "graders"},  # a node without the label zone is none in zone b
    }
    assert types["gpus"].pools == ("engine", "learner")
    assert types["sandboxes"].custom == {"rollout_node": 4}, "32 CPUs hold 4 workers of 8"
    assert (types["graders"].cpus, types["graders"].count) == (4, 1), "no larger than what its pools take"


def test_a_pool_that_may_grow_is_given_room_for_its_largest_size() -> None:
    config = cluster("scaling.rollout={min: 4, max: 64}")
    assert next(d for d in demands(config) if d.pool == "rollout").count == 64


def node(placement: str, count: int = 4) -> NodeType:
    wanted = Demand(pool="learner", count=count, resources=Resources(cpus=1), gpus=1, placement=placement)
    (found,) = node_types([wanted], NodeSize(cpus=32, gpus=8, memory_gib=128))
    return found


def test_ranks_share_nodes_as_placement_says() -> None:
    assert (node("PACK").count, node("PACK").gpus) == (1, 4)
    assert (node("STRICT_PACK").count, node("STRICT_PACK").gpus) == (1, 4)
    assert (node("STRICT_SPREAD").count, node("STRICT_SPREAD").gpus) == (4, 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("engine.resources={gpus: 16}",), r"engine\.resources: one actor need .* 16 GPUs.*--gpus"),
        (("learner.placement=STRICT_PACK",), r"learner\.resources: 16 ranks on one node .*STRICT_PACK.*--cpus"),
        (("rollout.resources={}",), r"rollout\.resources=\{\}: .*set e\.g\. rollout\.resources\.cpus"),
        (("output=runs",), r"output=runs: is a folder of one host.*output=/shared/runs"),
        (("output=my/runs",), r"output=my/runs: is a folder of one host"),
        (("output=/tmp/runs",), r"output=/tmp/runs: is a folder of one host"),
        (("learner.model=/home/me/policy",), r"learner\.model=/home/me/policy: .*learner\.model=/shared/models"),
    ],
)
def test_what_cannot_run_on_several_machines_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        files(cluster(*overrides), Target.KUBERAY)


def test_names_are_those_that_kubernetes_takes() -> None:
    assert dns_label("My_Run.v2") == "my-run-v2"
    assert dns_label("2026-run") == "n-2026-run"
    assert dns_label("..") == ""


# ---- every target ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", list(Target))
def test_every_file_begins_with_the_command_and_holds_no_secret(target: Target) -> None:
    config = cluster("ray.address=null") if target is Target.DOCKER else cluster()
    hosts = {
        "head": ("10.0.0.1",),
        "gpu": tuple(f"10.0.1.{i}" for i in range(8)),
        "cpu": tuple(f"10.0.2.{i}" for i in range(9)),
    }
    written = files(config, target, hosts=hosts)
    for file, text in written.items():
        first = next(line for line in text.splitlines() if not line.startswith("#!"))
        assert first == f"# Rendered by: {COMMAND}", file
        assert "auth_token:" not in text and "0.0.0.0" not in text, file
    assert any("RAY_AUTH_MODE" in text or "authOptions: {mode: token" in text for text in written.values()) or (
        target is Target.DOCKER  # the run's own Ray, which makes its own token
    )
    assert "--resume" in "".join(written.values())


@pytest.mark.parametrize("target", [Target.KUBERAY, Target.RAYJOB])
@pytest.mark.parametrize("overrides", [(), LABELLED], ids=["plain", "labelled"])
def test_kubernetes_and_kuberay_take_the_manifests(target: Target, overrides: tuple[str, ...]) -> None:
    for text in files(cluster(*overrides), target).values():
        check_kubernetes(text)


def test_the_check_of_manifests_sees_a_wrong_field() -> None:
    text = files(cluster(), Target.KUBERAY)["kuberay.yaml"]
    with pytest.raises(kubernetes_validate.ValidationError):
        check_kubernetes(text.replace("automountServiceAccountToken", "autoMountServiceAccountToken"))
    with pytest.raises(ValueError, match="minReplica"):
        check_kubernetes(text.replace("minReplicas", "minReplica"))


def test_the_cluster_is_that_of_the_configuration() -> None:
    text = files(cluster(*LABELLED), Target.KUBERAY)["kuberay.yaml"]
    spec = of_kind(text, "RayCluster")["spec"]
    groups = {g["groupName"]: g for g in spec["workerGroupSpecs"]}
    assert {name: g["replicas"] for name, g in groups.items()} == {"gpus": 8, "sandboxes": 8, "graders": 1}
    assert groups["gpus"]["rayStartParams"]["labels"] == "pool=gpus"
    assert groups["sandboxes"]["rayStartParams"]["resources"] == "'{\"rollout_node\": 4.0}'"
    (engine,) = groups["gpus"]["template"]["spec"]["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no actor lands on the head"
    assert spec["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
    for pod, container in containers(spec):
        assert {"livenessProbe", "readinessProbe", "lifecycle"} <= set(container)
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"]
        paths = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
        assert paths == {"/dev/shm": False, "/etc/gagar": True, "/models": True, "/shared": False}
        (shm,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm")
        memory_gib = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
        assert shm["medium"] == "Memory"
        assert store_bytes(memory_gib) < int(shm["sizeLimit"].removesuffix("Gi")) * 2**30 < memory_gib * 2**30
    of_group = {name: g["template"]["spec"]["containers"][0] for name, g in groups.items()}
    relaxed = {name: c["securityContext"].get("procMount") for name, c in of_group.items()}
    assert relaxed == {"gpus": None, "sandboxes": "Unmasked", "graders": "Unmasked"}, "only where sandboxes are"
    keys = {name: [e["name"] for e in c.get("env", [])] for name, c in of_group.items()}
    assert keys == {"gpus": [], "sandboxes": [], "graders": ["GRADER_API_KEY"]}, "a key is where it is used"


def test_the_driver_goes_on_after_failures_but_not_with_a_wrong_configuration() -> None:
    text = files(cluster(), Target.KUBERAY, restarts=3)["kuberay.yaml"]
    job = of_kind(text, "Job")["spec"]
    assert job["backoffLimit"] == 3 and job["template"]["spec"]["restartPolicy"] == "Never"
    codes = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert codes == [{"containerName": "driver", "operator": "In", "values": [2]}]
    (driver,) = job["template"]["spec"]["containers"]
    variables = {e["name"]: e.get("valueFrom", {}).get("secretKeyRef") for e in driver["env"]}
    assert variables["RAY_AUTH_TOKEN"] == {"name": "cluster-ray", "key": "auth_token"}
    assert variables["WANDB_API_KEY"] == {"name": "cluster-keys", "key": "WANDB_API_KEY", "optional": True}
    rules = of_kind(text, "NetworkPolicy")["spec"]
    assert rules["ingress"] == [{"from": [{"podSelector": {"matchLabels": {"gagar/run": "cluster"}}}]}]
    assert job["template"]["metadata"]["labels"]["gagar/run"] == "cluster"


def test_the_rendered_configuration_is_the_one_that_was_given(tmp_path: Path) -> None:
    config = quickstart(
        *(f"{pool}.resources.cpus=1" for pool in ("engine", "rollout", "grader", "learner", "grader.backend.engine"))
    )
    text = of_kind(files(config, Target.RAYJOB)["rayjob.yaml"], "ConfigMap")["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(text)
    again = load(RunConfig, tmp_path / "config.yaml").config
    assert again.engine.model == "/opt/gagar/configs/checkpoints/policy", "shipped checkpoints are part of the image"
    assert again.ray.address == "auto"
    back = again.model_copy(
        update={
            "engine": config.engine,
            "learner": config.learner,
            "grader": config.grader,
            "ray": config.ray,
        }
    )
    assert back == config
    assert [p.message for p in find_problems(again) if "no such folder" not in p.message] == []


@pytest.mark.parametrize("target", [Target.KUBERAY, Target.RAYJOB])
def test_only_workers_whose_sandboxes_are_pods_have_a_token(target: Target) -> None:
    config = cluster("rollout.sandbox={type: kubernetes, image: 'a:1', lifetime_s: 90000}")
    text = files(config, target)[f"{target.value}.yaml"]
    check_kubernetes(text)
    spec = of_kind(text, "RayCluster" if target is Target.KUBERAY else "RayJob")["spec"]
    told = {
        container["name"] + str(index): (
            pod.get("serviceAccountName"),
            pod["automountServiceAccountToken"],
            {entry["name"] for entry in container.get("env", ()) if "fieldRef" in entry.get("valueFrom", {})},
        )
        for index, (pod, container) in enumerate(containers(spec.get("rayClusterSpec", spec)))
    }
    with_token = [about for about in told.values() if about[1]]
    assert with_token == [("gagar-sandboxes", True, {"POD_NAME", "POD_UID", "POD_NAMESPACE"})]
    assert all(about == (None, False, set()) for about in told.values() if not about[1])


# ---- shells, Dockerfiles, Ray's own check ----------------------------------------------------------------------------


def checked(program: str, *arguments: str) -> None:
    done = subprocess.run([str(BIN / program), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", [Target.SLURM, Target.DOCKER, Target.RAY])
def test_shells_take_the_scripts(target: Target, tmp_path: Path) -> None:
    config = cluster(*LABELLED, *(("ray.address=null",) if target is Target.DOCKER else ()))
    hosts = {
        "head": ("10.0.0.1",),
        "gpus": tuple(f"10.0.1.{i}" for i in range(8)),
        "sandboxes": tuple(f"10.0.2.{i}" for i in range(8)),
        "graders": ("10.0.3.1",),
    }
    scripts = []
    for file, text in files(config, target, hosts=hosts).items():
        (tmp_path / file).write_text(text)
        if text.startswith("#!"):
            scripts.append(str(tmp_path / file))
    assert scripts
    checked("shellcheck", "--severity=style", *scripts)


def test_slurm_asks_for_each_kind_of_node() -> None:
    text = files(cluster(*LABELLED), Target.SLURM, restarts=2)["job.sbatch"]
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert [a for a in asked if a.startswith("--nodes")] == ["--nodes=8", "--nodes=8", "--nodes=1"]
    assert asked.count("hetjob") == 2 and "--gpus-per-node=8" in asked and "--requeue" in asked
    assert "--labels=pool=gpus" in text and '"${SLURM_RESTART_COUNT:-0}" -lt 2' in text
    assert asked.index("--gpus-per-node=8") < asked.index("hetjob"), "options stand in their own component"


STUBS = {
    "ray": "exit 0",
    "srun": "exit 0",
    "scontrol": 'echo "scontrol $*" >>"$CALLS"',
    "gagar": 'echo "gagar $*" >>"$CALLS"; trap "exit 1" TERM; if [ "$CODE" = wait ]; then touch "$CALLS.up"; '
    "while :; do sleep 0.1; done; fi; exit $CODE",
}


def slurm(folder: Path, code: str, restarts: str = "0") -> tuple[subprocess.Popen[bytes], Path]:
    """The job's script with stand-ins for the programs of a cluster; what they were told is in the file."""
    folder.mkdir()
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    text = files(cluster(), Target.SLURM, restarts=2)["job.sbatch"].replace("/shared", str(folder / "shared"))
    (folder / "job.sbatch").write_text(text)
    calls = folder / "calls"
    calls.touch()
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "CODE": code,
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": restarts,
    }
    return subprocess.Popen(["bash", str(folder / "job.sbatch")], env=environment, stdout=subprocess.DEVNULL), calls


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [("0", "0", False), ("1", "0", True), ("3", "1", True), ("2", "0", False)]
)
def test_slurm_goes_on_after_failures_only(tmp_path: Path, code: str, restarts: str, requeued: bool) -> None:
    job, calls = slurm(tmp_path / "a", code, restarts)
    assert job.wait(60) == int(code)
    config = tmp_path / "a" / "config.yaml"
    assert calls.read_text().splitlines() == [f"gagar train {config}", *(["scontrol requeue 7"] if requeued else [])]
    assert list((tmp_path / "a" / "shared" / ".gagar").iterdir()) == [], "the token goes with the job"


def test_slurm_gives_up_in_the_end(tmp_path: Path) -> None:
    job, calls = slurm(tmp_path / "a", "1", "2")
    assert job.wait(60) == 1 and "scontrol" not in calls.read_text()


def test_slurm_passes_the_end_of_its_time_on(tmp_path: Path) -> None:
    job, calls = slurm(tmp_path / "a", "wait")
    deadline_s = time.monotonic() + 60.0
    while not calls.with_name("calls.up").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 1, "the driver's own code"
    train, requeue = calls.read_text().splitlines()
    assert requeue == "scontrol requeue 7"
    assert train.startswith("gagar train")


def test_the_start_goes_on_where_a_run_has_begun(tmp_path: Path) -> None:
    script = files(cluster(), Target.RAYJOB)["rayjob.yaml"]
    text = of_kind(script, "ConfigMap")["data"]["run.sh"].replace("/shared/runs", str(tmp_path))
    (tmp_path / "gagar").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "gagar").chmod(0o755)

    def told() -> str:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    assert told() == "train /etc/gagar/config.yaml"
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "config.yaml").touch()
    assert told() == "train /etc/gagar/config.yaml --resume"


def test_ray_takes_its_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    hosts = {"head": ("10.0.0.1",), "gpu": tuple(f"10.0.1.{i}" for i in range(8))}
    hosts["cpu"] = tuple(f"10.0.2.{i}" for i in range(9))
    written = files(cluster(), Target.RAY, hosts=hosts)
    prepared = prepare_config(yaml.safe_load(written["ray-cluster.yaml"]))
    validate_config(prepared)
    assert len(prepared["provider"]["worker_ips"]) == 17
    assert "10.0.1.0 | 10.0.1.1" in written["start.sh"]
    with pytest.raises(ConfigError, match=r"--host cpu=.*9 addresses are needed and 0 are given"):
        files(cluster(), Target.RAY, hosts={k: v for k, v in hosts.items() if k != "cpu"})
    with pytest.raises(ConfigError, match=r"--host x=.*no such node type; there are head, gpu, cpu"):
        files(cluster(), Target.RAY, hosts={**hosts, "x": ("a",)})


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda", "Dockerfile.server"])
def test_the_dockerfiles_keep_the_rules(name: str) -> None:
    checked("hadolint", str(ROOT / "infra" / "docker" / name))


def test_the_command_line_is_kept_without_keys() -> None:
    assert command_line(["infra", "render", "a b.yaml"]) == "gagar infra render 'a b.yaml'"
    assert "sk-abcdefgh" not in command_line(["infra", "render", "x", "grader.backend.model=sk-abcdefgh"])
    assert parse_hosts(["gpu=a,b", "gpu=c", "head=h"]) == {"gpu": ("a", "b", "c"), "head": ("h",)}
    with pytest.raises(ConfigError, match="TYPE=ADDRESS"):
        parse_hosts(["gpu"])
