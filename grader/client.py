"""The grader's model: a vLLM engine pool of our own, or an OpenAI-compatible endpoint, behind one protocol.

A dialogue only ever grows, so every turn finds the turns before it in the prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from configs.schema import EndpointGraderBackend, GraderConfig, VllmGraderBackend
from grader.endpoint import ContextFullError, Endpoint, NativeCall
from grader.strict_json import MAX_CHARS
from infra.errors import ConfigError
from rollout.chat import ChatFormat
from rollout.engine import Engine

if TYPE_CHECKING:
    from grader.offers import Offer

_CHARS_PER_TOKEN = 3
"""Of text that an endpoint has not counted yet; rather too many tokens than too few."""
_NAME_CHARS = 64
_NOT_IN_A_NAME = re.compile("[^A-Za-z0-9_-]")
_MESSAGE_TOKENS = 8
"""What chat markup adds to a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer of the model."""

    text: str
    calls: tuple[NativeCall, ...] = ()
    """Calls that the model made natively; a model without native calling writes them into `text`."""
    complete: bool
    """False if it was cut at its token limit."""
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One thing that the model is told: what a call gave, or a remark of ours."""

    text: str
    call_id: str | None = None
    """The native call that it answers; None: a line of the next user message."""


class PromptTooLongError(ContextFullError):
    """The prompt and the answer's budget do not fit the model's context."""

    def __init__(self, prompt_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; with max_tokens left for the answer {limit_tokens} fit"
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens

    def __reduce__(self) -> tuple[type[PromptTooLongError], tuple[int, int]]:
        return type(self), (self.prompt_tokens, self.limit_tokens)


class Dialogue(Protocol):
    """One conversation with the model about one group."""

    @property
    def limit_tokens(self) -> int | None:
        """The longest prompt that leaves room for an answer; None if nobody knows."""
        ...

    def length(self, results: Sequence[Result] = ()) -> int:
        """Tokens of the next prompt if these results were told; an estimate where only the server can count."""
        ...

    async def ask(self, offer: Offer) -> Completion:
        """Let the model answer with calls of the offer; the backend enforces them as far as it can.

        Raises:
            EngineError: the engine was lost or refused.
            GraderError: the endpoint gave no usable answer; ContextFullError: the conversation does not fit;
                EndpointLostError: the endpoint is away.
        """
        ...

    def tell(self, results: Sequence[Result]) -> None:
        """Continue after the model's last answer. Every native call of that answer is answered, if only as skipped."""
        ...


class GraderModel(Protocol):
    """A model that grades."""

    name: str
    native: bool
    """Whether it calls tools natively; if not, it writes its calls as JSON."""

    def open(self, *, system: str | None, user: str, request_id: str) -> Dialogue:
        """Start a dialogue. `request_id` is unique; the part before its first "/" is the group.

        Raises:
            PromptTooLongError: the prompt does not fit.
        """
        ...

    @property
    def lost(self) -> str | None:
        """Why the model's endpoint was lost at its last request; None since it answered, and where there is
        none."""
        ...

    async def probe(self) -> str | None:
        """Asks the endpoint whether it answers: None if it does, else why not."""
        ...

    async def close(self) -> None:
        """Free connections."""
        ...


class EngineModel:
    """Tokens in, tokens out on an engine pool; the JSON schema is enforced by vLLM's structured outputs."""

    native = False
    lost = None

    def __init__(
        self, engine: Engine, chat: ChatFormat, config: GraderConfig, *, name: str, max_model_len: int
    ) -> None:
        self.name = name
        self.engine = engine
        self.chat = chat
        self.max_tokens = config.max_tokens
        self.temperature = config.temperature
        self.limit_tokens = max_model_len - config.max_tokens

    def open(self, *, system: str | None, user: str, request_id: str) -> EngineDialogue:
        """See `GraderModel.open`. A template without system messages gets the instructions in front of the material."""
        try:
            ids = self.chat.initial(system, user)
        except ConfigError:
            ids = self.chat.initial(None, f"{system}\n\n{user}")
        return EngineDialogue(self, ids, request_id)

    async def probe(self) -> str | None:
        """There is no endpoint; a lost engine is replaced by its pool."""
        return None

    async def close(self) -> None:
        """The pool belongs to the driver."""


class EngineDialogue:
    """Calls are written as a JSON object; what they gave is told as one user message."""

    def __init__(self, model: EngineModel, ids: Sequence[int], request_id: str) -> None:
        self._model = model
        self._ids = list(ids)
        self._request_id = request_id
        self._turn = 0
        self._ended = False
        self._check()

    @property
    def limit_tokens(self) -> int:
        """See `Dialogue.limit_tokens`."""
        return self._model.limit_tokens

    def _check(self) -> None:
        if len(self._ids) > self.limit_tokens:
            raise PromptTooLongError(len(self._ids), self.limit_tokens)

    def length(self, results: Sequence[Result] = ()) -> int:
        """See `Dialogue.length`."""
        return len(self._ids) + (len(self._extension(results)) if results else 0)

    async def ask(self, offer: Offer) -> Completion:
        """See `Dialogue.ask`."""
        self._check()
        model, prompt = self._model, tuple(self._ids)
        generation = await model.engine.generate(
            request_id=f"{self._request_id}.{self._turn}",
            prompt_ids=prompt,
            max_tokens=model.max_tokens,
            temperature=model.temperature,
            stop_ids=model.chat.stop_ids,
            json_schema=offer.schema,
        )
        self._turn += 1
        self._ids += generation.token_ids
        self._ended = model.chat.ended(generation.token_ids)
        return Completion(
            text=model.chat.decode(generation.token_ids),
            complete=generation.finish_reason == "stop",
            prompt_tokens=len(prompt),
            completion_tokens=len(generation.token_ids),
        )

    def tell(self, results: Sequence[Result]) -> None:
        """See `Dialogue.tell`."""
        self._ids += self._extension(results)

    def _extension(self, results: Sequence[Result]) -> list[int]:
        return self._model.chat.extend("\n".join(result.text for result in results), ended=self._ended)


class EndpointModel:
    """Chat completions of an OpenAI-compatible endpoint."""

    def __init__(self, backend: EndpointGraderBackend, config: GraderConfig, *, api_key: str | None) -> None:
        self.name = backend.model
        self.structured = backend.structured
        self.native = backend.tool_calling
        self.max_tokens = config.max_tokens
        self.temperature = config.temperature
        self.endpoint = Endpoint(
            backend, api_key=api_key, concurrency=max(1, backend.max_concurrency // config.workers)
        )

    def open(self, *, system: str | None, user: str, request_id: str) -> EndpointDialogue:
        """See `GraderModel.open`."""
        return EndpointDialogue(self, system, user)

    @property
    def lost(self) -> str | None:
        """See `GraderModel.lost`."""
        return self.endpoint.lost

    async def probe(self) -> str | None:
        """See `GraderModel.probe`."""
        return await self.endpoint.probe()

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()


class EndpointDialogue:
    """Messages, as chat completions want them. An offer without tools asks for JSON whatever the model can call."""

    def __init__(self, model: EndpointModel, system: str | None, user: str) -> None:
        self._model = model
        self._messages: list[dict[str, Any]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._messages.append({"role": "user", "content": user})
        self._length = _estimate(*self._messages)
        self._unanswered: list[str] = []

    @property
    def limit_tokens(self) -> None:
        """See `Dialogue.limit_tokens`: no endpoint says how long a conversation its model reads."""
        return None

    def length(self, results: Sequence[Result] = ()) -> int:
        """See `Dialogue.length`."""
        return self._length + _estimate(*self._messages_of(results))

    async def ask(self, offer: Offer) -> Completion:
        """See `Dialogue.ask`."""
        model = self._model
        native = bool(offer.tools) and model.native
        answer = await model.endpoint.complete(
            self._messages,
            max_tokens=model.max_tokens,
            temperature=model.temperature,
            response_format=None if native else _response_format(model.structured, offer.schema),
            tools=offer.tools if native else (),
            tool_choice=_tool_choice(offer) if native else None,
        )
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message = {"role": "assistant", "content": answer.text or None, "tool_calls": [*map(_echo, answer.calls)]}
        self._messages.append(message)
        self._unanswered = [call.call_id for call in answer.calls]
        counted = answer.prompt_tokens + answer.completion_tokens
        self._length = counted or self._length + _estimate(message)
        return Completion(
            text=answer.text,
            calls=answer.calls,
            complete=answer.finish_reason != "length",
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
        )

    def tell(self, results: Sequence[Result]) -> None:
        """See `Dialogue.tell`."""
        messages = self._messages_of(results)
        self._length += _estimate(*messages)
        self._messages += messages
        self._unanswered = []

    def _messages_of(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        """One tool message a native call, in the calls' order, then one user message of everything else."""
        texts = {result.call_id: result.text for result in results if result.call_id is not None}
        messages: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call_id, "content": texts.get(call_id, "error: not carried out")}
            for call_id in self._unanswered
        ]
        remarks = [result.text for result in results if result.call_id is None]
        return [*messages, {"role": "user", "content": "\n".join(remarks)}] if remarks else messages


def _echo(call: NativeCall) -> dict[str, Any]:
    """A call as the next request repeats it. Servers refuse arguments that are no JSON object, so these become {}, and
    names with other characters, so those become "_". What is too long to be read is not sent again either."""
    try:
        readable = len(call.arguments) <= MAX_CHARS and isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        readable = False
    name = _NOT_IN_A_NAME.sub("_", call.name[:_NAME_CHARS]) or "_"
    function = {"name": name, "arguments": call.arguments if readable else "{}"}
    return {"id": call.call_id, "type": "function", "function": function}


def _estimate(*messages: dict[str, Any]) -> int:
    """Tokens of messages that nobody counted."""
    chars = sum(len(m["content"] or "") + len(json.dumps(m.get("tool_calls", ""))) for m in messages)
    return chars // _CHARS_PER_TOKEN + _MESSAGE_TOKENS * len(messages)


def _tool_choice(offer: Offer) -> str | dict[str, Any]:
    """Every message must call; where only one call is left, that one."""
    names = [tool["function"]["name"] for tool in offer.tools]
    return {"type": "function", "function": {"name": names[0]}} if len(names) == 1 else "required"


def _response_format(structured: str, schema: str) -> dict[str, Any] | None:
    if structured == "none":
        return None
    if structured == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(schema)}}


def make_model(config: GraderConfig, engine: Engine | None) -> GraderModel:
    """The model a configuration names. The endpoint's key comes from the environment, never from the configuration.

    Raises:
        ConfigError: the vllm backend without an engine, or a checkpoint folder without tokenizer or chat template.
    """
    backend = config.backend
    if isinstance(backend, VllmGraderBackend):
        if engine is None:
            raise ConfigError("grader.backend.type=vllm needs the grader's engine pool; start it before the graders")
        chat = ChatFormat.load(backend.engine.model)
        return EngineModel(engine, chat, config, name=backend.engine.model, max_model_len=backend.engine.max_model_len)
    return EndpointModel(backend, config, api_key=_key(backend.api_key_env))


def _key(name: str) -> str | None:
    """The key in an environment variable, without the newline that files of keys end with.

    Raises:
        ConfigError: no HTTP header can carry it. The message does not show it.
    """
    key = os.environ.get(name, "").strip()
    if not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"the key in {name} holds a space, a control character or a letter beyond ASCII; set it anew")
    return key or None


class ScriptedModel:
    """A model for tests: answers come from a function of (what it was told so far, number of the question)."""

    def __init__(
        self,
        respond: Callable[[str, int], str | Completion],
        *,
        delay_s: float = 0.0,
        native: bool = False,
        limit_tokens: int | None = None,
    ) -> None:
        self.name = "scripted"
        self.limit_tokens = limit_tokens
        self.native = native
        self.respond = respond
        self.delay_s = delay_s
        self.lost: str | None = None
        self.dialogues: list[ScriptedDialogue] = []
        """Every dialogue, in the order in which they were opened."""
        self.closed = False

    def open(self, *, system: str | None, user: str, request_id: str) -> ScriptedDialogue:
        """See `GraderModel.open`."""
        self.dialogues.append(ScriptedDialogue(self, system, user, request_id))
        return self.dialogues[-1]

    async def probe(self) -> str | None:
        """What the test set."""
        return self.lost

    async def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True


class ScriptedDialogue:
    """Counts one token a character."""

    def __init__(self, model: ScriptedModel, system: str | None, user: str, request_id: str) -> None:
        self._model = model
        self.limit_tokens = model.limit_tokens
        self.request_id = request_id
        self.messages = [("system", system)] if system is not None else []
        """(role, text) of the conversation so far; roles are system, user, assistant and tool."""
        self.messages.append(("user", user))
        self.offers: list[Offer] = []
        """What could be answered, question by question."""

    def length(self, results: Sequence[Result] = ()) -> int:
        """See `Dialogue.length`."""
        return sum(len(text) for _, text in [*self.messages, *_roles(results)])

    async def ask(self, offer: Offer) -> Completion:
        """See `Dialogue.ask`; whatever the function raises is raised here."""
        told = "\n".join(text for role, text in self.messages if role != "assistant")
        self.offers.append(offer)
        await asyncio.sleep(self._model.delay_s)
        answer = self._model.respond(told, len(self.offers) - 1)
        if isinstance(answer, str):
            length = self.length()
            answer = Completion(text=answer, complete=True, prompt_tokens=length, completion_tokens=len(answer))
        self.messages.append(("assistant", answer.text))
        return answer

    def tell(self, results: Sequence[Result]) -> None:
        """See `Dialogue.tell`."""
        self.messages += _roles(results)


def _roles(results: Sequence[Result]) -> list[tuple[str, str]]:
    remarks = "\n".join(result.text for result in results if result.call_id is None)
    tools = [("tool", result.text) for result in results if result.call_id is not None]
    return [*tools, ("user", remarks)] if remarks else tools
