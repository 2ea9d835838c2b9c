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

import aiohttp
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
    needs_package,
    refused,
    server_command,
    worker_name,
)
from envs.rex import HttpRuntime, answering, quiet_logger
from infra.errors import BusyError, ImageError, SandboxError

KIND = "kubernetes"
SANDBOX, RUN, SESSION = "gagar.dev/sandbox", "gagar.dev/run", "gagar.dev/session"
"""Labels. A session is one start of a run's driver."""
WORKER, TASK = "gagar.dev/worker", "gagar.dev/task"
"""Annotations."""
CALL_S = 60.0
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
        name, token = f"gagar-{secrets.token_hex(8)}", secrets.token_urlsafe(24)
        try:
            await self._api.call("POST", self._pods, body=pod(self._config, order, name, token))
            runtime = await self._reach(name, token, order)
        except BaseException:
            await asyncio.shield(self._delete(name))
            raise

        async def release(sandbox: GuardedSandbox) -> None:
            await self._delete(name)

        return GuardedSandbox(runtime, name=f"pod {name}", release=release)

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
        address = status.get("podIP")
        return str(address) if status.get("phase") == "Running" and address else None

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


class Api:
    """The few calls of a Kubernetes API server that are needed, with what kubeconfig or service account say."""

    def __init__(self, config: KubernetesSandbox) -> None:
        self._config = config
        self._client: Any = None
        self._opening = asyncio.Lock()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        missing_ok: bool = False,
    ) -> dict[str, Any]:
        """The object that answers. Raises SandboxError, and BusyError where another try may do."""
        text = await self.text(method, path, body=body, query=query, missing_ok=missing_ok)
        try:
            answer = json.loads(text or "{}")
        except ValueError:
            raise SandboxError(f"Kubernetes answered {method} {path} with no JSON: {text[:200]!r}") from None
        return answer if isinstance(answer, dict) else {}

    async def text(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        missing_ok: bool = False,
        timeout_s: float | None = CALL_S,
    ) -> str:
        """As `call`, but any answer; no limit on how long it takes where `timeout_s` is None."""
        client = await self._open()
        try:
            response = await client.call_api(
                path,
                method,
                body=body,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json, */*", **(headers or {})},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=30),
            )
            async with response:
                text = str(await response.text(errors="backslashreplace"))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BusyError(f"Kubernetes did not answer {method} {path}: {type(error).__name__}: {error}") from error
        if response.status < 300 or (response.status == 404 and missing_ok):
            return text
        raise _problem(response.status, f"{method} {path}", text)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Any:
        try:
            from kubernetes_asyncio.client import ApiClient, Configuration
            from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
        except ImportError as error:
            raise needs_package(KIND, error) from error
        settings = Configuration()
        file = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
        try:
            if self._config.context is not None or "KUBECONFIG" in os.environ or os.path.exists(file):
                await load_kube_config(
                    config_file=file,
                    context=self._config.context,
                    client_configuration=settings,
                    persist_config=False,
                )
            else:
                load_incluster_config(client_configuration=settings)
        except (ConfigException, OSError, ValueError) as error:
            raise SandboxError(
                f"no way to a Kubernetes cluster ({error}); set KUBECONFIG, or run workers in pods that have a service "
                "account"
            ) from error
        return ApiClient(settings)


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
    if config.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": config.pull_secret}]
    if config.node_selector:
        spec["nodeSelector"] = dict(config.node_selector)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": config.namespace,
        "labels": pod_labels(config),
        "annotations": {WORKER: worker_name(), TASK: order.label},
    }
    if owner := _owner(config.namespace):
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


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


def _problem(status: int, what: str, text: str) -> SandboxError:
    try:
        message = str(json.loads(text).get("message") or text)
    except (ValueError, AttributeError):
        message = text
    said = f"Kubernetes answered {what} with {status}: {message[:500]}"
    if status in (408, 409, 429) or status >= 500 or "exceeded quota" in message:
        return BusyError(said)
    remedy = "; give the worker's account the role of docs/security.md" if status in (401, 403) else ""
    return SandboxError(said + remedy)
