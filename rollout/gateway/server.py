"""The gateway's server: one a rollout worker, on loopback, with a session and a token of its own for each rollout."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from rollout.gateway import anthropic_messages, openai_chat, openai_responses
from rollout.gateway.messages import Call, RefusedError, Reply
from rollout.gateway.session import Session

MAX_BODY_BYTES = 64 * 1024 * 1024
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one rollout's harness finds the policy."""

    base_url: str
    """Without "/v1": Anthropic's clients take it so, OpenAI's with "/v1" behind it."""
    token: str
    """The API key; of this rollout alone."""
    socket: str | None
    """Where the gateway also listens, for sandboxes that see its folder."""


class Interface(Protocol):
    """What a module of this package does for one of the interfaces."""

    def read(self, fields: Any, *, temperature: float) -> Call:
        """A request's body. Raises RefusedError."""
        ...

    def answer(self, reply: Reply) -> dict[str, Any]:
        """A reply as one JSON object."""
        ...

    def stream(self, reply: Reply) -> Iterator[tuple[str | None, Any]]:
        """A reply as server-sent events: (event name, JSON or text)."""
        ...

    def failure(self, error: RefusedError) -> dict[str, Any]:
        """A refusal as the interface's clients read it."""
        ...


class Gateway:
    """Serves sessions. Belongs to one event loop."""

    def __init__(self, folder: str | None = None) -> None:
        """`folder`: where a unix socket listens too, for whoever has a token; null: none does."""
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._base_url = ""
        self._socket = None if folder is None else f"{folder}/gateway"

    async def start(self) -> None:
        """Listen, on a port that the system chooses. Idempotent."""
        async with self._starting:
            if self._runner is None:
                self._runner = await self._listen()

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._serving(openai_chat)),
                web.post("/v1/responses", self._serving(openai_responses)),
                web.post("/v1/messages", self._serving(anthropic_messages)),
                web.get("/v1/models", self._models),
            ]
        )
        # A client that hangs up takes its request to the engine with it.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_GRACE_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self._base_url = f"http://{host}:{port}"
        if self._socket is not None:
            await web.UnixSite(runner, self._socket).start()
            os.chmod(self._socket, 0o666)  # commands in jails run as another user
        return runner

    async def close(self) -> None:
        """Stop listening; sessions that are open are refused from now on."""
        for session in self._sessions.values():
            session.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextlib.asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[Endpoint]:
        """Serves a session under a new token until the block ends; then the token opens nothing."""
        await self.start()
        token = secrets.token_urlsafe(32)
        self._sessions[token] = session
        try:
            yield Endpoint(base_url=self._base_url, token=token, socket=self._socket)
        finally:
            session.close()
            del self._sessions[token]

    def _session(self, request: web.Request) -> Session:
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        token = bearer if kind == "Bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(token)
        if session is None:
            raise RefusedError(
                "the API key opens no rollout; use the one that the harness was given",
                status=401,
                kind="authentication_error",
            )
        return session

    def _serving(self, interface: Interface) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                call = interface.read(await _json(request), temperature=session.temperature)
                reply = await session.call(call, delivered=lambda: _waits(request))
            except RefusedError as error:
                # Nothing that is refused here is served at a second try.
                headers = {"x-should-retry": "false"}
                return web.json_response(interface.failure(error), status=error.status, headers=headers)
            except web.HTTPException:
                raise
            except Exception:
                logging.getLogger(__name__).exception("the gateway failed")
                fault = RefusedError("a fault of the gateway; the worker's log has it", status=500, kind="api_error")
                return web.json_response(interface.failure(fault), status=500, headers={"x-should-retry": "false"})
            if call.stream:
                return await _stream(request, interface.stream(reply))
            return web.json_response(interface.answer(reply))

        return handle

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except RefusedError as error:
            return web.json_response(openai_chat.failure(error), status=error.status)
        model = {"id": openai_chat.MODEL, "object": "model", "created": 0, "owned_by": "gagar"}
        return web.json_response({"object": "list", "data": [model]})


def open_folder() -> str:
    """A new folder for a gateway's socket, which the users of sandboxes may enter; gone with this process."""
    folder = tempfile.mkdtemp(prefix="gagar-gateway-")
    os.chmod(folder, 0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise RefusedError(f"the body is no JSON ({error})") from error


def _waits(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _stream(request: web.Request, events: Iterator[tuple[str | None, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        text = data if isinstance(data, str) else json.dumps(data)
        await response.write(f"{head}data: {text}\n\n".encode())
    await response.write_eof()
    return response
