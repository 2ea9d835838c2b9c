"""The endpoint client against a real HTTP server on this machine that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from configs.schema import EndpointGraderBackend
from grader.endpoint import MAX_ANSWER_BYTES, ContextFullError, Endpoint, EndpointAnswer, NativeCall
from infra.errors import GraderError

Answer = Callable[[web.Request, int], Awaitable[web.StreamResponse]]
MESSAGES = [{"role": "user", "content": "grade"}]


def completion(text: str = "fine", **changes: Any) -> web.Response:
    body = {
        "id": "x",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7},
    }
    return web.json_response({**body, **changes})


class Server:
    """Answers the n-th request with `answer(request, n)`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.busy = 0
        self.most_busy = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            return await self.answer(request, len(self.bodies))
        finally:
            self.busy -= 1


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    server = Server(answer)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    test_server = TestServer(app)
    await test_server.start_server()
    server.url = str(test_server.make_url("/v1"))
    try:
        yield server
    finally:
        await test_server.close()


def sequence(*statuses: int, headers: dict[str, str] | None = None) -> Answer:
    """One status after the other, the last one for ever; 200 is a completion."""

    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        status = statuses[min(n, len(statuses)) - 1]
        return completion() if status == 200 else web.Response(status=status, text="no\x1b[2J", headers=headers)

    return answer


def endpoint(url: str, *, retries: int = 3, key: str | None = "secret", **changes: Any) -> Endpoint:
    backend = EndpointGraderBackend(type="endpoint", base_url=url, model="m", max_retries=retries, **changes)
    return Endpoint(backend, api_key=key, concurrency=2, backoff_s=0.005, max_backoff_s=0.02)


async def ask(client: Endpoint, response_format: dict[str, Any] | None = None) -> EndpointAnswer:
    try:
        return await client.complete(MESSAGES, max_tokens=9, temperature=0.5, response_format=response_format)
    finally:
        await client.close()


async def test_request_and_answer() -> None:
    async with serving(sequence(200)) as server:
        answer = await ask(endpoint(server.url), {"type": "json_object"})
    assert answer == EndpointAnswer(text="fine", finish_reason="stop", prompt_tokens=11, completion_tokens=7)
    assert server.bodies == [
        {
            "model": "m",
            "messages": MESSAGES,
            "max_completion_tokens": 9,
            "temperature": 0.5,
            "response_format": {"type": "json_object"},
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_no_key_sends_no_authorization() -> None:
    async with serving(sequence(200)) as server:
        await ask(endpoint(server.url, key=None))
    assert "Authorization" not in server.headers[0]
    assert "response_format" not in server.bodies[0]


@pytest.mark.parametrize("statuses", [(429, 200), (500, 200), (502, 503, 200), (429, 500, 529, 200)])
async def test_transient_answers_are_retried(statuses: tuple[int, ...]) -> None:
    async with serving(sequence(*statuses)) as server:
        assert (await ask(endpoint(server.url))).text == "fine"
    assert len(server.bodies) == len(statuses)
    assert all(body == server.bodies[0] for body in server.bodies)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422, 204, 302])
async def test_other_answers_are_not(status: int) -> None:
    async with serving(sequence(status, 200)) as server:
        with pytest.raises(GraderError, match=f"HTTP {status}") as caught:
            await ask(endpoint(server.url))
    assert len(server.bodies) == 1
    assert "\x1b" not in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_retries_are_bounded() -> None:
    async with serving(sequence(500)) as server:
        with pytest.raises(GraderError, match=r"HTTP 500.*after 3 tries"):
            await ask(endpoint(server.url, retries=2))
    assert len(server.bodies) == 3


async def test_retry_after_is_honoured() -> None:
    async with serving(sequence(429, 200, headers={"Retry-After": "1"})) as server:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await ask(endpoint(server.url))
        assert loop.time() - started_s >= 1.0


async def test_a_refused_connection_is_retried_and_then_named() -> None:
    with pytest.raises(GraderError, match=r"ConnectError.*after 2 tries"):
        await ask(endpoint(f"http://127.0.0.1:{unused_port()}/v1", retries=1))


async def test_a_connection_cut_in_the_middle_is_retried() -> None:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        if n == 1:
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices":')
            assert request.transport is not None
            request.transport.close()
            return response
        return completion()

    async with serving(answer) as server:
        assert (await ask(endpoint(server.url))).text == "fine"
    assert len(server.bodies) == 2


async def test_an_answer_that_does_not_come_is_asked_for_again() -> None:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        if n == 1:
            await asyncio.sleep(30)
        return completion()

    async with serving(answer) as server:
        assert (await ask(endpoint(server.url, request_timeout_s=0.2))).text == "fine"
    assert len(server.bodies) == 2


async def test_an_answer_that_drips_is_cut_at_the_request_timeout() -> None:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(200):
            await response.write(b" ")
            await asyncio.sleep(0.05)
        return response

    async with serving(answer) as server:
        with pytest.raises(GraderError, match=r"no answer within 0.3 s, after 1 tries"):
            await ask(endpoint(server.url, retries=0, request_timeout_s=0.3))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Welcome</html>",
        b"{}",
        b'{"choices": []}',
        completion().body[:40],  # truncated JSON
        b'{"choices": [{"message": {}}]}',
        b'{"choices": [{"message": {"tool_calls": []}}]}',
        b'{"choices": [{"message": {"tool_calls": [{"id": "a"}]}}]}',
        b'{"choices": [{"message": {"tool_calls": [{"id": "a", "function": {"name": "read", "arguments": 7}}]}}]}',
        b'{"choices": [{"message": {"content": 7}}]}',
        b'{"choices": "C1"}',
        b'{"error": {"message": "overloaded"}}',
        b"\xff\xfe\x00",
        b"[" * 5000,
    ],
)
async def test_garbage_is_an_error_and_not_retried(body: bytes) -> None:
    """A broken server breaks the same way again; the group falls back at once (M1.10)."""

    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async with serving(answer) as server:
        with pytest.raises(GraderError, match="not a chat completion"):
            await ask(endpoint(server.url))
    assert len(server.bodies) == 1


async def test_a_flood_is_cut_off() -> None:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        return web.Response(body=b" " * (MAX_ANSWER_BYTES + 1))

    async with serving(answer) as server:
        with pytest.raises(GraderError, match="longer than"):
            await ask(endpoint(server.url))


async def test_usage_may_be_missing() -> None:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        return completion("{}", usage=None)

    async with serving(answer) as server:
        assert (await ask(endpoint(server.url))).prompt_tokens == 0


async def test_concurrency_is_limited() -> None:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return completion(json.dumps(n))

    async with serving(answer) as server:
        client = endpoint(server.url)
        jobs = [client.complete(MESSAGES, max_tokens=1, temperature=0, response_format=None) for _ in range(6)]
        texts = {answer.text for answer in await asyncio.gather(*jobs)}
        await client.close()
    assert len(texts) == 6
    assert server.most_busy == 2


async def test_a_wrong_address_says_what_to_correct() -> None:
    with pytest.raises(GraderError, match=r"correct grader\.backend\.base_url"):
        await ask(endpoint("ftp://example/v1"))


# --- tool calls -------------------------------------------------------------------------------------------------------


def calling(*calls: dict[str, Any], content: str | None = None, reason: str = "tool_calls") -> web.Response:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return completion(choices=[{"index": 0, "message": message, "finish_reason": reason}])


def call(name: str, arguments: Any, call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def answered(response: Callable[[], web.Response]) -> EndpointAnswer:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        return response()

    async with serving(answer) as server:
        return await ask(endpoint(server.url))


async def test_calls_are_read_and_content_may_be_null() -> None:
    said = await answered(lambda: calling(call("read", '{"path": "task.md"}', "a"), call("list", "{}", "b")))
    assert said.text == ""
    assert said.calls == (
        NativeCall(call_id="a", name="read", arguments='{"path": "task.md"}'),
        NativeCall(call_id="b", name="list", arguments="{}"),
    )
    assert said.finish_reason == "tool_calls"


async def test_what_servers_leave_out_of_a_call() -> None:
    said = await answered(lambda: calling(call("read", {"path": "x"}, None), call("list", None, None), content="so"))
    assert said.text == "so"
    assert said.calls == (
        NativeCall(call_id="call_1", name="read", arguments='{"path": "x"}'),
        NativeCall(call_id="call_2", name="list", arguments="{}"),
    )


@pytest.mark.parametrize("arguments", ['{"path": ', "", "[1]", "nonsense", '{"a": NaN}', "[" * 5000])
async def test_arguments_that_are_no_json_are_the_models_fault_not_the_endpoints(arguments: str) -> None:
    said = await answered(lambda: calling(call("read", arguments)))
    assert said.calls == (NativeCall(call_id="c1", name="read", arguments=arguments),)


async def test_an_empty_message_is_an_answer() -> None:
    """A model that thinks until its token limit says nothing: its own fault, to be told about."""
    choice = {"message": {"content": None}, "finish_reason": "length"}
    said = await answered(lambda: completion(choices=[choice]))
    assert (said.text, said.calls, said.finish_reason) == ("", (), "length")


async def test_tools_are_offered_only_where_there_are_any() -> None:
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    async with serving(sequence(200)) as server:
        client = endpoint(server.url)
        await client.complete(MESSAGES, max_tokens=1, temperature=0, tools=[tool], tool_choice="required")
        await client.complete(MESSAGES, max_tokens=1, temperature=0, tools=[tool])
        await client.complete(MESSAGES, max_tokens=1, temperature=0, tool_choice="required")
        await client.close()
    assert [body.get("tool_choice") for body in server.bodies] == ["required", "auto", None]
    assert [body.get("tools") for body in server.bodies] == [[tool], [tool], None]


# --- how often each fault is tried ------------------------------------------------------------------------------------


async def slow(request: web.Request, n: int) -> web.StreamResponse:
    await asyncio.sleep(30)
    return completion()


def always(**changes: Any) -> Answer:
    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        return web.Response(**changes)

    return answer


@pytest.mark.parametrize(
    ("answer", "tries", "named"),
    [
        (always(status=429, headers={"Retry-After": "0"}), 3, "HTTP 429"),
        (always(status=429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), 3, "HTTP 429"),
        (always(status=500, text="<html>oops</html>"), 3, "HTTP 500"),
        (always(status=503), 3, "HTTP 503"),
        (slow, 3, "no answer within 0.2 s"),
        (always(status=400, text="bad tool"), 1, "HTTP 400"),
        (always(status=404, text="<html>no such page</html>"), 1, "HTTP 404"),
        (always(body=b"\x00\xff\x1f\x8b"), 1, "not a chat completion"),
        (always(body=b"\x1f\x8b garbage", headers={"Content-Encoding": "gzip"}), 1, "DecodingError"),
        (always(text="<html>a portal</html>", content_type="text/html"), 1, "not a chat completion"),
        (always(body=b'{"choices": []}'), 1, "not a chat completion"),
        (always(body=b"x" * (MAX_ANSWER_BYTES + 1)), 1, "longer than"),
    ],
)
async def test_faults_and_their_tries(answer: Answer, tries: int, named: str) -> None:
    async with serving(answer) as server:
        with pytest.raises(GraderError, match=named) as caught:
            await ask(endpoint(server.url, retries=2, request_timeout_s=0.2 if answer is slow else 10))
    assert len(server.bodies) == tries
    assert (f"after {tries} tries" in str(caught.value)) == (tries > 1)


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 2100 tokens",
        '{"error": {"code": "context_length_exceeded", "message": "too long"}}',
    ],
)
async def test_a_conversation_that_is_too_long_is_named_so(said: str) -> None:
    async with serving(always(status=400, text=said)) as server:
        with pytest.raises(ContextFullError):
            await ask(endpoint(server.url))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [401, 429, 500])
async def test_a_server_that_repeats_the_key_does_not_bring_it_into_a_message(status: int) -> None:
    key = "sk-0123456789abcdef"

    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        # Its end lies beyond what is repeated of a body: not even a part of it may be left.
        return web.Response(status=status, text=f"{'x' * 290}{request.headers['Authorization']}")

    async with serving(answer) as server:
        with pytest.raises(GraderError) as raised:
            await ask(endpoint(server.url, key=key, retries=0))
    assert str(status) in str(raised.value)
    assert "sk-" not in str(raised.value)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 10**400, "completion_tokens": -5}, (10**9, 0)),
        ({"prompt_tokens": None, "completion_tokens": 3}, (0, 3)),
    ],
)
async def test_absurd_counts_stay_numbers(usage: dict[str, Any], counts: tuple[int, int]) -> None:
    """A sum of tokens times a price must not be what ends a grading, or a run."""

    async def answer(request: web.Request, n: int) -> web.StreamResponse:
        return completion(usage=usage)

    async with serving(answer) as server:
        found = await ask(endpoint(server.url))
    assert (found.prompt_tokens, found.completion_tokens) == counts
