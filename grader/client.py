"""The grader's model: a vLLM engine pool of our own, or an OpenAI-compatible endpoint, behind one protocol.

A dialogue is multi-turn, so that a model can be told what was wrong with its answer, or be given results it asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from configs.schema import EndpointGraderBackend, GraderConfig, VllmGraderBackend
from grader.endpoint import Endpoint
from infra.errors import ConfigError, GraderError
from rollout.chat import ChatFormat
from rollout.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer of the model."""

    text: str
    complete: bool
    """False if it was cut at its token limit."""
    prompt_tokens: int
    completion_tokens: int


class PromptTooLongError(GraderError):
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

    async def ask(self, schema: str | None) -> Completion:
        """Let the model answer; `schema` (JSON) is enforced where the backend can.

        Raises:
            EngineError: the engine was lost or refused.
            GraderError: the endpoint gave no usable answer; PromptTooLongError: the context is full.
        """
        ...

    def tell(self, text: str) -> None:
        """Append a user message after the model's last answer."""
        ...


class GraderModel(Protocol):
    """A model that grades."""

    name: str

    def open(self, *, system: str | None, user: str, request_id: str) -> Dialogue:
        """Start a dialogue. `request_id` is unique; the part before its first "/" is the group.

        Raises:
            PromptTooLongError: the prompt does not fit.
        """
        ...

    async def close(self) -> None:
        """Free connections."""
        ...


class EngineModel:
    """Tokens in, tokens out on an engine pool; the JSON schema is enforced by vLLM's structured outputs."""

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

    async def close(self) -> None:
        """The pool belongs to the driver."""


class EngineDialogue:
    """The token list only ever grows, so each turn reuses the prefix cache."""

    def __init__(self, model: EngineModel, ids: Sequence[int], request_id: str) -> None:
        self._model = model
        self._ids = list(ids)
        self._request_id = request_id
        self._turn = 0
        self._ended = False
        self._check()

    def _check(self) -> None:
        if len(self._ids) > self._model.limit_tokens:
            raise PromptTooLongError(len(self._ids), self._model.limit_tokens)

    async def ask(self, schema: str | None) -> Completion:
        """See `Dialogue.ask`."""
        self._check()
        model, prompt = self._model, tuple(self._ids)
        generation = await model.engine.generate(
            request_id=f"{self._request_id}.{self._turn}",
            prompt_ids=prompt,
            max_tokens=model.max_tokens,
            temperature=model.temperature,
            stop_ids=model.chat.stop_ids,
            json_schema=schema,
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

    def tell(self, text: str) -> None:
        """See `Dialogue.tell`."""
        self._ids += self._model.chat.extend(text, ended=self._ended)


class EndpointModel:
    """Chat completions of an OpenAI-compatible endpoint."""

    def __init__(self, backend: EndpointGraderBackend, config: GraderConfig, *, api_key: str | None) -> None:
        self.name = backend.model
        self.structured = backend.structured
        self.max_tokens = config.max_tokens
        self.temperature = config.temperature
        self.endpoint = Endpoint(
            backend, api_key=api_key, concurrency=max(1, backend.max_concurrency // config.workers)
        )

    def open(self, *, system: str | None, user: str, request_id: str) -> EndpointDialogue:
        """See `GraderModel.open`."""
        return EndpointDialogue(self, system, user)

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()


class EndpointDialogue:
    """Messages, as chat completions want them."""

    def __init__(self, model: EndpointModel, system: str | None, user: str) -> None:
        self._model = model
        self._messages = [{"role": "system", "content": system}] if system is not None else []
        self._messages.append({"role": "user", "content": user})

    async def ask(self, schema: str | None) -> Completion:
        """See `Dialogue.ask`."""
        model = self._model
        answer = await model.endpoint.complete(
            self._messages,
            max_tokens=model.max_tokens,
            temperature=model.temperature,
            response_format=_response_format(model.structured, schema),
        )
        self._messages.append({"role": "assistant", "content": answer.text})
        return Completion(
            text=answer.text,
            complete=answer.finish_reason != "length",
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
        )

    def tell(self, text: str) -> None:
        """See `Dialogue.tell`."""
        self._messages.append({"role": "user", "content": text})


def _response_format(structured: str, schema: str | None) -> dict[str, Any] | None:
    if schema is None or structured == "none":
        return None
    if structured == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": json.loads(schema)},
    }


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
    return EndpointModel(backend, config, api_key=os.environ.get(backend.api_key_env))


class ScriptedModel:
    """A model for tests: answers come from a function of (prompt so far, number of the question)."""

    def __init__(self, respond: Callable[[str, int], str | Completion], *, delay_s: float = 0.0) -> None:
        self.name = "scripted"
        self.respond = respond
        self.delay_s = delay_s
        self.schemas: list[str | None] = []
        self.closed = False

    def open(self, *, system: str | None, user: str, request_id: str) -> ScriptedDialogue:
        """See `GraderModel.open`."""
        return ScriptedDialogue(self, f"{system or ''}{user}")

    async def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True


class ScriptedDialogue:
    """Counts one token a character."""

    def __init__(self, model: ScriptedModel, text: str) -> None:
        self._model = model
        self._text = text
        self._asked = 0

    async def ask(self, schema: str | None) -> Completion:
        """See `Dialogue.ask`; whatever the function raises is raised here."""
        self._model.schemas.append(schema)
        await asyncio.sleep(self._model.delay_s)
        answer = self._model.respond(self._text, self._asked)
        self._asked += 1
        if isinstance(answer, Completion):
            return answer
        return Completion(text=answer, complete=True, prompt_tokens=len(self._text), completion_tokens=len(answer))

    def tell(self, text: str) -> None:
        """See `Dialogue.tell`."""
        self._text += text
