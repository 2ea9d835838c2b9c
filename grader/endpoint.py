"""HTTP client of an OpenAI-compatible chat-completions endpoint.

Repeated are 429, 5xx and connection errors, with exponential backoff and full jitter, and never another 4xx: a request
that the server calls wrong stays wrong. A server's Retry-After is honoured up to a minute.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from configs.schema import EndpointGraderBackend
from configs.secrecy import HIDDEN
from infra.errors import Boundary, GraderError

MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_RETRY_AFTER_S = 60.0
_MAX_COUNT = 10**9
"""Tokens that a server can say it counted: sums and prices of more are no numbers any more."""
_CONNECT_S = 10.0
"""Who does not take a connection in this time is away, however long a request may take."""
_PROBE_S = 30.0
"""What a probe may take: an endpoint that works on one token for longer serves nobody."""
_SAID_CHARS = 300
"""How much of an error's body is repeated."""
_SECRET_CHARS = 6
"""A shorter key guards nothing ("EMPTY", "x" for local servers), and would hide parts of words."""
_CONTEXT_FULL = ("context_length_exceeded", "context length", "context window")
"""How servers say, in a 400 answer, that the conversation is longer than the model reads."""


class ContextFullError(GraderError):
    """The conversation does not fit the model's context."""


class EndpointLostError(GraderError):
    """The endpoint cannot be reached, keeps failing, or refuses the key: an outage, no property of what was asked."""

    boundary = Boundary.NETWORK


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCall:
    """One tool call as the model wrote it."""

    call_id: str
    name: str
    arguments: str
    """Should be a JSON object; nobody has looked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAnswer:
    """One chat completion."""

    text: str
    """Empty where the message holds nothing but tool calls."""
    calls: tuple[NativeCall, ...] = ()
    finish_reason: str | None
    prompt_tokens: int
    """0 where the server does not say."""
    completion_tokens: int


class _Function(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: str | dict[str, Any] | None = None
    """Text by the standard; some servers send the object itself."""


class _ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> _Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("neither content nor tool_calls")
        return self


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    """What a server does not count it leaves out, or gives as null."""

    model_config = ConfigDict(extra="ignore")
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class _TransientError(Exception):
    """Worth another try."""

    def __init__(self, message: str, retry_after_s: float | None = None, *, lost: bool = False) -> None:
        """`lost`: nobody answers there, or not as an endpoint that works."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.lost = lost


class Endpoint:
    """One endpoint and model; at most `concurrency` requests at once from this process."""

    def __init__(
        self,
        backend: EndpointGraderBackend,
        *,
        api_key: str | None,
        concurrency: int,
        backoff_s: float = 0.5,
        max_backoff_s: float = 30.0,
    ) -> None:
        """`api_key` None sends no Authorization header; it is in no message. `backoff_s` is the upper end of the first
        random wait."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._secret = api_key if api_key and len(api_key) >= _SECRET_CHARS else None
        self._url = backend.base_url.rstrip("/") + "/chat/completions"
        self._model = backend.model
        self._timeout_s = backend.request_timeout_s
        self._attempts = backend.max_retries + 1
        self._wait = wait_random_exponential(multiplier=backoff_s, max=max_backoff_s)
        self._slots = asyncio.Semaphore(concurrency)
        connect_s = min(backend.request_timeout_s, _CONNECT_S)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(backend.request_timeout_s, connect=connect_s)
        )
        self.lost: str | None = None
        """Why the endpoint was lost at the last request; None since it answered."""

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        temperature: float,
        response_format: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> EndpointAnswer:
        """One chat completion; with `tools` the model may, or by `tool_choice` must, call functions.

        Raises:
            GraderError: an answer that is not to be retried, or retries used up; ContextFullError: too long a
                conversation, as far as the server says so; EndpointLostError: the endpoint is away.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "max_completion_tokens": max_tokens,
            "temperature": temperature,
        }
        if response_format is not None:
            body["response_format"] = response_format
        if tools:
            body["tools"] = list(tools)
            body["tool_choice"] = tool_choice or "auto"
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=self._pause_s,
            retry=retry_if_exception_type(_TransientError),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    async with self._slots:
                        return await self._once(body)
        except _TransientError as error:
            kind = EndpointLostError if error.lost else GraderError
            raise kind(f"{self._url}: {error}, after {self._attempts} tries") from error
        raise AssertionError("unreachable: the last attempt raises")

    async def probe(self) -> str | None:
        """One short request: None if the endpoint answers it, in whatever way, else why it is lost."""
        messages = [{"role": "user", "content": "Say ok."}]
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._once({"model": self._model, "messages": messages, "max_completion_tokens": 1})
        except TimeoutError:
            return f"{self._url}: no answer within {_PROBE_S:g} s"
        except (_TransientError, GraderError):
            pass  # `lost` says whether that is an answer
        return self.lost

    def _pause_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after_s if isinstance(error, _TransientError) else None
        return max(self._wait(state), asked or 0.0)

    async def _once(self, body: Mapping[str, Any]) -> EndpointAnswer:
        try:
            answer = await self._request(body)
        except (_TransientError, GraderError) as error:
            lost = error.lost if isinstance(error, _TransientError) else isinstance(error, EndpointLostError)
            self.lost = str(error) if lost else None
            raise
        self.lost = None
        return answer

    async def _request(self, body: Mapping[str, Any]) -> EndpointAnswer:
        try:
            async with asyncio.timeout(self._timeout_s), self._http.stream("POST", self._url, json=body) as response:
                content = await _read(response)
        except TimeoutError:
            raise _TransientError(f"no answer within {self._timeout_s:g} s") from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise GraderError(f"{self._url}: {error}; correct grader.backend.base_url") from error
        except httpx.TransportError as error:
            slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            raise _TransientError(self._hidden(f"{type(error).__name__}: {error}"), lost=not slow) from None
        except httpx.HTTPError as error:  # an undecodable body and the like
            raise GraderError(self._hidden(f"{self._url}: {type(error).__name__}: {error}")) from None
        if response.status_code != 200:
            said = self._hidden(content.decode("utf-8", "replace"))
            raise _refusal(self._url, response, ascii(said[:_SAID_CHARS]))
        return _parse(self._url, content)

    def _hidden(self, text: str) -> str:
        """A message without the key: servers and libraries repeat headers in theirs, and messages go to files."""
        return text if self._secret is None else text.replace(self._secret, HIDDEN)


async def _read(response: httpx.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise GraderError(f"the endpoint's answer is longer than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _refusal(url: str, response: httpx.Response, said: str) -> Exception:
    """What an answer other than 200 comes to; `said` is its body, cut."""
    status = response.status_code
    if status == 429 or status >= 500:
        return _TransientError(f"HTTP {status} {said}", _retry_after_s(response), lost=status >= 500)
    if status in (401, 403):
        return EndpointLostError(f"{url}: HTTP {status} {said}; the key is not accepted")
    if status == 400 and any(phrase in said.lower() for phrase in _CONTEXT_FULL):
        return ContextFullError(f"{url}: HTTP {status} {said}")
    return GraderError(f"{url}: HTTP {status} {said}")


def _retry_after_s(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return min(float(value), MAX_RETRY_AFTER_S) if value.isascii() and value.isdigit() else None


def _parse(url: str, content: bytes) -> EndpointAnswer:
    try:
        answer = _Answer.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise GraderError(f"{url}: not a chat completion ({where}: {first['msg']!a})") from None
    choice, usage = answer.choices[0], answer.usage or _Usage()
    return EndpointAnswer(
        text=choice.message.content or "",
        calls=tuple(
            NativeCall(
                call_id=call.id or f"call_{number}",
                name=call.function.name,
                arguments=_arguments(call.function.arguments),
            )
            for number, call in enumerate(choice.message.tool_calls or (), start=1)
        ),
        finish_reason=choice.finish_reason,
        prompt_tokens=_count(usage.prompt_tokens),
        completion_tokens=_count(usage.completion_tokens),
    )


def _count(tokens: int | None) -> int:
    return min(max(tokens or 0, 0), _MAX_COUNT)


def _arguments(value: str | dict[str, Any] | None) -> str:
    return value if isinstance(value, str) else json.dumps(value or {})
