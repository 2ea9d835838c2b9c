"""The few calls of a Kubernetes API server that sandboxes need."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from configs.schema import KubernetesSandbox
from envs.deployment import needs_package
from infra.errors import BusyError, SandboxError

CALL_S = 60.0


class Api:
    """A connection with what kubeconfig or service account say; belongs to one event loop."""

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
            raise needs_package("kubernetes", error) from error
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
