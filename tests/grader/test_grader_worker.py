"""The worker: one group in, one grade or one reason out, whatever the model does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from grader_parts import CLEAN, HARDCODED, NOISY, grader_config, request_of
from test_endpoint import completion, serving
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from configs.schema import RubricConfig
from grader.client import Completion, EndpointModel, EngineModel, ScriptedModel, make_model
from grader.exchange import accept
from grader.scripted import ScriptedGrader
from grader.verdict import FallbackReason
from grader.worker import GraderWorker
from infra.errors import ConfigError, EngineError, GraderError
from rollout.chat import ChatFormat
from rollout.engine import ScriptedEngine

OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)]
R = FallbackReason


def good_answer(order_seed: int = 5) -> str:
    request, transcripts = request_of(OUTCOMES, order_seed=order_seed)
    return ScriptedGrader().reply(request, *transcripts).verdict or ""


def worker(model: Any, **changes: Any) -> GraderWorker:
    return GraderWorker(grader_config(**changes), RubricConfig(), model=model)


async def test_a_good_answer_is_a_grade() -> None:
    request, transcripts = request_of(OUTCOMES, submitted_unix_s=time.time() - 2.5)
    model = ScriptedModel(lambda prompt, n: good_answer())
    reply = accept(request, await worker(model).grade(request, *transcripts[::-1]))
    assert reply.fallback_reason is None
    assert reply.grade is not None
    assert {i: c.factor for i, c in reply.grade.candidates.items()} == {"g1/0.0": 1.0, "g1/1.0": 0.85, "g1/2.0": 1.0}
    assert (reply.turns, reply.model, reply.order_seed) == (1, "scripted", 5)
    assert reply.verdict == good_answer()
    assert reply.prompt_tokens > 100
    assert reply.completion_tokens == len(good_answer())
    assert 2.5 <= reply.queue_s < 30
    assert 0 <= reply.run_s < 5
    assert json.loads(model.schemas[0] or "")["required"] == ["candidates", "ranking", "hacks"]


def raising(error: Exception) -> Any:
    def respond(prompt: str, n: int) -> str:
        raise error

    return respond


def saying(text: str, *, complete: bool = True) -> Any:
    return lambda prompt, n: Completion(text=text, complete=complete, prompt_tokens=1, completion_tokens=1)


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (saying(good_answer(), complete=False), R.TRUNCATED),
        (saying("I would rather not."), R.NOT_JSON),
        (saying("{}"), R.SCHEMA),
        (saying(good_answer().replace('"scores":[5', '"scores":[6', 1)), R.BAD_SCORE),
        (raising(EngineError("the engine was lost")), R.ENGINE_ERROR),
        (raising(GraderError("HTTP 400")), R.ENDPOINT_ERROR),
        (raising(ZeroDivisionError("a fault of ours")), R.GRADER_ERROR),
        (raising(RecursionError()), R.GRADER_ERROR),
    ],
)
async def test_faults_are_reasons(respond: Any, reason: FallbackReason) -> None:
    request, transcripts = request_of(OUTCOMES)
    reply = accept(request, await worker(ScriptedModel(respond)).grade(request, *transcripts))
    assert reply.grade is None
    assert reply.fallback_reason is reason
    assert reply.detail
    json.dumps(reply.audit())


async def test_a_slow_model_is_a_timeout() -> None:
    request, transcripts = request_of(OUTCOMES)
    model = ScriptedModel(lambda prompt, n: good_answer(), delay_s=30.0)
    reply = await worker(model, timeout_s=0.1).grade(request, *transcripts)
    assert reply.fallback_reason is R.TIMEOUT
    assert 0.1 <= reply.run_s < 10


@pytest.mark.parametrize(
    "change",
    [
        lambda r, t: (dataclasses.replace(r, base_state="0" * 64), t),
        lambda r, t: (r, t[:-1]),
        lambda r, t: (r, [*t[:-1], t[0]]),
        lambda r, t: (dataclasses.replace(r, group_id="g2"), t),
    ],
)
async def test_what_does_not_belong_together_is_never_sent(change: Any) -> None:
    request, transcripts = change(*request_of(OUTCOMES))
    model = ScriptedModel(lambda prompt, n: good_answer())
    reply = await worker(model).grade(request, *transcripts)
    assert reply.fallback_reason is R.MISMATCH
    assert not model.schemas


async def test_a_repair_round_shows_the_model_what_was_wrong() -> None:
    request, transcripts = request_of(OUTCOMES)
    prompts: list[str] = []

    def respond(prompt: str, n: int) -> str:
        prompts.append(prompt)
        return "{}" if n == 0 else good_answer()

    reply = await worker(ScriptedModel(respond), repair_rounds=1).grade(request, *transcripts)
    assert reply.grade is not None
    assert reply.turns == 2
    assert "not valid (schema: candidates: Field required)" in prompts[1]
    assert reply.verdict == good_answer()


async def test_without_repair_rounds_the_first_answer_counts() -> None:
    request, transcripts = request_of(OUTCOMES)
    model = ScriptedModel(lambda prompt, n: "{}" if n == 0 else good_answer())
    reply = await worker(model).grade(request, *transcripts)
    assert (reply.fallback_reason, reply.turns) == (R.SCHEMA, 1)
    once_more = await worker(ScriptedModel(lambda p, n: "{}"), repair_rounds=1).grade(request, *transcripts)
    assert (once_more.fallback_reason, once_more.turns) == (R.SCHEMA, 2)


async def test_no_more_groups_at_once_than_configured() -> None:
    request, transcripts = request_of(OUTCOMES)
    busy = most = 0

    class Slow(ScriptedModel):
        def open(self, **kwargs: Any) -> Any:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            return super().open(**kwargs)

    def respond(prompt: str, n: int) -> str:
        nonlocal busy
        busy -= 1
        return good_answer()

    grader = worker(Slow(respond, delay_s=0.05), groups_per_worker=2)
    replies = await asyncio.gather(*(grader.grade(request, *transcripts) for _ in range(6)))
    assert all(r.grade for r in replies)
    assert most == 2
    assert max(r.queue_s for r in replies) >= 0.09


# --- on an engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token a byte and the project's chat markup."""
    folder = tmp_path_factory.mktemp("grader-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def engine_worker(checkpoint: Path, respond: Any, *, max_model_len: int, **changes: Any) -> GraderWorker:
    backend = {"type": "vllm", "engine": {"model": str(checkpoint), "max_model_len": max_model_len}}
    config = grader_config(backend=backend, **changes)
    chat = ChatFormat.load(str(checkpoint))
    engine = ScriptedEngine(lambda request_id, prompt: respond(chat, prompt))
    return GraderWorker(config, RubricConfig(), engine=engine)


async def test_grades_come_through_an_engine(checkpoint: Path) -> None:
    request, transcripts = request_of(OUTCOMES)
    seen: list[str] = []

    def respond(chat: ChatFormat, prompt: Any) -> list[int]:
        seen.append(chat.decode(prompt))
        return chat.reply(good_answer() if len(seen) == 2 else "[]")

    grader = engine_worker(checkpoint, respond, max_model_len=20_000, repair_rounds=1)
    reply = await grader.grade(request, *transcripts)
    assert reply.grade is not None, reply.detail
    assert reply.verdict == good_answer()
    assert seen[0].startswith("<|user|>## task\n")
    assert seen[0].endswith("<|end|><|assistant|>")
    assert seen[1].startswith(seen[0] + "[]<|end|><|user|>That verdict is not valid (schema")
    assert reply.completion_tokens == len(good_answer()) + 1 + 3


async def test_an_answer_cut_at_its_limit_is_truncated(checkpoint: Path) -> None:
    request, transcripts = request_of(OUTCOMES)
    grader = engine_worker(
        checkpoint, lambda chat, prompt: chat.reply(good_answer()), max_model_len=9000, max_tokens=50
    )
    assert (await grader.grade(request, *transcripts)).fallback_reason is R.TRUNCATED


async def test_material_is_cut_further_to_fit_the_context(checkpoint: Path) -> None:
    """Bytes are tokens here, so the budget of 6000 characters does not fit 1700 tokens beside the answer."""
    new_file = "diff --git a/f{0}.py b/f{0}.py\n--- /dev/null\n+++ b/f{0}.py\n@@ -0,0 +1,1 @@\n+value = {0}\n"
    large = CLEAN + "".join(new_file.format(i) for i in range(99))
    request, transcripts = request_of([(True, large), (True, large), (False, CLEAN)])
    prompts: list[int] = []

    def respond(chat: ChatFormat, prompt: Any) -> list[int]:
        prompts.append(len(prompt))
        return chat.reply("{}")

    reply = await engine_worker(checkpoint, respond, max_model_len=1700, max_tokens=400).grade(request, *transcripts)
    assert reply.fallback_reason is R.SCHEMA
    assert 800 < prompts[0] <= 1300


async def test_a_context_too_small_for_anything(checkpoint: Path) -> None:
    request, transcripts = request_of(OUTCOMES)
    grader = engine_worker(checkpoint, lambda chat, prompt: [], max_model_len=500)
    reply = await grader.grade(request, *transcripts)
    assert reply.fallback_reason is R.PROMPT_TOO_LONG


def test_the_engine_backend_needs_an_engine() -> None:
    with pytest.raises(ConfigError, match="engine pool"):
        make_model(grader_config(), None)


def test_the_engine_backend_reads_its_own_checkpoint(checkpoint: Path) -> None:
    backend = {"type": "vllm", "engine": {"model": str(checkpoint), "max_model_len": 900}}
    model = make_model(grader_config(backend=backend), ScriptedEngine(lambda request_id, prompt: []))
    assert isinstance(model, EngineModel)
    assert model.limit_tokens == 500


# --- on an endpoint ---------------------------------------------------------------------------------------------------


def endpoint_config(url: str, **backend: Any) -> dict[str, Any]:
    return {"backend": {"type": "endpoint", "base_url": url, "model": "judge", "api_key_env": "JUDGE_KEY", **backend}}


@pytest.mark.parametrize("structured", ["json_schema", "json_object", "none"])
async def test_grades_come_through_an_endpoint(monkeypatch: pytest.MonkeyPatch, structured: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", "from-the-environment")
    request, transcripts = request_of(OUTCOMES)

    async def answer(http: web.Request, n: int) -> web.StreamResponse:
        return web.Response(status=429) if n == 1 else completion(good_answer())

    async with serving(answer) as server:
        grader = GraderWorker(grader_config(**endpoint_config(server.url, structured=structured)), RubricConfig())
        reply = accept(request, await grader.grade(request, *transcripts))
        await grader.close()
    assert reply.grade is not None, reply.detail
    assert (reply.model, reply.prompt_tokens, reply.completion_tokens) == ("judge", 11, 7)
    assert server.headers[1]["Authorization"] == "Bearer from-the-environment"
    body = server.bodies[1]
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    form = body.get("response_format")
    if structured == "json_schema":
        assert form["json_schema"]["schema"]["required"] == ["candidates", "ranking", "hacks"]
        assert form["json_schema"]["strict"] is True
    else:
        assert form == ({"type": "json_object"} if structured == "json_object" else None)


async def test_an_endpoint_that_cuts_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    request, transcripts = request_of(OUTCOMES)

    async def answer(http: web.Request, n: int) -> web.StreamResponse:
        if n == 1:
            choice = {"message": {"content": good_answer()}, "finish_reason": "length"}
            return completion(choices=[choice])
        return web.Response(status=401, text="no key")

    async with serving(answer) as server:
        grader = GraderWorker(grader_config(**endpoint_config(server.url)), RubricConfig())
        cut = await grader.grade(request, *transcripts)
        refused = await grader.grade(request, *transcripts)
        await grader.close()
    assert cut.fallback_reason is R.TRUNCATED
    assert refused.fallback_reason is R.ENDPOINT_ERROR
    assert "HTTP 401" in refused.detail


def test_the_concurrency_limit_is_shared_among_the_workers() -> None:
    config = grader_config(**endpoint_config("http://localhost/v1", max_concurrency=8), workers=3)
    model = make_model(config, None)
    assert isinstance(model, EndpointModel)
    assert model.endpoint._slots._value == 2
