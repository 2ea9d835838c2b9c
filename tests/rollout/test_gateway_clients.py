"""The gateway through the official clients of OpenAI and Anthropic, over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from conftest import TEMPLATE
from sampling_engine import SamplingEngine, Script
from test_gateway_session import check_exact

from configs.schema import LimitsConfig
from rollout.chat import ChatFormat
from rollout.gateway.rendering import Renderer
from rollout.gateway.server import Endpoint, Gateway
from rollout.gateway.session import Session

LIMITS = LimitsConfig(max_turns=40, max_turn_tokens=400, max_total_tokens=20_000)
pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL_TEMPLATE = (
    "{% if tools %}<|system|># Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Call as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|end|>{% endif %}' + TEMPLATE
)
BASH = {
    "name": "bash",
    "description": "Run a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls  -l"}}\n</tool_call>'


class Rollout:
    """One session and where it is served."""

    def __init__(self, engine: SamplingEngine, session: Session, endpoint: Endpoint) -> None:
        self.engine, self.session, self.endpoint = engine, session, endpoint

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.endpoint.base_url}/v1", api_key=self.endpoint.token)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.endpoint.base_url, api_key=self.endpoint.token)

    def check(self, *, continued: int) -> None:
        """All calls went on where the last one ended, and are what the engine did."""
        assert (self.session.continued, self.session.drift) == (continued, 0)
        check_exact(self.session.payload(), self.engine, self.session.trajectory_id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    await gateway.close()


@pytest.fixture(scope="module")
def chat(tokenizer_dir: str) -> ChatFormat:
    return ChatFormat.load(tokenizer_dir)


@pytest.fixture(scope="module")
def tools_chat(tokenizer_dir: str, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("tools")
    for file in Path(tokenizer_dir).iterdir():
        (folder / file.name).write_text(file.read_text())
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return ChatFormat.load(str(folder))


@pytest_asyncio.fixture(loop_scope="module")
async def plain(gateway: Gateway, chat: ChatFormat) -> AsyncIterator[Rollout]:
    """The policy says `ls` and a number, each time."""
    async with rollout(gateway, chat, lambda prompt: chat.encode(f"ls {len(prompt)}")) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def calling(gateway: Gateway, tools_chat: ChatFormat) -> AsyncIterator[Rollout]:
    """The policy thinks, calls a tool, and once it has seen two results says `done`."""

    def script(prompt: Sequence[int]) -> Sequence[int]:
        text = tools_chat.decode([*prompt, 5])
        return tools_chat.encode("done" if text.count("result") > 1 else f"look at it\n{CALL}\n{CALL}")

    async with rollout(gateway, tools_chat, script) as one:
        yield one


@contextlib.asynccontextmanager
async def rollout(gateway: Gateway, chat: ChatFormat, script: Script, name: str = "g/0.0") -> AsyncIterator[Rollout]:
    engine = SamplingEngine([], script=script)
    session = Session(trajectory_id=name, engine=engine, renderer=Renderer(chat), limits=LIMITS, temperature=1.0)
    async with gateway.serving(session) as endpoint:
        yield Rollout(engine, session, endpoint)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(plain: Rollout, stream: bool) -> None:
    client, messages = plain.openai(), [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    for turn in range(3):
        if stream:
            chunks = [c async for c in await client.chat.completions.create(model="m", messages=messages, stream=True)]  # type: ignore[call-overload]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            finish = next(c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason)
        else:
            answer = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[call-overload]
            text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert answer.usage.completion_tokens == len(plain.engine.sampled[-1][2].token_ids)
            assert answer.usage.prompt_tokens == len(plain.engine.sampled[-1][1])
        assert text == f"ls {len(plain.engine.sampled[turn][1])}" and finish == "stop"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"out {turn}"}]
    plain.check(continued=2)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(plain: Rollout, stream: bool) -> None:
    client, items = plain.openai(), [{"role": "user", "content": "go"}]
    for turn in range(2):
        if stream:
            async with client.responses.stream(model="m", instructions="s", input=items) as events:  # type: ignore[arg-type]
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(model="m", instructions="s", input=items)  # type: ignore[arg-type]
        assert answer.output_text == f"ls {len(plain.engine.sampled[turn][1])}"
        items += [item.model_dump(mode="json") for item in answer.output]
        items += [{"role": "user", "content": [{"type": "input_text", "text": "out"}]}]  # type: ignore[dict-item]
    plain.check(continued=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(plain: Rollout, stream: bool) -> None:
    client, messages = plain.anthropic(), [{"role": "user", "content": "go"}]
    ask = {"model": "m", "max_tokens": 16, "system": [{"type": "text", "text": "s"}], "messages": messages}
    for turn in range(2):
        if stream:
            async with client.messages.stream(**ask) as events:  # type: ignore[arg-type]
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**ask)  # type: ignore[call-overload]
        assert answer.content[0].text == f"ls {len(plain.engine.sampled[turn][1])}"
        assert answer.stop_reason == "end_turn"
        content = [block.model_dump(mode="json", exclude_none=True) for block in answer.content]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "out"}]  # type: ignore[dict-item]
    plain.check(continued=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_in_chat_completions(calling: Rollout, stream: bool) -> None:
    client, messages = calling.openai(), [{"role": "user", "content": "go"}]
    ask = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": BASH}]}
    if stream:
        async with client.chat.completions.stream(**ask) as events:  # type: ignore[arg-type]
            message = (await events.get_final_completion()).choices[0].message
    else:
        message = (await client.chat.completions.create(**ask)).choices[0].message  # type: ignore[call-overload]
    assert message.content == "look at it"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("bash", {"command": "ls  -l"})
    ] * 2
    messages.append(message.model_dump(mode="json", include={"role", "content", "tool_calls"}))
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "result"})
    answer = await client.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("done", "stop")
    calling.check(continued=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_in_anthropic_messages(calling: Rollout, stream: bool) -> None:
    client, messages = calling.anthropic(), [{"role": "user", "content": "go"}]
    tool = {"name": "bash", "description": "Run a command", "input_schema": BASH["parameters"]}
    ask = {"model": "m", "max_tokens": 400, "messages": messages, "tools": [tool]}
    if stream:
        async with client.messages.stream(**ask) as events:  # type: ignore[arg-type]
            answer = await events.get_final_message()
    else:
        answer = await client.messages.create(**ask)  # type: ignore[call-overload]
    assert answer.stop_reason == "tool_use"
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{"command": "ls  -l"}] * 2
    content = [block.model_dump(mode="json", exclude_none=True) for block in answer.content]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "result"}]}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]  # type: ignore[dict-item]
    answer = await client.messages.create(**ask)  # type: ignore[call-overload]
    assert answer.content[0].text == "done"
    calling.check(continued=1)


async def test_tools_in_responses(calling: Rollout) -> None:
    client, items = calling.openai(), [{"role": "user", "content": "go"}]
    tools = [{"type": "function", **BASH}]
    async with client.responses.stream(model="m", input=items, tools=tools) as events:  # type: ignore[arg-type]
        answer = await events.get_final_response()
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"command": "ls  -l"}] * 2
    items += [item.model_dump(mode="json", exclude={"parsed_arguments"}) for item in answer.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "result"} for call in calls]
    answer = await client.responses.create(model="m", input=items, tools=tools)  # type: ignore[arg-type]
    assert answer.output_text == "done"
    calling.check(continued=1)


async def test_a_template_without_tools_refuses_them(plain: Rollout) -> None:
    tool = {"type": "function", "function": BASH}
    with pytest.raises(openai.BadRequestError, match="renders no tools"):
        await plain.openai().chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=[{"role": "user", "content": "go"}], tools=[tool]
        )
    assert plain.engine.sampled == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["\n"]),
        ("n", 2),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("logprobs", True),
        ("messages", []),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "assistant", "content": "half a"}]),
        ("max_tokens", "many"),
    ],
)
async def test_what_would_change_the_recorded_distribution_is_refused_by_name(
    plain: Rollout, field: str, value: object
) -> None:
    ask = {"messages": [{"role": "user", "content": "go"}], field: value}
    async with httpx.AsyncClient(base_url=plain.endpoint.base_url) as client:
        headers = {"Authorization": f"Bearer {plain.endpoint.token}"}
        answer = await client.post("/v1/chat/completions", json=ask, headers=headers)
    assert answer.status_code == 400
    assert answer.headers["x-should-retry"] == "false"
    assert field.split("_")[0].rstrip("s") in answer.json()["error"]["message"]
    assert plain.engine.sampled == []


async def test_other_sampling_has_no_effect_and_is_noted(plain: Rollout) -> None:
    await plain.openai().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "go"}], temperature=0.0, top_p=1.0, seed=3, max_tokens=999
    )
    notes = plain.session.notes()
    assert [note.split("=")[0].split(" ")[0] for note in notes] == ["temperature", "seed", "max_tokens"]


async def test_a_token_opens_its_own_rollout_until_it_is_over(gateway: Gateway, chat: ChatFormat) -> None:
    messages = [{"role": "user", "content": "go"}]
    first, second = (rollout(gateway, chat, lambda prompt: chat.encode("ls"), f"{name}/0.0") for name in "ab")
    async with first as a:
        async with second as b:
            assert a.endpoint.token != b.endpoint.token
            await b.openai().chat.completions.create(model="m", messages=messages)  # type: ignore[call-overload]
            assert (a.session.contexts, b.session.contexts) == (0, 1)
        client = b.openai()
        with pytest.raises(openai.AuthenticationError, match="opens no rollout"):
            await client.chat.completions.create(model="m", messages=messages)  # type: ignore[call-overload]
    async with httpx.AsyncClient(base_url=a.endpoint.base_url) as plain_client:
        for headers in ({}, {"Authorization": "Bearer x"}, {"x-api-key": "nothing"}):
            for path in ("chat/completions", "responses", "messages"):
                assert (await plain_client.post(f"/v1/{path}", json={}, headers=headers)).status_code == 401
            assert (await plain_client.get("/v1/models", headers=headers)).status_code == 401


async def test_rollouts_that_start_together_find_the_same_server(chat: ChatFormat) -> None:
    gateway = Gateway()

    async def address(name: str) -> str:
        async with rollout(gateway, chat, lambda prompt: [], name) as one:
            return one.endpoint.base_url

    found = await asyncio.gather(*(address(name) for name in "abc"))
    await gateway.close()
    assert found[0].startswith("http://127.0.0.1:") and len(set(found)) == 1


async def test_a_client_that_hangs_up_takes_its_call_with_it(plain: Rollout) -> None:
    plain.engine.hold = asyncio.Event()
    ask = plain.openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask, 1.0)
    await asyncio.sleep(0.5)
    plain.engine.hold.set()
    plain.engine.hold = None
    await plain.openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    assert plain.session.contexts == 1 and plain.session.drift == 0
