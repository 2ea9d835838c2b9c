"""A pod of Kubernetes for each sandbox.

pod of the task's image, the server copied into it -> scheduled, pulled, running -> its server answers -> deleted

A pod has no token of a service account and no capabilities, asks for no more than it may use, and ends by itself after
`lifetime_s`. What a worker that is gone has left is deleted by the next one that starts: by its labels where it is of
an earlier session of the same run, by its annotation where it is of the same host.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from swerex.runtime.abstract import AbstractRuntime, IsAliveResponse
from swerex.runtime.remote import RemoteRuntime

from configs.schema import KubernetesSandbox
from envs.deployment import (
    PORT,
    SERVER,
    GuardedSandbox,
    Order,
    ServiceProvider,
    is_leftover,
    new_token,
    refused,
    server_command,
    worker_name,
)
from envs.kube_api import CALL_S, Api
from envs.rex import HttpRuntime, answering, quiet_logger
from infra.errors import BusyError, ImageError, SandboxError

KIND = "kubernetes"
SANDBOX, RUN, SESSION = "gagar.dev/sandbox", "gagar.dev/run", "gagar.dev/session"
"""Labels. A session is one start of a run's driver."""
WORKER, TASK = "gagar.dev/worker", "gagar.dev/task"
"""Annotations."""
PULL = "gagar.dev/pull"
"""Label of pods that have nothing but their images pulled."""
PAUSE = "registry.k8s.io/pause:3.10"
FIRST_LOOK_S, LAST_LOOK_S = 0.2, 3.0
_HOPELESS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")
_NEVER = ("ErrImageNeverPull", "InvalidImageName")


class KubernetesProvider(ServiceProvider):
    """Implements `SandboxProvider`; belongs to one event loop."""

    def __init__(self, config: KubernetesSandbox) -> None:
        super().__init__(config)
        self._config = config
        self._api = Api(config)
        self._first = asyncio.Lock()
        self._ready = False

    async def launch(self, order: Order) -> GuardedSandbox:
        """See `ServiceProvider.launch`."""
        async with self._first:
            if not self._ready:
                await self._refuse_open_network()
                await self._sweep()
                self._ready = True
        name, token = f"gagar-{secrets.token_hex(8)}", new_token()
        try:
            await self._api.call("POST", self._pods, body=pod(self._config, order, name, token))
            runtime = await self._reach(name, token, order)
        except BaseException:
            await asyncio.shield(self._delete(name))
            raise

        async def release(sandbox: GuardedSandbox) -> None:
            await self._delete(name)

        return GuardedSandbox(runtime, name=f"pod {name}", release=release)

    async def fetch(self, image: str) -> None:
        """See `ServiceProvider.fetch`: a daemon set for as long as it takes, on every node for sandboxes."""
        name, space = f"gagar-pull-{secrets.token_hex(8)}", self._config.namespace
        sets = f"/apis/apps/v1/namespaces/{space}/daemonsets"
        order = Order(image=image, cpus=None, memory_mib=None, disk_mib=None, label="")
        deadline, wait_s = time.monotonic() + self._config.start_timeout_s, FIRST_LOOK_S
        await self._api.call("POST", sets, body=puller(self._config, image, name))
        try:
            while True:
                status = (await self._api.call("GET", f"{sets}/{name}")).get("status", {})
                wanted, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
                if 0 < wanted <= ready:
                    return
                found = await self._api.call("GET", self._pods, query={"labelSelector": f"{PULL}={name}"})
                for item in found.get("items", ()):
                    await self._refuse_hopeless(item["metadata"]["name"], item.get("status", {}), order)
                if time.monotonic() > deadline:
                    raise BusyError(f"{image} is on {ready} of {wanted} nodes after start_timeout_s")
                await asyncio.sleep(wait_s)
                wait_s = min(1.5 * wait_s, LAST_LOOK_S)
        finally:
            await asyncio.shield(self._api.call("DELETE", f"{sets}/{name}", missing_ok=True))

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        await self._api.close()

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._config.namespace}/pods"

    async def _reach(self, name: str, token: str, order: Order) -> AbstractRuntime:
        """Wait for the pod, then for its server."""
        deadline, wait_s = time.monotonic() + self._config.start_timeout_s, FIRST_LOOK_S
        while (address := await self._address(name, order)) is None:
            if time.monotonic() > deadline:
                found = await self._api.call("GET", f"{self._pods}/{name}")
                raise BusyError(
                    f"pod {name} of {order.image} was not up within start_timeout_s = "
                    f"{self._config.start_timeout_s:g} s: {_waiting_for(found)}"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, LAST_LOOK_S)
        runtime: AbstractRuntime
        if self._config.reach == "pod":
            host = f"[{address}]" if ":" in address else address
            runtime = HttpRuntime(f"http://{host}:{PORT}", token)
        else:
            runtime = ProxiedRuntime(self._api, f"{self._pods}/{name}:{PORT}/proxy", token)

        async def alive() -> None:
            if await self._address(name, order) is None:
                raise refused(KIND, order.image, f"pod {name} stopped again")

        await answering(runtime, max(deadline - time.monotonic(), 1.0), alive)
        return runtime

    async def _address(self, name: str, order: Order) -> str | None:
        """The pod's address once it runs; None while it does not yet.

        Raises ImageError, SandboxError where it never will.
        """
        status = (await self._api.call("GET", f"{self._pods}/{name}")).get("status", {})
        await self._refuse_hopeless(name, status, order)
        address = status.get("podIP")
        return str(address) if status.get("phase") == "Running" and address else None

    async def _refuse_hopeless(self, name: str, status: Mapping[str, Any], order: Order) -> None:
        """Raises ImageError, SandboxError for a pod of this status that will never run."""
        containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
        for container in containers:
            state = container.get("state", {})
            waiting, ended = state.get("waiting", {}), state.get("terminated", {})
            reason, image = waiting.get("reason", ""), str(container.get("image") or order.image)
            text = f"{reason}: {waiting.get('message', '')}"
            if reason in _NEVER:
                raise ImageError(f"the image {image} cannot be had ({KIND}): {text}")
            if reason in _PULLING and isinstance(error := refused(KIND, image, text, pulling=True), ImageError):
                raise error
            if reason in _HOPELESS or ended.get("exitCode", 0) != 0:
                raise refused(KIND, image, f"{text if reason else ''}{await self._last_words(name, container, ended)}")
        if status.get("phase") in ("Failed", "Succeeded"):
            reason = status.get("reason") or "it ended"
            raise refused(KIND, order.image, f"pod {name}: {reason}: {status.get('message', '')}")

    async def _last_words(self, name: str, container: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
        query = {"container": str(container.get("name", "sandbox")), "tailLines": "20"}
        try:
            log = await self._api.text("GET", f"{self._pods}/{name}/log", query=query)
        except SandboxError as error:
            log = error.message
        return f"exit code {ended.get('exitCode')}: {ended.get('message') or log}"

    async def _delete(self, name: str) -> None:
        try:
            await self._api.call("DELETE", f"{self._pods}/{name}", body={"gracePeriodSeconds": 0}, missing_ok=True)
        except SandboxError as error:
            logging.getLogger(__name__).warning(
                "pod %s is left behind until its lifetime of %g s ends: %s", name, self._config.lifetime_s, error
            )

    async def _sweep(self) -> None:
        """Delete what workers that are gone have left."""
        labels = self._config.labels
        found = await self._api.call("GET", self._pods, query={"labelSelector": f"{SANDBOX}=true"})
        for item in found.get("items", ()):
            about = item["metadata"]
            theirs = about.get("labels", {})
            ours = RUN in labels and theirs.get(RUN) == labels[RUN]
            earlier = ours and SESSION in labels and theirs.get(SESSION) != labels[SESSION]
            ended = ours and item.get("status", {}).get("phase") in ("Failed", "Succeeded")
            if earlier or ended or is_leftover(about.get("annotations", {}).get(WORKER, "")):
                await self._delete(about["name"])

    async def _refuse_open_network(self) -> None:
        """Raises SandboxError where no policy keeps our pods from the network, unless the configuration allows it."""
        if self._config.allow_weaker:
            return
        space = self._config.namespace
        found = await self._api.call("GET", f"/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies")
        labels = pod_labels(self._config)
        if not any(_closes(policy["spec"], labels) for policy in found.get("items", ())):
            raise SandboxError(
                f"no NetworkPolicy of namespace {space} keeps pods with the label {SANDBOX}=true from the network; "
                "apply the one of docs/security.md, or accept it with allow_weaker: true beside type: kubernetes"
            )


class ProxiedRuntime(RemoteRuntime):
    """SWE-ReX's client through the API server, for workers outside of the pods' network."""

    def __init__(self, api: Api, path: str, token: str) -> None:
        super().__init__(logger=quiet_logger(), host="http://api", auth_token=token)
        self._api = api
        self._path = path

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """See `AbstractRuntime.is_alive`."""
        try:
            call = self._api.text("GET", f"{self._path}/is_alive", headers=self._headers, timeout_s=timeout or CALL_S)
            return IsAliveResponse(**json.loads(await call))
        except (SandboxError, ValueError) as error:
            return IsAliveResponse(is_alive=False, message=str(error))

    async def _request(self, endpoint: str, payload: BaseModel | None, output_class: Any, num_retries: int = 0) -> Any:
        body = payload.model_dump() if payload is not None else None
        path = f"{self._path}/{endpoint}"
        try:
            text = await self._api.text("POST", path, body=body, headers=self._headers, timeout_s=None)
        except SandboxError as error:
            raise ConnectionError(error.message) from error
        return output_class(**json.loads(text))


def pod(config: KubernetesSandbox, order: Order, name: str, token: str) -> dict[str, Any]:
    """The pod of one sandbox."""
    amounts = {
        "cpu": f"{order.cpus or config.cpus:g}",
        "memory": f"{order.memory_mib or config.memory_mib}Mi",
        "ephemeral-storage": f"{order.disk_mib or config.disk_mib}Mi",
    }
    closed = {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}}
    sandbox: dict[str, Any] = {
        "name": "sandbox",
        "image": order.image,
        "command": ["/bin/sh", "-c", server_command(config.server_image)],
        "env": [{"name": "GAGAR_TOKEN", "value": token}],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": closed,
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(config.lifetime_s),
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # else the environment names every service of the namespace
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [sandbox],
    }
    if config.server_image is not None:
        spec["volumes"] = [{"name": "server", "emptyDir": {"sizeLimit": "1Gi"}}]
        spec["initContainers"] = [
            {
                "name": "server",
                "image": config.server_image,
                "command": ["cp", "-a", f"{SERVER}/.", "/copy/"],
                "volumeMounts": [{"name": "server", "mountPath": "/copy"}],
                "resources": {"requests": amounts, "limits": amounts},
                "securityContext": closed,
            }
        ]
        sandbox["volumeMounts"] = [{"name": "server", "mountPath": SERVER, "readOnly": True}]
    if config.runtime_class is not None:
        spec["runtimeClassName"] = config.runtime_class
    _place(config, spec)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": config.namespace,
        "labels": pod_labels(config),
        "annotations": {WORKER: worker_name(), TASK: order.label},
    }
    if owner := _owner(config.namespace):
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def puller(config: KubernetesSandbox, image: str, name: str) -> dict[str, Any]:
    """The daemon set that has an image, and that of the server, on every node."""
    amounts = {"cpu": "10m", "memory": "32Mi"}
    common = {
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    images = [image] if config.server_image is None else [image, config.server_image]
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "initContainers": [
            {"name": f"image-{number}", "image": each, "command": ["/bin/sh", "-c", "exit 0"], **common}
            for number, each in enumerate(images)
        ],
        "containers": [{"name": "pause", "image": PAUSE, **common}],
    }
    _place(config, spec)
    labels = {"app.kubernetes.io/managed-by": "gagar", PULL: name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": config.namespace, "labels": labels},
        "spec": {"selector": {"matchLabels": {PULL: name}}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }


def _place(config: KubernetesSandbox, spec: dict[str, Any]) -> None:
    """Where pods run, and with which key to a registry."""
    if config.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": config.pull_secret}]
    if config.node_selector:
        spec["nodeSelector"] = dict(config.node_selector)


def pod_labels(config: KubernetesSandbox) -> dict[str, str]:
    """Of every pod."""
    return {"app.kubernetes.io/managed-by": "gagar", SANDBOX: "true", **config.labels}


def session_labels(run: str) -> dict[str, str]:
    """Of the pods of one start of a run's driver; a label takes at most 63 of only some characters."""
    value = re.sub(r"[^A-Za-z0-9._-]", "-", run)[:63].strip("._-") or "run"
    return {RUN: value, SESSION: secrets.token_hex(8)}


def _owner(namespace: str) -> dict[str, str] | None:
    """The worker's own pod, with which Kubernetes deletes ours; its manifest tells it by POD_NAME and POD_UID."""
    about = {key: os.environ.get(f"POD_{key.upper()}", "") for key in ("name", "uid", "namespace")}
    if not all(about.values()) or about["namespace"] != namespace:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": about["name"], "uid": about["uid"]}


def _closes(spec: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a policy selects pods of these labels and lets nothing out."""
    selector = spec.get("podSelector") or {}
    chosen = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return (
        chosen
        and not selector.get("matchExpressions")
        and "Egress" in spec.get("policyTypes", ())
        and not spec.get("egress")
    )


def _waiting_for(found: Mapping[str, Any]) -> str:
    status = found.get("status", {})
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message', '')}"
    states = [container.get("state", {}).get("waiting", {}) for container in status.get("containerStatuses", ())]
    words = [f"{state.get('reason')}: {state.get('message', '')}" for state in states if state]
    return "; ".join(words) or f"its phase is {status.get('phase', 'unknown')}"
