"""The endpoint client and the agent against a real OpenAI-compatible server: vLLM's own, with the shipped grader.

The checkpoint is tiny, so these tests are about the protocol: what is called, enforced, counted and refused. Whether
its verdicts are any good, or even valid, is another matter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import unused_port
from grader_parts import CLEAN, HARDCODED, NOISY, grader_config, request_of

from configs.schema import EndpointGraderBackend, EngineConfig, RubricConfig
from grader.endpoint import ContextFullError, Endpoint
from grader.exchange import GradeReply, accept
from grader.verdict import FallbackReason
from grader.worker import GraderWorker
from infra.errors import GraderError
from rollout.engine_actor import environment

pytestmark = pytest.mark.e2e

CHECKPOINT = Path(__file__).parents[2] / "configs/checkpoints/grader"
KEY = "a-key-of-this-test"
START_S = 900.0
"""Most of it is importing vLLM, on a machine that may be busy."""
QUESTION = [{"role": "user", "content": "## task\nfix it\n## grade C1"}]
OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server up to /v1. Structured output through JSON schemas, as without a model's own tool markup."""
    port, log = unused_port(), tmp_path_factory.mktemp("vllm") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(CHECKPOINT), "--served-model-name", "judge", "--generation-config", "vllm"]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--block-size", "32", "--kv-cache-memory-bytes", str(2**29), "--disable-log-stats"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command += ["--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}']
    variables = {
        **os.environ,
        **environment(EngineConfig(model=str(CHECKPOINT))),
        "VLLM_PLUGINS": "",
        "VLLM_API_KEY": KEY,
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


READ = tool("read", path={"enum": ["task.md", "C1/patch"]})
VERDICT = tool("verdict", ranking={"enum": [[["C1"]], [["C2"]]]}, hacks={"type": "array", "maxItems": 0})


def client(server: str, key: str | None = KEY) -> Endpoint:
    backend = EndpointGraderBackend(type="endpoint", base_url=server, model="judge", max_retries=1)
    return Endpoint(backend, api_key=key, concurrency=2)


async def test_tool_calls_are_parsed_and_can_be_answered(server: str) -> None:
    endpoint = client(server)
    said = await endpoint.complete(
        QUESTION, max_tokens=200, temperature=0.0, tools=[READ, VERDICT], tool_choice="required"
    )
    assert said.finish_reason == "tool_calls"
    assert said.calls
    for call in said.calls:
        arguments = json.loads(call.arguments)
        assert set(arguments) == ({"path"} if call.name == "read" else {"ranking", "hacks"})
    assert said.prompt_tokens > 5
    assert said.completion_tokens > 5
    calls = [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in said.calls
    ]
    results = [{"role": "tool", "tool_call_id": c.call_id, "content": "## task.md\nfix it"} for c in said.calls]
    conversation = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    choice = {"type": "function", "function": {"name": "verdict"}}
    last = await endpoint.complete(conversation, max_tokens=200, temperature=0.0, tools=[VERDICT], tool_choice=choice)
    await endpoint.close()
    assert [c.name for c in last.calls] == ["verdict"]
    assert json.loads(last.calls[0].arguments)["ranking"] in ([["C1"]], [["C2"]])
    assert last.prompt_tokens > said.prompt_tokens


async def test_a_model_that_may_call_need_not(server: str) -> None:
    endpoint = client(server)
    said = await endpoint.complete(QUESTION, max_tokens=60, temperature=0.0, tools=[READ], tool_choice="auto")
    await endpoint.close()
    assert said.text or said.calls


async def test_a_schema_is_enforced(server: str) -> None:
    schema = VERDICT["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    endpoint = client(server)
    said = await endpoint.complete(QUESTION, max_tokens=100, temperature=0.0, response_format=form)
    await endpoint.close()
    assert said.finish_reason == "stop"
    assert json.loads(said.text)["hacks"] == []


async def test_what_the_server_refuses(server: str) -> None:
    endpoint, stranger = client(server), client(server, key="another key")
    long = [{"role": "user", "content": "grade " * 3000}]
    with pytest.raises(ContextFullError):
        await endpoint.complete(long, max_tokens=10, temperature=0.0)
    with pytest.raises(GraderError, match="HTTP 401"):
        await stranger.complete(QUESTION, max_tokens=10, temperature=0.0)
    await endpoint.close()
    await stranger.close()


async def graded(server: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GradeReply:
    """One whole grading; tokens cost something."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    backend = {
        "type": "endpoint",
        "base_url": server,
        "model": "judge",
        "api_key_env": "JUDGE_KEY",
        "tool_calling": changes.pop("tool_calling", True),
        "prices": {"prompt_usd_per_mtok": 1.0, "completion_usd_per_mtok": 4.0},
    }
    config = grader_config(
        **{
            "backend": backend,
            "style": "compact",
            "timeout_s": 300.0,
            "max_tokens": 300,
            "prompt_chars": 1500,
            **changes,
        }
    )
    grader = GraderWorker(config, RubricConfig())
    request, transcripts = request_of(OUTCOMES)
    reply = accept(request, await grader.grade(request, *transcripts))
    await grader.close()
    json.dumps(reply.audit())
    assert reply.run_s < 300
    if reply.grade is None:  # whatever so small a model says has a reason of its own, never one of the connection
        assert reply.fallback_reason is not None
        assert reply.fallback_reason not in (
            FallbackReason.ENDPOINT_ERROR,
            FallbackReason.GRADER_ERROR,
            FallbackReason.TIMEOUT,
            FallbackReason.MISMATCH,
        ), reply.detail
    else:
        assert set(reply.grade.candidates) | set(reply.grade.hacks) == {"g1/0.0", "g1/1.0", "g1/2.0"}
    return reply


@pytest.mark.parametrize("tool_calling", [True, False])
async def test_a_whole_grading(server: str, monkeypatch: pytest.MonkeyPatch, tool_calling: bool) -> None:
    """It ends in a grade, or in a reason that says what was wrong with the verdict."""
    reply = await graded(server, monkeypatch, tool_calling=tool_calling, budget={"tokens": 1900})
    assert reply.turns >= 2
    assert reply.prompt_tokens > 100
    assert reply.completion_tokens > 20
    assert reply.cost_usd == pytest.approx((reply.prompt_tokens + 4 * reply.completion_tokens) / 1e6)


async def test_one_turn_is_a_verdict(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = await graded(server, monkeypatch, budget={"turns": 1}, repair_rounds=0)
    assert reply.turns == 1


async def test_candidates_at_the_same_time(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = await graded(server, monkeypatch, scope="candidate", budget={"tokens": 1900})
    assert reply.turns >= 3


async def test_a_single_prompt(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = await graded(server, monkeypatch, mode="single")
    assert reply.turns >= 1


async def test_instructions_that_the_model_cannot_hold(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = await graded(server, monkeypatch, style="full")
    assert reply.fallback_reason is FallbackReason.PROMPT_TOO_LONG
