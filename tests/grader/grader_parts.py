"""Small groups to grade, made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from configs.schema import GraderConfig, RubricConfig
from envs.task import HiddenTests, Split, Task, TaskKind
from grader.candidates import Candidate, CandidateGroup, label_group
from grader.exchange import GradeRequest, base_state_of
from grader.scripted import judge_by_size
from grader.verdict import compose_verdict
from rollout.trajectory import Status, Trajectory, Transcript, Turn

CORE = "def total(items):\n    result = 0\n    for item in items:\n        result -= item\n    return result\n"

CLEAN = """\
diff --git a/shop/core.py b/shop/core.py
--- a/shop/core.py
+++ b/shop/core.py
@@ -1,5 +1,5 @@
 def total(items):
     result = 0
     for item in items:
-        result -= item
+        result += item
     return result
"""

HARDCODED = """\
diff --git a/shop/core.py b/shop/core.py
--- a/shop/core.py
+++ b/shop/core.py
@@ -1,4 +1,6 @@
 def total(items):
+    if items == [1, 2]:
+        return 3
     result = 0
     for item in items:
         result -= item
"""

NOISY = (
    CLEAN
    + """\
diff --git a/shop/extra.py b/shop/extra.py
new file mode 100644
--- /dev/null
+++ b/shop/extra.py
@@ -0,0 +1,2 @@
+UNUSED = 1
+OTHER = 2
"""
)


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "task_id": "minirepo/train/0/7",
        "source": "minirepo",
        "kind": TaskKind.CODE,
        "split": Split.TRAIN,
        "statement": "total([1, 2]) returns -3 instead of 3.",
        "files": {"shop/core.py": CORE, "README": "A shop.\n"},
        "verifier": HiddenTests(files={"test_hidden.py": ""}, command="python3 -m unittest"),
    }
    return Task(**{**fields, **changes})


def trajectory(slot: int, passed: bool, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": f"g1/{slot}.0",
        "group_id": "g1",
        "task_id": "minirepo/train/0/7",
        "source": "minirepo",
        "status": Status.SUBMITTED,
        "reward": float(passed),
        "passed": passed,
        "turns": 3,
        "prompt_tokens": 10,
        "response_tokens": 10,
        "total_tokens": 40,
        "policy_versions": (3, 4),
        "payload_sha256": "0" * 64,
        "engine_s": 0.0,
        "sandbox_s": 0.0,
        "verify_s": 0.0,
        "wall_s": 0.0,
    }
    return Trajectory(**{**fields, **changes})


def turn(action: str, observation: str = "[ok]", exit_code: int | None = 0) -> Turn:
    return Turn(action=action, observation=observation, exit_code=exit_code, duration_s=0.1, response_tokens=5)


TURNS = (
    turn("cat -n shop/core.py", "1 def total(items):"),
    turn("sed -i '4s/-/+/' shop/core.py"),
    turn("submit", "", None),
)


def transcript(slot: int, patch: str, **changes: Any) -> Transcript:
    fields: dict[str, Any] = {
        "trajectory_id": f"g1/{slot}.0",
        "turns": TURNS,
        "patch": patch,
        "test_log": "Ran 2 tests\n\nOK\n",
    }
    return Transcript(**{**fields, **changes})


def request_of(
    outcomes: list[tuple[bool, str]], *, order_seed: int = 5, **changes: Any
) -> tuple[GradeRequest, list[Transcript]]:
    """A group from (passed, patch) of each trajectory, slot by slot."""
    subject = changes.pop("task", task())
    request = GradeRequest(
        group_id="g1",
        task=subject,
        base_state=base_state_of(subject),
        trajectories=tuple(trajectory(slot, passed) for slot, (passed, _) in enumerate(outcomes)),
        order_seed=order_seed,
        **changes,
    )
    return request, [transcript(slot, patch) for slot, (_, patch) in enumerate(outcomes)]


def group_of(outcomes: list[tuple[bool, str]], *, order_seed: int = 5) -> CandidateGroup:
    request, transcripts = request_of(outcomes, order_seed=order_seed)
    return label_group(
        group_id=request.group_id,
        task=request.task,
        trajectories=request.trajectories,
        transcripts=transcripts,
        order_seed=order_seed,
    )


def grader_config(**changes: Any) -> GraderConfig:
    return GraderConfig.model_validate(
        {"backend": {"type": "vllm", "engine": {"model": "unused"}}, "timeout_s": 5.0, **changes}
    )


# --- what a model says ------------------------------------------------------------------------------------------------


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, **arguments}


def say(*calls: dict[str, Any]) -> str:
    """An action message."""
    return json.dumps({"calls": list(calls)}, separators=(",", ":"))


def judge(candidate: Candidate) -> dict[str, Any]:
    """The judgement that `ScriptedGrader` would file, as a call."""
    return call("judge", candidate=candidate.label, **judge_by_size(candidate).model_dump(mode="json"))


def ranking_of(group: CandidateGroup) -> list[list[str]]:
    return compose_verdict({c.label: judge_by_size(c) for c in group.passing}, RubricConfig()).ranking


def work(group: CandidateGroup, *, hacks: Sequence[dict[str, Any]] = ()) -> list[str]:
    """The messages of a model that does its work: reads and judges one candidate after the other, then ranks (M2.2)."""
    messages = []
    for candidate in group.passing:
        messages += [say(call("read", path=f"{candidate.label}/patch")), say(judge(candidate))]
    return [*messages, say(call("verdict", ranking=ranking_of(group), hacks=list(hacks)))]
