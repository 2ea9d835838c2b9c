"""Contexts of tokens: what the learner gets is what the engine was sent and sampled, whatever a harness does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from sampling_engine import SamplingEngine

from configs.schema import LimitsConfig
from infra.errors import EngineError
from rollout.chat import ChatFormat
from rollout.engine import ScriptedEngine
from rollout.gateway.messages import Call, Message, RefusedError
from rollout.gateway.rendering import Renderer
from rollout.gateway.session import Session
from rollout.trajectory import Payload, Status
from tests.bench.exact import EngineCall, differences

LIMITS = LimitsConfig(max_turns=40, max_turn_tokens=16, max_total_tokens=20_000)


@pytest.fixture(scope="module")
def chat(tokenizer_dir: str) -> ChatFormat:
    return ChatFormat.load(tokenizer_dir)


def make(chat: ChatFormat, engine: object, limits: LimitsConfig = LIMITS, name: str = "g/0.0") -> Session:
    return Session(
        trajectory_id=name,
        engine=engine,  # type: ignore[arg-type]
        renderer=Renderer(chat),
        limits=limits,
        temperature=1.0,
    )


def sampling(chat: ChatFormat, seed: int = 0) -> SamplingEngine:
    return SamplingEngine([i for i in range(5, 290) if i not in chat.stop_ids], seed=seed)


def user(text: str) -> Message:
    return Message(role="user", text=text)


async def say(session: Session, *messages: Message) -> Message:
    return (await session.call(Call(messages=messages))).message()


def check_exact(payload: Payload, engine: SamplingEngine, session_id: str) -> None:
    """The payload is what the engine was sent and sampled, and nothing else."""
    calls = [
        EngineCall(
            request_id=name,
            prompt_ids=prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
        )
        for name, prompt, sampled in engine.sampled
        if name.startswith(f"{session_id}/")
    ]
    assert calls
    assert differences(payload, calls) == []


async def test_what_is_appended_goes_on_with_the_sampled_tokens(chat: ChatFormat) -> None:
    # Six one-byte tokens where the tokenizer would have merged some: re-tokenised they would be fewer.
    one_by_one = [token for char in "cat -n" for token in chat.encode(char)]
    assert chat.encode("cat -n") != one_by_one
    engine = ScriptedEngine(lambda name, prompt: [*one_by_one, chat.end_id])
    session = make(chat, engine)
    first = [user("go")]
    reply = await say(session, *first)
    assert reply.text == "cat -n"
    await say(session, *first, reply, user("out"))
    payload = session.payload()
    expected = [
        *chat.initial(None, "go"), *one_by_one, chat.end_id, *chat.extend("out", ended=True), *one_by_one, chat.end_id,
    ]  # fmt: skip
    assert payload.token_ids.tolist() == expected
    assert payload.contexts == (0,) and session.drift == 0 and session.continued == 1
    turns = session.turns()
    assert [(t.action, t.observation) for t in turns] == [("cat -n", "out"), ("cat -n", "")]


async def test_a_reply_cut_at_its_limit_is_closed_without_loss(chat: ChatFormat) -> None:
    letters = chat.encode("a")
    session = make(chat, ScriptedEngine(lambda name, prompt: letters * 40))
    reply = await session.call(Call(messages=(user("go"),), max_tokens=3))
    assert reply.cut and reply.response_tokens == 3
    await say(session, user("go"), reply.message(), user("on"))
    start = len(chat.initial(None, "go")) + 3
    extension = chat.extend("on", ended=False)
    payload = session.payload()
    assert payload.token_ids[start : start + len(extension)].tolist() == extension
    assert not payload.loss_mask[start : start + len(extension)].any()


async def test_fifty_rollouts_of_harnesses_that_append_branch_and_rewrite_are_token_exact(chat: ChatFormat) -> None:
    engine, rng = sampling(chat), random.Random(7)
    kinds = {"continued": 0, "branches": 0, "restarts": 0}
    for number in range(50):
        session = make(chat, engine, name=f"g{number}/0.0")
        histories: list[list[Message]] = [[Message(role="system", text="be brief"), user(f"task {number}")]]
        for turn in range(8):
            history = rng.choice(histories)
            before = (session.continued, session.branches, session.restarts)
            what = rng.random()
            if what < 0.15 and len(history) > 3:  # compaction
                history[:] = [history[0], user(f"summary {turn}: {history[2].text}")]
            elif what < 0.3:  # a sub-agent
                histories.append(history := [user(f"subtask {turn}")])
            elif what < 0.45 and len(history) > 4:  # from an earlier reply, in another way
                histories.append(history := [*history[:3], user(f"other {turn}")])
            at_once = 2 if rng.random() < 0.2 else 1
            replies = await asyncio.gather(*(say(session, *history) for _ in range(at_once)))
            history += [replies[0], user(f"observation {turn} " + "x" * rng.randint(0, 30))]
            after = (session.continued, session.branches, session.restarts)
            assert sum(after) - sum(before) == at_once - (turn == 0)
        payload = session.payload()
        assert len(payload.contexts) == session.contexts == 1 + session.drift
        assert not payload.loss_mask[list(payload.contexts)].any()
        check_exact(payload, engine, f"g{number}/0.0")
        for kind in kinds:
            kinds[kind] += getattr(session, kind)
    assert min(kinds.values()) > 20  # each of them was there


async def test_calls_under_way_at_once_never_share_a_context(chat: ChatFormat) -> None:
    engine = sampling(chat)
    session = make(chat, engine)
    reply = await say(session, user("go"))
    history = (user("go"), reply)
    await asyncio.gather(*(say(session, *history, user(f"part {i}")) for i in range(3)))
    assert (session.continued, session.branches, session.restarts) == (1, 2, 0)
    payload = session.payload()
    assert len(payload.contexts) == 3
    check_exact(payload, engine, "g/0.0")


async def test_history_that_is_kept_after_a_rewrite_is_not_tokenised_again(chat: ChatFormat) -> None:
    one_by_one = [token for char in "cat -n" for token in chat.encode(char)]
    session = make(chat, ScriptedEngine(lambda name, prompt: [*one_by_one, chat.end_id]))
    reply = await say(session, user("go"))
    await say(session, user("the task, shorter"), reply, user("out"))
    assert session.restarts == 1
    second = session.payload().token_ids.tolist()[session.payload().contexts[1] :]
    head = chat.initial(None, "the task, shorter")
    assert second[: len(head) + len(one_by_one)] == [*head, *one_by_one]


async def test_a_client_that_trims_the_reply_goes_on_all_the_same(chat: ChatFormat) -> None:
    session = make(chat, ScriptedEngine(lambda name, prompt: [*chat.encode(" ls\n"), chat.end_id]))
    await say(session, user("go"))
    await say(session, user("go"), Message(role="assistant", text="ls"), user("out"))
    assert (session.continued, session.drift) == (1, 0)


async def test_budgets_hold_over_all_contexts(chat: ChatFormat) -> None:
    limits = LimitsConfig(max_turns=3, max_turn_tokens=8, max_total_tokens=2000)
    session = make(chat, sampling(chat), limits)
    for index in range(3):
        await say(session, user(f"agent {index}"))
    with pytest.raises(RefusedError, match="turn_limit") as refused:
        await say(session, user("agent 3"))
    assert refused.value.status == 403 and session.end is Status.TURN_LIMIT

    limits = LimitsConfig(max_turns=99, max_turn_tokens=16, max_total_tokens=150)
    session = make(chat, sampling(chat), limits)
    with pytest.raises(RefusedError, match="max_total_tokens"):
        await asyncio.gather(*(say(session, user(f"agent {index}")) for index in range(30)))
    await asyncio.sleep(0.01)
    assert session.end is Status.TOKEN_LIMIT
    assert 60 < len(session.payload().token_ids) <= 150


async def test_nothing_is_kept_of_a_reply_that_nobody_waits_for(chat: ChatFormat) -> None:
    engine = sampling(chat)
    session = make(chat, engine)
    reply = await say(session, user("go"))
    before = session.payload().sha256()
    with pytest.raises(RefusedError, match="gone"):
        await session.call(Call(messages=(user("go"), reply, user("on"))), delivered=lambda: False)
    assert session.payload().sha256() == before
    assert session.notes() == ("1 replies were not waited for",)
    await say(session, user("go"), reply, user("on"))  # the same again goes on where it was
    assert (session.continued, session.drift) == (1, 0)


async def test_a_call_that_is_cancelled_or_late_leaves_nothing(chat: ChatFormat) -> None:
    engine = sampling(chat)
    session = make(chat, engine)
    engine.hold = asyncio.Event()
    first = asyncio.ensure_future(say(session, user("go")))
    late = asyncio.ensure_future(say(session, user("go")))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    session.close()
    engine.hold.set()
    with pytest.raises(RefusedError):
        await late
    assert session.contexts == 0
    with pytest.raises(RefusedError) as refused:
        await say(session, user("go"))
    assert refused.value.status == 401


async def test_a_lost_engine_is_remembered(chat: ChatFormat) -> None:
    def lose(name: str, prompt: Sequence[int]) -> Sequence[int]:
        raise EngineError("gone")

    session = make(chat, ScriptedEngine(lose))
    for _ in range(2):
        with pytest.raises(RefusedError, match="engine was lost"):
            await say(session, user("go"))
    assert session.lost is not None and session.lost.message == "gone"
