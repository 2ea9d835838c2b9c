"""An API server of Kubernetes, as far as it is used, and the kubelet behind it: pods are held against the schema."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import kubernetes_validate
import machine
from aiohttp import web

from envs.jail import find_bwrap

VERSION = "1.34"
TOKEN = "cluster-token"


class Cluster:
    """Pods of one namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, dict[str, Any]] = {}
        self.made: list[dict[str, Any]] = []
        self.policies: list[dict[str, Any]] = []
        self.groups: list[int] = []
        self.sets: dict[str, dict[str, Any]] = {}
        self._asked: Counter[str] = Counter()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Path]:
        """The kubeconfig that leads here."""
        app = web.Application(middlewares=[self._authenticate], client_max_size=2**24)
        space = "/api/v1/namespaces/boxes/pods"
        app.router.add_get(space, self._list)
        app.router.add_post(space, self._create)
        app.router.add_get(space + "/{name}", self._get)
        app.router.add_delete(space + "/{name}", self._delete)
        app.router.add_get(space + "/{name}/log", self._log)
        app.router.add_route("*", space + "/{name}:8000/proxy/{path}", self._proxy)
        app.router.add_get("/apis/networking.k8s.io/v1/namespaces/boxes/networkpolicies", self._policies)
        sets = "/apis/apps/v1/namespaces/boxes/daemonsets"
        app.router.add_post(sets, self._create_set)
        app.router.add_get(sets + "/{name}", self._get_set)
        app.router.add_delete(sets + "/{name}", self._delete_set)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        file = self.folder / "kubeconfig"
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                    "users": [{"name": "me", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                }
            )
        )
        try:
            yield file
        finally:
            for group in self.groups:
                machine.stop(group)
            await runner.cleanup()

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        response: web.StreamResponse = await handler(request)
        return response

    async def _create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        try:
            kubernetes_validate.validate(pod, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _status(422, f"Pod is invalid: {error.message}")
        name, spec = pod["metadata"]["name"], pod["spec"]
        image = spec["containers"][0]["image"]
        self._asked[image] += 1
        self.made.append(pod)
        if image.startswith("busy") and self._asked[image] < 3:
            return _status(403, f'pods "{name}" is forbidden: exceeded quota: boxes')
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        if image.startswith("missing"):
            message = f'failed to pull and unpack image "{image}": not found'
            waiting = {"reason": "ErrImagePull", "message": message}
            pod["status"]["containerStatuses"] = [{"name": "sandbox", "image": image, "state": {"waiting": waiting}}]
        elif image.startswith("never"):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod["status"]["conditions"] = [{**condition, "message": "0/3 nodes are available: 3 Insufficient cpu."}]
        else:
            asyncio.get_running_loop().call_later(0.1, self._run, name)
        return web.json_response(pod, status=201)

    def _run(self, name: str) -> None:
        """What a kubelet does."""
        if (pod := self.pods.get(name)) is None:
            return
        container = pod["spec"]["containers"][0]
        command = ["/bin/sh", "-c", "exit 3"] if container["image"] == "ends:1" else container["command"]
        # All of them lead to this host; other runs of these tests have pods here too.
        address = ".".join(["127", *(str(random.randrange(1, 255)) for _ in range(3))])
        folder = self.folder / name
        folder.mkdir()
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        group = machine.start(folder, command, environment, (address, 8000), find_bwrap(), kept=True)
        self.groups.append(group)
        pod["group"], pod["status"] = group, {"phase": "Running", "podIP": address}

    async def _get(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "not found")
        if "group" in pod and not machine.runs(pod["group"]):
            ended = {"name": "sandbox", "image": "x", "state": {"terminated": {"exitCode": 3}}}
            pod["status"] = {"phase": "Failed", "containerStatuses": [ended]}
        return web.json_response({**pod, "group": None})

    async def _list(self, request: web.Request) -> web.Response:
        wanted = dict(item.split("=") for item in request.query["labelSelector"].split(","))
        found = [pod for pod in self.pods.values() if wanted.items() <= pod["metadata"]["labels"].items()]
        return web.json_response({"kind": "PodList", "items": found})

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.pop(request.match_info["name"], None)
        if pod is None:
            return _status(404, "not found")
        if "group" in pod:
            machine.stop(pod["group"])
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _create_set(self, request: web.Request) -> web.Response:
        made = await request.json()
        try:
            kubernetes_validate.validate(made, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _status(422, f"DaemonSet is invalid: {error.message}")
        template = made["spec"]["template"]
        image = template["spec"]["initContainers"][0]["image"]
        made["status"] = {"desiredNumberScheduled": 3, "numberReady": 0 if image.startswith("missing") else 3}
        name = made["metadata"]["name"]
        self.sets[name] = made
        if image.startswith("missing"):
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}": not found'}
            status = {"initContainerStatuses": [{"name": "image-0", "image": image, "state": {"waiting": waiting}}]}
            about = {"name": f"{name}-x", "labels": template["metadata"]["labels"]}
            self.pods[f"{name}-x"] = {"metadata": about, "spec": {}, "status": status}
        return web.json_response(made, status=201)

    async def _get_set(self, request: web.Request) -> web.Response:
        return web.json_response(self.sets[request.match_info["name"]])

    async def _delete_set(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        del self.sets[name]
        self.pods.pop(f"{name}-x", None)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _log(self, request: web.Request) -> web.Response:
        return web.Response(text="last words")

    async def _policies(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "NetworkPolicyList", "items": self.policies})

    async def _proxy(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None or "podIP" not in pod["status"]:
            return _status(503, "no address")
        url = f"http://{pod['status']['podIP']}:8000/{request.match_info['path']}"
        headers = {"X-API-Key": request.headers["X-API-Key"], "Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.request(request.method, url, data=await request.read(), headers=headers) as answer,
            ):
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except aiohttp.ClientError as error:
            return _status(503, f"error trying to reach service: {error}")


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)
