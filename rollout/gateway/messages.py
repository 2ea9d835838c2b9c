"""A conversation as the gateway sees it, whichever interface it came through, and what is refused of a request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.errors import GagarError

Role = Literal["system", "user", "assistant", "tool"]


class RefusedError(GagarError):
    """A request that the gateway does not serve. The message says which field and what to do."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "invalid_request_error") -> None:
        """`status` is the HTTP status (below 500 and not 408, 409 or 429, so that clients do not try again); `kind` the
        interface's error type."""
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def key(self) -> tuple[str, str]:
        """What makes two calls the same: not their ids, nor how their JSON is written."""
        try:
            return self.name, json.dumps(json.loads(self.arguments), sort_keys=True)
        except ValueError:
            return self.name, self.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant's message."""
    call_id: str | None = None
    """Of a tool's message: the call that it answers."""

    def key(self) -> str:
        """Equal for messages that are the same to a policy. Clients trim an assistant's text and renumber calls."""
        text = self.text.strip() if self.role == "assistant" else self.text
        return json.dumps([self.role, text, [call.key() for call in self.calls]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for one assistant message."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """In the form of OpenAI's chat completions."""
    max_tokens: int | None = None
    stream: bool = False
    notes: tuple[str, ...] = ()
    """What was asked for and has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy said."""

    reply_id: str
    """ "<call number>" within the session, made unique by the interface's own prefix."""
    text: str
    calls: tuple[ToolCall, ...]
    cut: bool
    """It reached its token limit before it ended."""
    prompt_tokens: int
    response_tokens: int

    def message(self) -> Message:
        """The reply as a harness sends it back."""
        return Message(role="assistant", text=self.text, calls=self.calls)


class Body:
    """A request's JSON object, read field by field; what is left over at the end is noted."""

    def __init__(self, fields: Any, *, temperature: float) -> None:
        """`temperature` is the run's: mu is the sampling distribution (M5.1), so a harness cannot choose another."""
        if not isinstance(fields, Mapping):
            raise RefusedError(f"the body is a JSON {type(fields).__name__}; send an object")
        self._fields = dict(fields)
        self._temperature = temperature
        self._notes: list[str] = []

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The field, which may be absent or null. Raises RefusedError where it has another type."""
        value = self._fields.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RefusedError(f"{name} = {json.dumps(value)[:80]} has the wrong type; see the interface's reference")
        return value

    def drop(self, *names: str) -> None:
        """Fields that change nothing of what is sampled."""
        for name in names:
            self._fields.pop(name, None)

    def refuse(self, name: str, allowed: Sequence[Any], remedy: str) -> None:
        """Raises RefusedError for a field with another value than these (or none)."""
        value = self._fields.pop(name, None)
        if value is not None and value not in allowed:
            raise RefusedError(f"{name} = {json.dumps(value)[:80]} is not supported; {remedy}")

    def sampling(self) -> None:
        """Fields that would sample from another distribution than the run's: they have no effect, and are noted."""
        neutral: dict[str, tuple[Any, ...]] = {
            "temperature": (self._temperature,),
            "top_p": (1,),
            "top_k": (0, -1),
            "min_p": (0,),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": ({},),
            "seed": (),
        }
        for name, values in neutral.items():
            value = self._fields.pop(name, None)
            if value is not None and value not in values:
                self._notes.append(f"{name}={json.dumps(value)[:40]} has no effect: the run's sampling is recorded")

    def notes(self) -> tuple[str, ...]:
        """Of everything that was not served, unknown fields included."""
        return (*self._notes, *(f"{name} has no effect" for name, v in self._fields.items() if v is not None))


def parts(content: Any, where: str, kinds: Iterable[str] = ("text",)) -> str:
    """Text of a content that is a string or a list of text parts. Raises RefusedError for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _encodable(content)
    if not isinstance(content, Sequence):
        raise RefusedError(f"{where} is neither text nor a list of parts")
    return "\n".join(_part(part, where, tuple(kinds)) for part in content)


def _part(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    if isinstance(part, str):
        return _encodable(part)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in kinds or not isinstance(part.get("text"), str):
        raise RefusedError(f"{where} has a part of type {kind!r}; the policy reads text only")
    return _encodable(part["text"])


def _encodable(text: str) -> str:
    """JSON may hold half a character, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def objects(value: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """The objects of a list. Raises RefusedError where it is something else."""
    if not isinstance(value, list):
        raise RefusedError(f"{where} must be a list")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise RefusedError(f"{where}[{index}] must be an object")
        yield item


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the form of OpenAI's chat completions. Raises RefusedError for one without a name."""
    if not isinstance(name, str) or not name:
        raise RefusedError("a tool has no name")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def checked(messages: list[Message]) -> tuple[Message, ...]:
    """Raises RefusedError for a conversation that nobody can answer."""
    if not messages:
        raise RefusedError("the conversation is empty; send at least one message")
    if messages[-1].role == "assistant":
        raise RefusedError("the last message is the assistant's; continuing a started reply is not supported")
    return tuple(messages)
