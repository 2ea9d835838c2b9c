"""Conversations as tokens, by the checkpoint's chat template. Pure.

The template renders marks in the place of message bodies; the text between marks is markup, and each body is encoded on
its own, as plain text, as `rollout.chat` does for the built-in loop. So nothing that a message says can end a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infra.errors import ConfigError
from rollout.chat import ChatFormat
from rollout.gateway.messages import Message, RefusedError, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}\s*(\{{.*?\}})\s*{_CLOSE}", re.DOTALL)
_PROBE = "ProbeTool7Q5"

Sampled = Callable[[Message], Sequence[int] | None]
"""Tokens that the policy sampled for an assistant's message, without its end; None for one that it did not."""


class Renderer:
    """The tokens of conversations with one checkpoint."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._calls = _renders_tools(chat)

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampled: Sampled) -> list[int]:
        """All tokens up to and including the next assistant header. Raises RefusedError."""
        markup = self._markup(messages, tools)
        ids = self.chat.markup(markup[0])
        for message, following in zip(messages, markup[1:], strict=True):
            ids += self._body(message, sampled)
            ids += self.chat.markup(following)
        return ids

    def extend(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampled: Sampled,
        *,
        known: int,
        ended: bool,
    ) -> list[int]:
        """The tokens that follow a reply of the policy, which is message `known` - 1, up to the next assistant header.

        `ended`: it sampled its stop token itself. Raises RefusedError.
        """
        markup = self._markup(messages, tools)
        closing = self.chat.markup(markup[known])
        ids = list(self.chat.after_stop(closing)) if ended else closing
        for message, following in zip(messages[known:], markup[known + 1 :], strict=True):
            ids += self._body(message, sampled)
            ids += self.chat.markup(following)
        return ids

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], call_prefix: str) -> tuple[str, list[ToolCall]]:
        """What the policy said, as text and calls of tools. What is no well-formed call stays text."""
        if not tools:
            return text, []
        calls: list[ToolCall] = []

        def read(match: re.Match[str]) -> str:
            try:
                call = json.loads(match[1])
                name, arguments = call["name"], call.get("arguments", {})
            except (ValueError, KeyError, TypeError, AttributeError):
                return match[0]
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return match[0]
            calls.append(
                ToolCall(
                    call_id=f"{call_prefix}{len(calls)}", name=name, arguments=json.dumps(arguments, ensure_ascii=False)
                )
            )
            return ""

        rest = _CALL.sub(read, text)
        return (rest.strip(), calls) if calls else (text, [])

    def _markup(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """The template's text around the messages' bodies: one piece before each, and one at the end."""
        if not self._calls and (tools or any(m.calls or m.role == "tool" for m in messages)):
            raise RefusedError(
                f"the checkpoint's chat template renders no tools in the form {_OPEN}{{...}}{_CLOSE}; use a harness "
                "that writes its actions as text, or a checkpoint whose template renders them so"
            )
        marks = [f"Mark{index}Q7x" for index in range(len(messages))]
        rendered: list[dict[str, Any]] = []
        names = {call.call_id: call.name for message in messages for call in message.calls}
        for message, mark in zip(messages, marks, strict=True):
            entry: dict[str, Any] = {"role": message.role, "content": mark}
            if message.role == "tool":
                entry |= {"tool_call_id": message.call_id, "name": names.get(message.call_id or "", "")}
            rendered.append(entry)
        try:
            rest = self.chat.render(rendered, tools)
        except ConfigError as error:
            raise RefusedError(error.message) from error
        pieces: list[str] = []
        for index, mark in enumerate(marks):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise RefusedError(f"the chat template does not render message {index} exactly once, in its place")
            pieces.append(before)
        return [*pieces, rest]

    def _body(self, message: Message, sampled: Sampled) -> list[int]:
        if message.role != "assistant":
            return self.chat.encode(message.text)
        if (known := sampled(message)) is not None:
            return list(known)  # never tokenised again
        ids = self.chat.encode(message.text)
        for index, call in enumerate(message.calls):
            # As the templates of this form do; the wrapper may be tokens of its own, the policy's words never are.
            ids += self.chat.markup(("\n" if index or message.text else "") + _OPEN + "\n")
            ids += self.chat.encode(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}')
            ids += self.chat.markup("\n" + _CLOSE)
        return ids


def _renders_tools(chat: ChatFormat) -> bool:
    """Whether the template shows tools to the policy, and has it call them as JSON between <tool_call> tags."""
    if _OPEN not in chat.template:
        return False
    tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
    try:
        return _PROBE in chat.render([{"role": "user", "content": "x"}], [tool])
    except ConfigError:
        return False
