"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.gateway.messages import (
    Body,
    Call,
    Message,
    RefusedError,
    Reply,
    ToolCall,
    checked,
    function_tool,
    objects,
    parts,
)

MODEL = "policy"
"""The one model's name, whatever a request calls it."""
_ROLES = {"system": "system", "developer": "system", "user": "user"}


def read(fields: Any, *, temperature: float) -> Call:
    """A request's body. Raises RefusedError."""
    body = Body(fields, temperature=temperature)
    messages = [_message(item, index) for index, item in enumerate(objects(body.take("messages", list), "messages"))]
    tools = tuple(_tool(item) for item in objects(body.take("tools", list, []), "tools"))
    limits = (body.take("max_completion_tokens", int), body.take("max_tokens", int))
    stream = body.take("stream", bool, False)
    body.refuse("n", (1,), "ask once for each reply")
    body.refuse("stop", ([],), "a reply ends where the policy ends it; cut it in the harness")
    body.refuse("response_format", ({"type": "text"},), "the policy's own distribution is recorded")
    body.refuse("tool_choice", ("auto",), "the policy chooses")
    body.refuse("logprobs", (False,), "they are recorded, not returned")
    body.refuse("functions", ([],), "send tools")
    body.refuse("function_call", (), "send tools")
    body.sampling()
    body.drop("model", "stream_options", "user", "metadata", "store", "parallel_tool_calls", "top_logprobs")
    return Call(
        messages=checked(messages),
        tools=tools,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stream=stream,
        notes=body.notes(),
    )


def answer(reply: Reply) -> dict[str, Any]:
    """A reply as one JSON object."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def stream(reply: Reply) -> Iterator[tuple[str | None, Any]]:
    """A reply as server-sent events: (event name, JSON or text)."""

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> tuple[None, dict[str, Any]]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return None, {**_head(reply, "chat.completion.chunk"), "choices": [choice]}

    yield chunk({"role": "assistant", "content": reply.text})
    for index, call in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": index, **_call(call)}]})
    yield chunk({}, _finish(reply))
    yield None, {**_head(reply, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)}
    yield None, "[DONE]"


def failure(error: RefusedError) -> dict[str, Any]:
    """A refusal as OpenAI's clients read it."""
    return {"error": {"message": error.message, "type": error.kind, "param": None, "code": None}}


def _message(item: Mapping[str, Any], index: int) -> Message:
    role, where = item.get("role"), f"messages[{index}].content"
    text = parts(item.get("content"), where)
    if role in _ROLES:
        return Message(role="system" if _ROLES[str(role)] == "system" else "user", text=text)
    if role == "tool":
        return Message(role="tool", text=text, call_id=str(item.get("tool_call_id")))
    if role == "assistant":
        calls = objects(item.get("tool_calls") or [], f"messages[{index}].tool_calls")
        return Message(role="assistant", text=text, calls=tuple(_read_call(call) for call in calls))
    raise RefusedError(f"messages[{index}].role = {role!r} is unknown; use system, user, assistant or tool")


def _read_call(item: Mapping[str, Any]) -> ToolCall:
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise RefusedError("a tool call has no function; only function tools are served")
    return ToolCall(
        call_id=str(item.get("id")), name=str(function.get("name")), arguments=str(function.get("arguments") or "{}")
    )


def _tool(item: Mapping[str, Any]) -> dict[str, Any]:
    function = item.get("function")
    if item.get("type") != "function" or not isinstance(function, Mapping):
        raise RefusedError(f"a tool of type {item.get('type')!r} is not supported; only function tools are served")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish(reply: Reply) -> str:
    return "length" if reply.cut else "tool_calls" if reply.calls else "stop"


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.reply_id}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.response_tokens,
        "total_tokens": reply.prompt_tokens + reply.response_tokens,
    }
