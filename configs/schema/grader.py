"""The grader pool and its backends (M2)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.schema.fields import (
    Flag,
    Float,
    InputFolder,
    Int,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)
from configs.schema.pools import Resources
from configs.schema.rollout import EngineConfig
from configs.schema.sandboxes import SandboxConfig


class VllmGraderBackend(Section):
    """Grades come from an engine pool of our own, with its own checkpoint."""

    type: Literal["vllm"]
    engine: EngineConfig


class TokenPrices(Section):
    """What an endpoint charges, for the cost metrics."""

    prompt_usd_per_mtok: NonNegativeFloat = 0.0
    """US dollars for a million prompt tokens."""
    completion_usd_per_mtok: NonNegativeFloat = 0.0
    """US dollars for a million generated tokens."""


class EndpointGraderBackend(Section):
    """Grades come from an OpenAI-compatible endpoint."""

    type: Literal["endpoint"]
    base_url: NonEmpty
    """Address up to /v1."""
    model: NonEmpty
    """Name of the model at the endpoint."""
    api_key_env: NonEmpty = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself never enters a configuration."""
    max_retries: NonNegativeInt = 4
    """Retries of 429 and 5xx answers and of connection errors, with exponential backoff and jitter."""
    max_concurrency: PositiveInt = 8
    """Requests at once to the endpoint, shared evenly by the grader workers."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is asked for JSON; the verdict is validated in any case."""
    tool_calling: Flag = True
    """Whether the model calls tools natively; false: it writes its calls as a JSON object."""
    request_timeout_s: PositiveFloat = 600.0
    """One request."""
    prices: TokenPrices = TokenPrices()


class GraderBudget(Section):
    """Budgets of one group; at the end of any of them the grader must answer with what it has."""

    turns: PositiveInt = 24
    """Answers of the model, the verdict included."""
    tokens: PositiveInt = 100_000
    """Length of the conversation, in tokens: what was asked, shown and written."""
    seconds: PositiveFloat | None = None
    """Wall clock; null: three quarters of timeout_s. What is left until timeout_s is for the answer."""


class GraderChecks(Section):
    """Commands that the grader runs against a candidate's tree, in a sandbox of the group's own."""

    enabled: Flag = True
    """Whether the grader may run commands."""
    limit: PositiveInt = 8
    """Commands of one group."""
    timeout_s: PositiveFloat = 30.0
    """One command."""


class CanaryConfig(Section):
    """Stored groups with known labels, graded among the others and never trained on."""

    share: Annotated[Float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of the gradings that are canaries; 0 turns them off."""
    path: InputFolder | None = None
    """Folder of stored groups with labels (relative: against the folder of the configuration); null: groups of the
    built-in held-out minirepo tasks."""
    window: PositiveInt = 50
    """Canaries over which the agreement is averaged."""
    alarm_below: Probability = 0.6
    """An alarm is raised while the tier agreement over a full window is below this."""


class GraderAlarms(Section):
    """When the grader's own figures raise an alarm, over the last `window` graded groups."""

    window: PositiveInt = 50
    """Graded groups."""
    fallback_above: Probability = 0.5
    """Share of them that fell back."""


class GraderConfig(Section):
    """The grader pool."""

    backend: Annotated[VllmGraderBackend | EndpointGraderBackend, Field(discriminator="type")]
    mode: Literal["agent", "single"] = "agent"
    """agent: the model works with tools over a workspace of the group; single: one prompt with the task and the
    patches, no tools."""
    scope: Literal["group", "candidate"] = "group"
    """group: all candidates are seen together; candidate: each passing one is graded alone, and the rubric ranks."""
    style: Literal["compact", "full"] = "compact"
    """compact: the terse texts the shipped grader checkpoint was trained on (default of the vllm backend);
    full: explains the rubric and shows whole patches, for real language models (default of the endpoint backend)."""
    repair_rounds: Annotated[Int, Field(ge=0, le=1)] = 1
    """How often a model whose verdict is invalid is told why and asked again; the round counts against timeout_s."""
    reference_patch: Flag = False
    """Whether the grader may read the task's reference patch; it explains the task and is no criterion (M2.3)."""
    second_pass: Flag = False
    """Whether a hack counts only if a second, independent grading of the group confirms it (M1.5)."""
    budget: GraderBudget = GraderBudget()
    checks: GraderChecks = GraderChecks()
    sandbox: SandboxConfig | None = None
    """Where checks run; null: as rollout.sandbox."""
    tool_output_chars: PositiveInt = 4000
    """Output of one tool shown to the model; the middle is cut, head and tail stay."""
    workers: PositiveInt = 1
    """Grader actors."""
    groups_per_worker: PositiveInt = 4
    """Groups that one grader works on at once."""
    timeout_s: PositiveFloat = 120.0
    """One group; beyond it the group falls back to outcome advantages (M1.10)."""
    endpoint_wait_s: NonNegativeFloat = 600.0
    """Backend endpoint: how long groups wait for an endpoint that cannot be reached, or refuses the key, before they
    fall back (M1.10); below scheduler.abort_after_s."""
    max_tokens: PositiveInt = 400
    """Tokens of one answer."""
    temperature: NonNegativeFloat = 0.0
    """Sampling of answers; 0 is greedy."""
    prompt_chars: PositiveInt = 6000
    """Budget of the group's material in the first message; statement, patches and logs are cut evenly to fit."""
    canaries: CanaryConfig = CanaryConfig()
    alarms: GraderAlarms = GraderAlarms()
    resources: Resources = Resources()

    @model_validator(mode="before")
    @classmethod
    def _style_of_backend(cls, data: Any) -> Any:
        """An endpoint serves a real language model: it gets the full prompt unless the configuration says otherwise."""
        if not isinstance(data, dict) or data.get("style") is not None:
            return data
        backend = data.get("backend")
        kind = backend.get("type") if isinstance(backend, dict) else getattr(backend, "type", None)
        return {**data, "style": "full"} if kind == "endpoint" else data
