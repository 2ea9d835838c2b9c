"""Anthropic's messages: POST /v1/messages."""

from __future__ import annotations

import json
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
from rollout.gateway.openai_chat import MODEL


def read(fields: Any, *, temperature: float) -> Call:
    """A request's body. Raises RefusedError."""
    body = Body(fields, temperature=temperature)
    messages: list[Message] = []
    if system := parts(body.take("system", (str, list)), "system"):
        messages.append(Message(role="system", text=system))
    for index, item in enumerate(objects(body.take("messages", list), "messages")):
        messages += _messages(item, f"messages[{index}]")
    tools = tuple(_tool(item) for item in objects(body.take("tools", list, []), "tools"))
    max_tokens, stream_it = body.take("max_tokens", int), body.take("stream", bool, False)
    body.refuse("stop_sequences", ([],), "a reply ends where the policy ends it; cut it in the harness")
    if (choice := body.take("tool_choice", Mapping, {})) and choice.get("type") != "auto":
        raise RefusedError(f"tool_choice = {json.dumps(choice)[:80]} is not supported; the policy chooses")
    if (thinking := body.take("thinking", Mapping, {})) and thinking.get("type") != "disabled":
        raise RefusedError("thinking is not supported; what the policy says is returned as text")
    body.sampling()
    body.drop("model", "metadata", "service_tier")
    return Call(messages=checked(messages), tools=tools, max_tokens=max_tokens, stream=stream_it, notes=body.notes())


def answer(reply: Reply) -> dict[str, Any]:
    """A reply as one JSON object."""
    return {
        **_head(reply),
        "content": list(_blocks(reply)),
        "stop_reason": _stop_reason(reply),
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.response_tokens},
    }


def stream(reply: Reply) -> Iterator[tuple[str | None, Any]]:
    """A reply as server-sent events: (event name, JSON)."""
    for name, fields in _events(reply):
        yield name, {"type": name, **fields}


def failure(error: RefusedError) -> dict[str, Any]:
    """A refusal as Anthropic's clients read it."""
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}


def _events(reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield "message_start", {"message": {**_head(reply), "content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(_blocks(reply)):
        if block["type"] == "text":
            begun, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield "content_block_start", {"index": index, "content_block": begun}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ended = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
    yield "message_delta", {"delta": ended, "usage": {"output_tokens": reply.response_tokens}}
    yield "message_stop", {}


def _messages(item: Mapping[str, Any], where: str) -> Iterator[Message]:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant"):
        raise RefusedError(f"{where}.role = {role!r} is unknown; use user or assistant, and the field system")
    texts: list[Any] = []
    calls: list[ToolCall] = []
    for block in objects(content, f"{where}.content") if isinstance(content, list) else ():
        kind = block.get("type")
        if role == "assistant" and kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(ToolCall(call_id=str(block.get("id")), name=str(block.get("name")), arguments=arguments))
        elif role == "user" and kind == "tool_result":
            text = parts(block.get("content"), f"{where}.content")
            yield Message(role="tool", text=text, call_id=str(block.get("tool_use_id")))
        else:
            texts.append(block)
    text = parts(content if isinstance(content, str) else texts, f"{where}.content")
    if role == "assistant":
        yield Message(role="assistant", text=text, calls=tuple(calls))
    elif texts or isinstance(content, str):
        yield Message(role="user", text=text)


def _tool(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type", "custom") not in ("custom", None):
        raise RefusedError(f"a tool of type {item.get('type')!r} is not supported; only tools of the client are served")
    return function_tool(item.get("name"), item.get("description"), item.get("input_schema"))


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    if reply.text or not reply.calls:
        yield {"type": "text", "text": reply.text}
    for call in reply.calls:
        yield {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}


def _stop_reason(reply: Reply) -> str:
    return "max_tokens" if reply.cut else "tool_use" if reply.calls else "end_turn"


def _head(reply: Reply) -> dict[str, Any]:
    head = {"id": f"msg_{reply.reply_id}", "type": "message", "role": "assistant", "model": MODEL}
    return {**head, "stop_sequence": None}
