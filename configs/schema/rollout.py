"""Engines, and the workers that sample trajectories with them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.fields import (
    Flag,
    Float,
    InputFolder,
    ModelFolder,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)
from configs.schema.pools import Resources
from configs.schema.sandboxes import JailSandbox, SandboxConfig


class LimitsConfig(Section):
    """Budgets of one trajectory (M1.3). Turns, tokens and command time are the policy's; the wall clock masks."""

    max_turns: PositiveInt = 8
    """Commands, submit included."""
    max_turn_tokens: PositiveInt = 160
    """Generated tokens in one turn."""
    max_total_tokens: PositiveInt = 1024
    """Prompt, generated and observation tokens together; must fit the engine's max_model_len."""
    command_timeout_s: PositiveFloat = 10.0
    """One command; a command that runs longer is killed and the model is told."""
    command_budget_s: PositiveFloat = 60.0
    """All commands of the trajectory together; beyond it the trajectory ends with status time_limit."""
    wall_s: PositiveFloat = 300.0
    """Backstop on the wall clock; reaching it masks the trajectory (infra_wall)."""
    observation_chars: PositiveInt = 1600
    """Output of one command shown to the model; the middle is cut, head and tail stay."""


class SamplingConfig(Section):
    """Sampling of the policy. Top-p and top-k stay off in training, so the recorded probability is the policy's."""

    temperature: PositiveFloat = 1.0
    """The recorded probabilities are those after temperature."""


class EngineConfig(Section):
    """One pool of vLLM engines."""

    model: ModelFolder
    """HF checkpoint folder (relative paths: against the folder of the configuration file)."""
    replicas: PositiveInt = 1
    """Engines in the pool."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and activations in the engine."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the engines run."""
    max_model_len: PositiveInt = 1024
    """Context of one sequence, in tokens."""
    max_num_seqs: PositiveInt = 64
    """Sequences that one engine decodes at once."""
    kv_cache_gib: PositiveFloat = 0.5
    """CPU: size of the KV cache in GiB. CUDA: ignored in favour of gpu_memory_utilization, and refused if set."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0.0, lt=1.0)] | None = None
    """CUDA only."""
    tensor_parallel_size: PositiveInt = 1
    """CUDA: GPUs of one engine."""
    threads: PositiveInt = 1
    """CPU: OpenMP threads of one engine."""
    enforce_eager: Flag = True
    """false lets vLLM compile and capture graphs: a slower start, faster decoding."""
    weight_transfer: Literal["ray_object", "nccl"] = "ray_object"
    """How new weights reach the engines: through Ray's object store, or NCCL on CUDA."""
    resources: Resources = Resources()


class BuiltinHarness(Section):
    """Our own agent loop: one context, one command a message."""

    type: Literal["builtin"] = "builtin"


class MiniSweAgentHarness(Section):
    """mini-swe-agent as it is published, on the workers; its commands run in the sandbox. See docs/harnesses.md."""

    type: Literal["mini_swe_agent"]
    config_file: InputFolder | None = None
    """Its own configuration, with sections agent, model and environment; null: the one that the package ships."""
    tool_calls: Flag = False
    """true: commands come as calls of a tool (the chat template must render tools); false: in a fenced block."""


class CommandHarness(Section):
    """A program of yours, inside the sandbox (of type jail), with the gateway as its only network."""

    type: Literal["command"]
    command: Text
    """Shell command that works on $GAGAR_TASK in the workspace; it finds the policy by OPENAI_* and ANTHROPIC_*."""
    paths: tuple[InputFolder, ...] = ()
    """Folders of the workers' hosts that sandboxes see too, read-only, at the same place: the program and its parts."""


HarnessConfig = Annotated[BuiltinHarness | MiniSweAgentHarness | CommandHarness, Field(discriminator="type")]


class RolloutConfig(Section):
    """The rollout pool: workers that run agent loops over sandboxes and engines."""

    workers: PositiveInt = 1
    """Worker processes."""
    slots_per_worker: PositiveInt = 16
    """Trajectories that one worker runs at once."""
    harness: HarnessConfig = BuiltinHarness()
    """What drives the policy through tasks with a sandbox; single answers need none."""
    action_format: Literal["plain", "fenced"] = "plain"
    """builtin: plain: the whole message is one bash command; fenced: the command is in one ```bash block."""
    system_prompt: Text | None = None
    """builtin: text of a system message before each task; null: none."""
    limits: LimitsConfig = LimitsConfig()
    sampling: SamplingConfig = SamplingConfig()
    sandbox: SandboxConfig = JailSandbox()
    infra_retries: NonNegativeInt = 2
    """How often one trajectory lost to infrastructure is sampled again before it is masked."""
    resources: Resources = Resources()
