"""A command as a harness: inside a real jail, with the gateway as its only network."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from sampling_engine import SamplingEngine
from test_agent import CODE
from test_gateway_session import check_exact

from configs.schema import CommandHarness, JailSandbox, LimitsConfig, RolloutConfig
from envs.jail import JailProvider
from rollout.chat import ChatFormat
from rollout.gateway.server import Gateway, open_folder
from rollout.harness import make_harness, run_harness_episode
from rollout.trajectory import Status

AGENT = """
import json, os, subprocess, urllib.error, urllib.request
def post(base, path, body, token):
    head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request))
base, token = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
try:
    post(base, "/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "another")
    raise SystemExit("another token was let in")
except urllib.error.HTTPError as error:
    assert error.code == 401, error.code
try:
    urllib.request.urlopen("http://192.0.2.1", timeout=2)
    raise SystemExit("there is another network")
except OSError:
    pass
messages = [{"role": "user", "content": os.environ["GAGAR_TASK"]}]
while True:
    message = post(base, "/chat/completions", {"messages": messages}, token)["choices"][0]["message"]
    if message["content"] == "submit":
        break
    done = subprocess.run(["bash", "-c", message["content"]], capture_output=True, text=True)
    messages += [message, {"role": "user", "content": done.stdout or "[ok]"}]
"""


@pytest.fixture(scope="module")
def chat(tokenizer_dir: str) -> ChatFormat:
    return ChatFormat.load(tokenizer_dir)


async def test_a_program_in_the_jail_reaches_the_policy_and_nothing_else(chat: ChatFormat, tmp_path: Path) -> None:
    folder = open_folder()
    tmp_path.chmod(0o755)
    (tmp_path / "agent.py").write_text(AGENT)
    said = iter(["cat shop/core.py", "sed -i 's/n < LIMIT/n <= LIMIT/' shop/core.py", "submit"])
    engine = SamplingEngine([], script=lambda prompt: chat.encode(next(said)))
    command = f"python3 {shlex.quote(str(tmp_path))}/agent.py"
    config = RolloutConfig(
        harness=CommandHarness(type="command", command=command, paths=(str(tmp_path),)),
        limits=LimitsConfig(max_total_tokens=4000, wall_s=500),
    )
    harness = make_harness(config)
    assert harness is not None
    gateway, jails = Gateway(folder), JailProvider(JailSandbox(), [folder, str(tmp_path)])
    try:
        trajectory, payload, transcript = await run_harness_episode(
            harness=harness,
            gateway=gateway,
            task=CODE,
            trajectory_id="g/0.0",
            group_id="g",
            engine=engine,
            chat=chat,
            provider=jails,
            config=config,
        )
    finally:
        await jails.close()
        await gateway.close()
    assert (trajectory.status, trajectory.error, trajectory.passed) == (Status.SUBMITTED, None, True)
    assert (trajectory.turns, trajectory.drift, trajectory.contexts) == (3, 0, 1)
    assert "return n < LIMIT" in transcript.turns[0].observation
    assert payload is not None
    check_exact(payload, engine, "g/0.0")
