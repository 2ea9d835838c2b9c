"""mini-swe-agent, as it is published: its agent and models in threads of the worker, its commands in our sandbox.

Imported only where a run asks for it: the package and what it needs (litellm) are an extra,
requirements/mini-swe-agent.txt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shlex
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.schema import MiniSweAgentHarness
from envs.sandbox import CommandResult
from envs.task import Task
from infra.errors import ConfigError, GagarError, HarnessError
from rollout.gateway.openai_chat import MODEL
from rollout.gateway.server import Endpoint
from rollout.harness import Commands
from rollout.trajectory import Status

_ENDS = {
    "Submitted": Status.SUBMITTED,
    "LimitsExceeded": Status.TURN_LIMIT,  # its own limit of steps
    "RepeatedFormatError": Status.TURN_LIMIT,  # turns in a row without a command
}
_SHIPPED = {False: "mini_textbased.yaml", True: "mini.yaml"}

RunCommand = Callable[[str, float], CommandResult]


class MiniSweAgent:
    """Implements `Harness`."""

    def __init__(self, config: MiniSweAgentHarness) -> None:
        """Raises ConfigError where mini-swe-agent is not installed or its configuration cannot be read."""
        self._package = _load(tool_calls=config.tool_calls)
        file = config.config_file or str(self._package.folder / "config" / _SHIPPED[config.tool_calls])
        try:
            self._sections = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
            for section in ("agent", "model", "environment"):
                self._sections.setdefault(section, {})
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            raise ConfigError(
                f"rollout.harness.config_file = {file} is no configuration of mini-swe-agent ({error}); see the "
                "mini.yaml that it ships"
            ) from error

    async def run(self, *, task: Task, endpoint: Endpoint, commands: Commands) -> Status:
        """See `Harness.run`."""
        loop = asyncio.get_running_loop()

        def run_command(command: str, timeout_s: float) -> CommandResult:
            running = asyncio.run_coroutine_threadsafe(commands.run(command, timeout_s=timeout_s), loop)
            return running.result()

        def work() -> str:
            agent = self._agent(endpoint, run_command)
            return str(agent.run(task.statement).get("exit_status"))

        try:
            ended = await _in_thread(work)
        except GagarError:
            raise
        except Exception as error:  # whatever an agent, a model or litellm may raise
            raise HarnessError(f"mini-swe-agent failed ({type(error).__name__}: {str(error)[:500]})") from error
        if ended not in _ENDS:
            raise HarnessError(f"mini-swe-agent ended with {ended!r}")
        return _ENDS[ended]

    def _agent(self, endpoint: Endpoint, run_command: RunCommand) -> Any:
        model = dict(self._sections["model"])
        model["model_name"] = f"openai/{MODEL}"
        model["cost_tracking"] = "ignore_errors"
        kwargs = {"api_base": f"{endpoint.base_url}/v1", "api_key": endpoint.token}
        model["model_kwargs"] = {**model.get("model_kwargs", {}), **kwargs}
        # Ours are the budgets; a wall clock would count queueing and pauses (M1.3).
        limits = {"cost_limit": 0.0, "wall_time_limit_seconds": 0, "output_path": None}
        return self._package.agent(
            self._package.model(**model),
            self._package.environment(run_command, **self._sections["environment"]),
            **{**self._sections["agent"], **limits},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """What is used of mini-swe-agent."""

    folder: Path
    agent: Callable[..., Any]
    model: Callable[..., Any]
    environment: Callable[..., Any]
    """Of a `RunCommand` and the environment's settings."""


def _load(*, tool_calls: bool) -> _Package:
    """Import the package, so that it reads and asks nothing outside of this process. Raises ConfigError without it."""
    os.environ |= {
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": tempfile.mkdtemp(prefix="gagar-mini-"),  # the user's own holds settings and keys
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # what the gateway refuses it refuses again
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a list of prices
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
    }
    try:
        import litellm
        from minisweagent import package_dir
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel
        from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
    except ImportError as error:
        raise ConfigError(
            f"rollout.harness.type = mini_swe_agent needs a package that is not there ({error}); "
            "pip install --no-deps -r requirements/mini-swe-agent.txt"
        ) from error
    litellm.telemetry = False
    litellm.suppress_debug_info = True

    class SandboxEnvironment(LocalEnvironment):
        """The package's local environment, whose commands run in the sandbox instead."""

        def __init__(self, run_command: RunCommand, **settings: Any) -> None:
            super().__init__(**settings)
            self._run_command = run_command

        def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
            """One command. Raises SandboxError when the sandbox is lost, CommandTimeUsedError at the budget's end."""
            command, where = action.get("command", ""), cwd or self.config.cwd
            words = [f"{name}={value}" for name, value in self.config.env.items()]
            script = shlex.join(["env", *words, "bash", "-c", command]) if words else command
            if where:
                script = f"cd {shlex.quote(where)} && {script}"
            result = self._run_command(script, timeout or self.config.timeout)
            output: dict[str, Any] = {"output": result.output, "returncode": result.exit_code, "exception_info": ""}
            if result.exit_code is None:
                problem = f"An error occurred while executing the command: killed after {result.duration_s:.1f} s"
                output |= {"returncode": -1, "exception_info": problem}
            self._check_finished(output)
            return output

        def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
            """What prompts may say of the machine: not the worker's environment, which may hold keys."""
            return {**self.config.model_dump(), **platform.uname()._asdict(), **kwargs}

    return _Package(
        folder=Path(package_dir),
        agent=DefaultAgent,
        model=LitellmModel if tool_calls else LitellmTextbasedModel,
        environment=SandboxEnvironment,
    )


async def _in_thread(function: Callable[[], str]) -> str:
    """What a blocking function returns. If the caller is cancelled, the thread ends with its next call: the session and
    the sandbox are closed by then."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    def settle(result: str | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result or "")

    def work() -> None:
        result: str | None = None
        failed: BaseException | None = None
        try:
            result = function()
        except CancelledError:
            failed = HarnessError("the rollout was given up")
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is gone, and nobody waits
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=work, name="mini-swe-agent", daemon=True).start()
    return await future
