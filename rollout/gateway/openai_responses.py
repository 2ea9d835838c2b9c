"""OpenAI's responses: POST /v1/responses, without state on the server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from rollout.gateway.openai_chat import MODEL, failure

__all__ = ["answer", "failure", "read", "stream"]

_KINDS = ("input_text", "output_text", "text")
_ALONE = "send the whole conversation as input each time (store=false)"


def read(fields: Any, *, temperature: float) -> Call:
    """A request's body. Raises RefusedError."""
    body = Body(fields, temperature=temperature)
    messages: list[Message] = []
    if instructions := body.take("instructions", str):
        messages.append(Message(role="system", text=instructions))
    given = body.take("input", (str, list))
    if isinstance(given, str):
        messages.append(Message(role="user", text=given))
    else:
        for index, item in enumerate(objects(given, "input")):
            _append(messages, item, index)
    tools = tuple(_tool(item) for item in objects(body.take("tools", list, []), "tools"))
    max_tokens, stream_it = body.take("max_output_tokens", int), body.take("stream", bool, False)
    body.refuse("previous_response_id", (), _ALONE)
    body.refuse("conversation", (), _ALONE)
    body.refuse("background", (False,), "wait for the reply")
    body.refuse("tool_choice", ("auto",), "the policy chooses")
    body.refuse("text", ({}, {"format": {"type": "text"}}), "the policy's own distribution is recorded")
    body.refuse("top_logprobs", (0,), "they are recorded, not returned")
    body.sampling()
    body.drop("model", "store", "user", "metadata", "parallel_tool_calls", "include", "stream_options", "truncation")
    body.drop("prompt_cache_key", "safety_identifier", "service_tier")
    return Call(messages=checked(messages), tools=tools, max_tokens=max_tokens, stream=stream_it, notes=body.notes())


def answer(reply: Reply) -> dict[str, Any]:
    """A reply as one JSON object."""
    return _response(reply, "incomplete" if reply.cut else "completed", [item for item, _ in _items(reply)])


def stream(reply: Reply) -> Iterator[tuple[str | None, Any]]:
    """A reply as server-sent events: (event name, JSON)."""
    for number, (name, fields) in enumerate(_events(reply)):
        yield name, {"type": name, "sequence_number": number, **fields}


def _events(reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
    started = _response(reply, "in_progress", [])
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, (item, begun) in enumerate(_items(reply)):
        at = {"output_index": index, "item_id": item["id"]}
        yield "response.output_item.added", {"output_index": index, "item": begun}
        if item["type"] == "message":
            part, text = item["content"][0], item["content"][0]["text"]
            at["content_index"] = 0
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": text, "logprobs": []}
            yield "response.output_text.done", {**at, "text": text, "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        else:
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            done = {**at, "arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield "response.incomplete" if reply.cut else "response.completed", {"response": answer(reply)}


def _append(messages: list[Message], item: Mapping[str, Any], index: int) -> None:
    kind, where = item.get("type", "message"), f"input[{index}]"
    if kind == "message":
        role, text = item.get("role"), parts(item.get("content"), f"{where}.content", _KINDS)
        if role in ("system", "developer"):
            messages.append(Message(role="system", text=text))
        elif role == "user":
            messages.append(Message(role="user", text=text))
        elif role == "assistant":
            messages.append(Message(role="assistant", text=text))
        else:
            raise RefusedError(f"{where}.role = {role!r} is unknown; use system, developer, user or assistant")
    elif kind == "function_call":
        call = ToolCall(
            call_id=str(item.get("call_id")), name=str(item.get("name")), arguments=str(item.get("arguments") or "{}")
        )
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant", text=""))
        messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))
    elif kind == "function_call_output":
        text = parts(item.get("output"), f"{where}.output", _KINDS)
        messages.append(Message(role="tool", text=text, call_id=str(item.get("call_id"))))
    else:
        raise RefusedError(
            f"{where}.type = {kind!r} is not supported; use message, function_call, function_call_output"
        )


def _tool(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") != "function":
        raise RefusedError(f"a tool of type {item.get('type')!r} is not supported; only function tools are served")
    return function_tool(item.get("name"), item.get("description"), item.get("parameters"))


def _items(reply: Reply) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The output's items, each whole and as it begins."""
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        status = "incomplete" if reply.cut else "completed"
        message = {"id": f"msg_{reply.reply_id}", "type": "message", "role": "assistant", "status": status}
        yield {**message, "content": [part]}, {**message, "status": "in_progress", "content": []}
    for call in reply.calls:
        item = {
            "id": f"fc_{call.call_id}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
        yield item, {**item, "status": "in_progress", "arguments": ""}


def _response(reply: Reply, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.response_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.response_tokens,
    }
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": MODEL,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None if status == "in_progress" else usage,
    }
