"""One rollout's conversations with the policy, as contexts of tokens.

    call -> [longest known beginning] -- a context ends with it -> that context goes on: only what is new is rendered
                |                     -- a context went on from it -> a branch: its tokens are copied, without loss
                |                     -- there is none -> a new context, rendered whole
            [engine] -> ids, log-probabilities, versions -> recorded as they were sampled

The tokens of a context are what the engine was sent and what it sampled, in order, and nothing else (M5.1). A token
that was sampled bears loss once, in the context that sampled it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import LimitsConfig
from infra.errors import EngineError
from rollout.chat import truncate_middle
from rollout.context import Context, join
from rollout.engine import Engine, Generation
from rollout.gateway.messages import Call, Message, RefusedError, Reply
from rollout.gateway.rendering import Renderer
from rollout.trajectory import Payload, Status, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Where a reply ended: what a later call may go on from."""

    context: Context
    tokens: int
    messages: int
    """Messages up to and including the reply."""
    ended: bool
    turn: int


@dataclass(slots=True, kw_only=True)
class _Turn:
    action: str
    response_tokens: int
    observation: str = ""
    exit_code: int | None = None
    duration_s: float = 0.0


class Session:
    """What one rollout's harness asks for and gets. Belongs to one event loop."""

    def __init__(
        self,
        *,
        trajectory_id: str,
        engine: Engine,
        renderer: Renderer,
        limits: LimitsConfig,
        temperature: float,
    ) -> None:
        self.trajectory_id = trajectory_id
        self.temperature = temperature
        self.engine_s = 0.0
        """Seconds of waiting for generation, added up over calls."""
        self.continued = 0
        """Calls that went on where a context ended."""
        self.branches = 0
        """Calls that went on from an earlier reply, or beside a call under way."""
        self.restarts = 0
        """Calls after the first whose history held no beginning that ends in a reply: rewritten, or another agent's."""
        self.undelivered = 0
        """Calls whose client had gone before the answer: nothing of them is kept."""
        self.end: Status | None = None
        """The budget that is used up."""
        self.lost: EngineError | None = None
        """The engine was lost under a call."""
        self._engine = engine
        self._renderer = renderer
        self._limits = limits
        self._numbers = itertools.count()
        self._open = 0
        """Calls under way."""
        self._reserved = 0
        """Tokens that calls under way may still add."""
        self._contexts: list[Context] = []
        self._busy: set[Context] = set()
        """Those that a call under way goes on with."""
        self._points: dict[str, list[_Point]] = {}
        self._bodies: dict[str, tuple[int, ...]] = {}
        self._turns: list[_Turn] = []
        self._notes: dict[str, None] = {}
        self._closed = False

    async def call(self, call: Call, *, delivered: Callable[[], bool] = lambda: True) -> Reply:
        """One reply of the policy, recorded. `delivered` says, once it is there, whether its client still waits.

        Raises RefusedError for what is not served and where a budget is used up.
        """
        self._may_go_on()
        self._notes.update(dict.fromkeys(call.notes))
        chain = _chain(call)
        point = self._find(chain)
        known = point.context.token_ids[: point.tokens] if point is not None else []
        context = point.context if point is not None and self._is_end(point) else None
        new = self._new_tokens(call, point)
        added = len(new) + (len(known) if context is None else 0)
        budget = self._reserve(added, call.max_tokens)
        self._open += 1
        if context is not None:
            self._busy.add(context)
        try:
            generation = await self._generate([*known, *new], budget)
            if self._closed or not delivered():
                self.undelivered += 1
                raise RefusedError("the client has gone, or the rollout is over", status=403, kind="permission_error")
        finally:
            self._open -= 1
            self._reserved -= added + budget
            if context is not None:
                self._busy.remove(context)
        if context is not None:
            self.continued += 1
        else:
            context = self._begin(known, branch=point is not None)
        context.show(new)
        context.take(generation)
        return self._record(call, chain, point, context, generation, len(known) + len(new))

    def ran(self, exit_code: int | None, duration_s: float) -> None:
        """A command of the last reply was run by us; the transcript says how it ended."""
        if self._turns:
            self._turns[-1].exit_code = exit_code
            self._turns[-1].duration_s += duration_s

    def close(self) -> None:
        """The rollout is over: calls under way leave nothing, later ones are refused."""
        self._closed = True

    @property
    def drift(self) -> int:
        """Calls that did not just append."""
        return self.branches + self.restarts

    @property
    def contexts(self) -> int:
        """Contexts so far; each holds sampled tokens."""
        return len(self._contexts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first one that was sampled."""
        return self._contexts[0].sampled.index(True) if self._contexts else 0

    def notes(self) -> tuple[str, ...]:
        """What was asked for and had no effect, once each."""
        gone = (f"{self.undelivered} replies were not waited for",) if self.undelivered else ()
        return (*self._notes, *gone)

    def turns(self) -> tuple[Turn, ...]:
        """The calls as a transcript."""
        return tuple(
            Turn(
                action=turn.action,
                observation=turn.observation,
                exit_code=turn.exit_code,
                duration_s=turn.duration_s,
                response_tokens=turn.response_tokens,
            )
            for turn in self._turns
        )

    def payload(self) -> Payload:
        """All contexts, back to back, in the order in which they began."""
        return join(self._contexts)

    def _may_go_on(self) -> None:
        if self._closed:
            raise RefusedError("this rollout is over", status=401, kind="authentication_error")
        if self.lost is not None:
            raise RefusedError(
                "the policy's engine was lost; this rollout is over", status=403, kind="permission_error"
            )
        if len(self._turns) + self._open >= self._limits.max_turns:
            self.end = self.end or Status.TURN_LIMIT
        if self.end is not None:
            raise RefusedError(
                f"a budget of this rollout is used up ({self.end.value})", status=403, kind="permission_error"
            )

    def _find(self, chain: Sequence[str]) -> _Point | None:
        """The longest beginning of the conversation that ends in a reply; one where a context ends, if there is one."""
        for key in reversed(chain[:-1]):
            if points := self._points.get(key):
                return max(points, key=self._is_end)
        return None

    def _is_end(self, point: _Point) -> bool:
        """Whether its context can go on from here: nothing was appended since, and nothing is about to be."""
        return point.context not in self._busy and len(point.context.token_ids) == point.tokens

    def _begin(self, known: Sequence[int], *, branch: bool) -> Context:
        """A new context, which may begin with tokens of another one: those bear their loss there."""
        self.branches += branch
        self.restarts += not branch and bool(self._contexts)
        context = Context()
        context.show(known)
        self._contexts.append(context)
        return context

    def _new_tokens(self, call: Call, point: _Point | None) -> list[int]:
        if point is None:
            return self._renderer.start(call.messages, call.tools, self._sampled)
        return self._renderer.extend(call.messages, call.tools, self._sampled, known=point.messages, ended=point.ended)

    def _sampled(self, message: Message) -> Sequence[int] | None:
        return self._bodies.get(message.key())

    def _reserve(self, added: int, wanted: int | None) -> int:
        """Tokens that the reply may have. All contexts fit max_total_tokens, so one row of the learner."""
        total = sum(len(context.token_ids) for context in self._contexts)
        room = self._limits.max_total_tokens - total - self._reserved - added
        if room <= 0:
            self.end = self.end or Status.TOKEN_LIMIT
            raise RefusedError(
                f"{added} more tokens do not fit what is left of rollout.limits.max_total_tokens = "
                f"{self._limits.max_total_tokens}; this rollout is over",
                status=403,
                kind="permission_error",
            )
        budget = min(self._limits.max_turn_tokens, room, wanted or self._limits.max_turn_tokens)
        if wanted is not None and wanted > self._limits.max_turn_tokens:
            self._notes[f"max_tokens is at most rollout.limits.max_turn_tokens = {self._limits.max_turn_tokens}"] = None
        self._reserved += added + budget
        return budget

    async def _generate(self, prompt: Sequence[int], budget: int) -> Generation:
        begin_s = time.monotonic()
        try:
            return await self._engine.generate(
                request_id=f"{self.trajectory_id}/{next(self._numbers)}",
                prompt_ids=prompt,
                max_tokens=budget,
                temperature=self.temperature,
                stop_ids=self._renderer.chat.stop_ids,
            )
        except EngineError as error:
            self.lost = error
            raise RefusedError(
                "the policy's engine was lost; this rollout is over", status=403, kind="permission_error"
            ) from error
        finally:
            self.engine_s += time.monotonic() - begin_s

    def _record(
        self,
        call: Call,
        chain: Sequence[str],
        point: _Point | None,
        context: Context,
        generation: Generation,
        prompt_tokens: int,
    ) -> Reply:
        ended = generation.finish_reason == "stop"
        ids = generation.token_ids[:-1] if ended else generation.token_ids
        raw, number = self._renderer.chat.decode(ids), len(self._turns)
        text, calls = self._renderer.parse(raw, call.tools, f"call_{number}_")
        reply = Reply(
            reply_id=str(number),
            text=text,
            calls=tuple(calls),
            cut=not ended,
            prompt_tokens=prompt_tokens,
            response_tokens=len(generation.token_ids),
        )
        message = reply.message()
        if point is not None and not self._turns[point.turn].observation:
            shown = "\n".join(m.text for m in call.messages[point.messages :] if m.role != "assistant")
            self._turns[point.turn].observation = truncate_middle(shown, self._limits.observation_chars)
        self._turns.append(_Turn(action=raw, response_tokens=len(generation.token_ids)))
        self._bodies[message.key()] = ids
        self._points.setdefault(_link(chain[-1], message), []).append(
            _Point(
                context=context,
                tokens=len(context.token_ids),
                messages=len(call.messages) + 1,
                ended=ended,
                turn=number,
            )
        )
        return reply


def _chain(call: Call) -> list[str]:
    """One key for each beginning of the conversation: the tools and the first messages up to that one."""
    tools = json.dumps(call.tools, sort_keys=True)
    return list(itertools.accumulate(call.messages, _link, initial=tools))[1:]


def _link(before: str, message: Message) -> str:
    return hashlib.sha256(f"{before}{message.key()}".encode()).hexdigest()
