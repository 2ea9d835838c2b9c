"""The worker over real backends: an engine's tokens, and an endpoint's messages and native calls."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from grader_parts import CLEAN, call, grader_config, ranking_of, request_of, say, work
from test_endpoint import call as native_call
from test_endpoint import calling, completion, serving
from test_grader_worker import GROUP, OUTCOMES, good_answer, grade
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from configs.schema import EndpointGraderBackend, RubricConfig
from grader.client import EndpointModel, EngineModel, _echo, make_model
from grader.endpoint import NativeCall
from grader.scripted import judge_by_size
from grader.verdict import FallbackReason
from grader.worker import GraderWorker
from infra.errors import ConfigError
from rollout.chat import ChatFormat
from rollout.engine import ScriptedEngine

R = FallbackReason


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
    seen: list[list[int]] = []
    messages = [work(GROUP)[0], "[]", *work(GROUP)[1:]]

    def respond(chat: ChatFormat, prompt: Any) -> list[int]:
        seen.append(list(prompt))
        return chat.reply(messages[len(seen) - 1])

    grader = engine_worker(checkpoint, respond, max_model_len=20_000)
    reply = await grader.grade(request, *transcripts)
    assert reply.grade is not None, reply.detail
    assert reply.verdict == good_answer()
    assert reply.completion_tokens == sum(len(message) + 1 for message in messages)
    assert reply.prompt_tokens == sum(map(len, seen))
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(seen))
    chat = ChatFormat.load(str(checkpoint))
    assert chat.decode(seen[0]).startswith("<|user|>## task\n")
    assert chat.decode(seen[0]).endswith("<|end|><|assistant|>")
    assert f"{messages[0]}<|end|><|user|>## C1/patch\nshop/core.py:4 -" in chat.decode(seen[1])
    assert "[]<|end|><|user|>## error: schema" in chat.decode(seen[2])


async def test_an_engine_is_given_the_schema_of_every_answer(checkpoint: Path) -> None:
    class Recording(ScriptedEngine):
        async def generate(self, **kwargs: Any) -> Any:
            schemas.append(json.loads(kwargs["json_schema"]))
            ids.append(kwargs["request_id"])
            return await super().generate(**kwargs)

    schemas: list[Any] = []
    ids: list[str] = []
    chat = ChatFormat.load(str(checkpoint))
    backend = {"type": "vllm", "engine": {"model": str(checkpoint), "max_model_len": 20_000}}
    engine = Recording(lambda request_id, prompt: chat.reply(work(GROUP)[len(ids) - 1]))
    reply = await grade(GraderWorker(grader_config(backend=backend), RubricConfig(), engine=engine))
    assert reply.grade is not None
    offered = [[v["properties"]["tool"]["const"] for v in s["properties"]["calls"]["items"]["anyOf"]] for s in schemas]
    assert offered[0] == ["read"]
    assert offered[-1][-1] == "verdict"
    assert len(set(ids)) == len(ids)
    assert all(i.startswith("g1/grade0-") for i in ids)


async def test_a_context_that_fills_up_ends_in_answers_about_parts(checkpoint: Path) -> None:
    """The engine's own context is the limit, whatever the budget says; of who it cannot hold nobody is guessed at."""
    request, transcripts = request_of(OUTCOMES)
    lengths: list[int] = []
    asked: set[str] = set()

    def respond(chat: ChatFormat, prompt: Any) -> list[int]:
        lengths.append(len(prompt))
        told = chat.decode(prompt)
        labels = re.findall(r"## grade (.*)", told)[-1].split("<")[0].split()
        asked.add(" ".join(labels))
        if "## verdict now" not in told:
            return chat.reply(say(call("read", path="repo/shop/core.py")))
        bodies = {c.label: judge_by_size(c).model_dump(mode="json") for c in GROUP.passing if c.label in labels}
        ranking = [tied for group in ranking_of(GROUP) if (tied := [label for label in group if label in labels])]
        return chat.reply(say(call("verdict", candidates=bodies, ranking=ranking, hacks=[])))

    grader = engine_worker(checkpoint, respond, max_model_len=4000, max_tokens=1000)
    reply = await grader.grade(request, *transcripts)
    assert reply.grade is not None, reply.detail
    passing = {c.trajectory.trajectory_id for c in GROUP.passing}
    assert set(reply.grade.candidates) == passing
    assert {len(labels.split()) for labels in asked} == {1, len(passing)}
    assert 1500 < max(lengths) <= 3000


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

    grader = engine_worker(checkpoint, respond, max_model_len=1700, max_tokens=400, mode="single")
    reply = await grader.grade(request, *transcripts)
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
async def test_a_single_prompt_goes_to_an_endpoint(monkeypatch: pytest.MonkeyPatch, structured: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", "from-the-environment")

    async def answer(http: web.Request, n: int) -> web.StreamResponse:
        return web.Response(status=429) if n == 1 else completion(good_answer())

    async with serving(answer) as server:
        config = grader_config(**endpoint_config(server.url, structured=structured), mode="single")
        grader = GraderWorker(config, RubricConfig())
        reply = await grade(grader)
        await grader.close()
    assert reply.grade is not None, reply.detail
    assert (reply.model, reply.prompt_tokens, reply.completion_tokens) == ("judge", 11, 7)
    assert server.headers[1]["Authorization"] == "Bearer from-the-environment"
    body = server.bodies[1]
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert "tools" not in body
    form = body.get("response_format")
    if structured == "json_schema":
        assert form["json_schema"]["schema"]["required"] == ["candidates", "ranking", "hacks"]
    else:
        assert form == ({"type": "json_object"} if structured == "json_object" else None)


def as_native(message: str, n: int) -> web.Response:
    calls = json.loads(message)["calls"]
    return calling(
        *(
            native_call(c["tool"], json.dumps({k: v for k, v in c.items() if k != "tool"}), f"id{n}.{i}")
            for i, c in enumerate(calls)
        )
    )


async def test_an_agent_calls_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost is what the endpoint's tokens cost."""
    messages = work(GROUP)
    messages[1:3] = [say(*(c for message in messages[1:3] for c in json.loads(message)["calls"]))]

    async def answer(http: web.Request, n: int) -> web.StreamResponse:
        if n == 2:  # the model's mistake, not the endpoint's
            return calling(native_call("read", '{"path": ', "bad"), native_call("list", "{}", "good"))
        return as_native(messages[n - 1 if n < 2 else n - 2], n)

    async with serving(answer) as server:
        prices = {"prompt_usd_per_mtok": 2.0, "completion_usd_per_mtok": 10.0}
        config = grader_config(**endpoint_config(server.url, prices=prices))
        assert config.style == "full"
        grader = GraderWorker(config, RubricConfig())
        reply = await grade(grader)
        await grader.close()
    assert reply.grade is not None, reply.detail
    assert reply.verdict == good_answer()
    asked = len(messages) + 1
    assert (reply.turns, reply.prompt_tokens, reply.completion_tokens) == (asked, 11 * asked, 7 * asked)
    assert reply.cost_usd == pytest.approx(asked * (11 * 2.0 + 7 * 10.0) / 1e6)
    assert all(body["tool_choice"] == "required" and "response_format" not in body for body in server.bodies)
    names = [tool["function"]["name"] for tool in server.bodies[0]["tools"]]
    assert names == ["list", "read", "search", "diff", "turn", "judge", "verdict"]
    last = server.bodies[-1]["messages"]
    assert all(a["messages"] == b["messages"][: len(a["messages"])] for a, b in itertools.pairwise(server.bodies))
    assert [m["role"] for m in last[:7]] == ["system", "user", "assistant", "tool", "assistant", "tool", "tool"]
    bad, good = last[4]["tool_calls"]
    assert bad["function"]["arguments"] == "{}"  # servers refuse to be told what they said
    assert [m["tool_call_id"] for m in last[5:7]] == [bad["id"], good["id"]]
    assert last[5]["content"].startswith("error: not_json")
    assert last[4]["content"] is None


async def test_at_the_end_of_a_budget_the_verdict_is_the_only_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(http: web.Request, n: int) -> web.StreamResponse:
        if n < 3:
            return calling(native_call("read", '{"path": "task.md"}'))
        bodies = {c.label: judge_by_size(c).model_dump(mode="json") for c in GROUP.passing}
        return as_native(say(call("verdict", candidates=bodies, ranking=ranking_of(GROUP), hacks=[])), n)

    async with serving(answer) as server:
        grader = GraderWorker(grader_config(**endpoint_config(server.url), budget={"turns": 3}), RubricConfig())
        reply = await grade(grader)
        await grader.close()
    assert reply.grade is not None, reply.detail
    assert server.bodies[2]["tool_choice"] == {"type": "function", "function": {"name": "verdict"}}
    assert [m["role"] for m in server.bodies[2]["messages"][-3:]] == ["assistant", "tool", "user"]


async def test_an_agent_may_write_its_calls_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(http: web.Request, n: int) -> web.StreamResponse:
        return completion(work(GROUP)[n - 1])

    async with serving(answer) as server:
        grader = GraderWorker(grader_config(**endpoint_config(server.url, tool_calling=False)), RubricConfig())
        reply = await grade(grader)
        await grader.close()
    assert reply.grade is not None, reply.detail
    assert all("tools" not in body and body["response_format"]["type"] == "json_schema" for body in server.bodies)
    assert {m["role"] for m in server.bodies[-1]["messages"]} == {"system", "user", "assistant"}


async def test_an_endpoint_that_cuts_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    asked = 0

    async def answer(http: web.Request, n: int) -> web.StreamResponse:
        match asked:
            case 0:
                return completion(choices=[{"message": {"content": "{"}, "finish_reason": "length"}])
            case 1:
                return web.Response(status=400, text="maximum context length is 10 tokens")
        return web.Response(status=401, text="no key")

    async with serving(answer) as server:
        grader = GraderWorker(grader_config(**endpoint_config(server.url)), RubricConfig())
        for reason in (R.TRUNCATED, R.PROMPT_TOO_LONG, R.ENDPOINT_LOST):
            reply = await grade(grader)
            assert reply.fallback_reason is reason
            asked += 1
        await grader.close()
    assert "HTTP 401" in reply.detail


def test_the_concurrency_limit_is_shared_among_the_workers() -> None:
    config = grader_config(**endpoint_config("http://localhost/v1", max_concurrency=8), workers=3)
    model = make_model(config, None)
    assert isinstance(model, EndpointModel)
    assert model.endpoint._slots._value == 2


@pytest.mark.parametrize(
    ("value", "sent"), [("sk-0123456789\n", "sk-0123456789"), (" k ", "k"), ("\n", None), ("", None)]
)
async def test_the_key_is_sent_without_the_newline_of_its_file(
    monkeypatch: pytest.MonkeyPatch, value: str, sent: str | None
) -> None:
    monkeypatch.setenv("A_KEY", value)
    backend = EndpointGraderBackend(type="endpoint", base_url="http://127.0.0.1:1/v1", model="m", api_key_env="A_KEY")
    model = make_model(grader_config(backend=backend), None)
    assert isinstance(model, EndpointModel)
    assert model.endpoint._http.headers.get("authorization") == (sent and f"Bearer {sent}")
    await model.close()


@pytest.mark.parametrize("value", ["sk-0123\n456789", "sk-01234\xe4", "sk-0123\x1b456", "sk-0123 456789"])
def test_a_key_that_no_header_carries_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("A_KEY", value)
    backend = EndpointGraderBackend(type="endpoint", base_url="http://127.0.0.1:1/v1", model="m", api_key_env="A_KEY")
    with pytest.raises(ConfigError, match="A_KEY") as raised:
        make_model(grader_config(backend=backend), None)
    assert "sk-" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "arguments", "echoed"),
    [
        ("read", '{"path":"C1/patch"}', ("read", '{"path":"C1/patch"}')),
        ("functions.read", "{}", ("functions_read", "{}")),
        ("", "{}", ("_", "{}")),
        ("x" * 1000, "{}", ("x" * 64, "{}")),
        ("re\nad<|im_end|>", "[1]", ("re_ad__im_end__", "{}")),
        ("read", '{"path":"' + "x" * 3_000_000 + '"}', ("read", "{}")),  # it was not read either
    ],
)
def test_a_call_is_repeated_only_in_a_form_that_servers_take(
    name: str, arguments: str, echoed: tuple[str, str]
) -> None:
    function = _echo(NativeCall(call_id="c1", name=name, arguments=arguments))["function"]
    assert (function["name"], function["arguments"]) == echoed
