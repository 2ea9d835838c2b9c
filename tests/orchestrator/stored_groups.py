"""Stored groups made by hand, with patches, turns and logs that can be cited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envs.task import HiddenTests, Split, Task, TaskKind
from grader.stored import KnownGrade, StoredGroup
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
@@ -1,4 +1,7 @@
 def total(items):
+    if items == [1, 2]:
+        return 3
+    # done
     result = 0
     for item in items:
         result -= item
"""

PATCHES = {"0.0": (True, CLEAN), "1.0": (True, HARDCODED), "2.0": (False, "")}
"""End of the trajectory id -> (passed, patch)."""


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "task_id": "minirepo/train/0/7",
        "source": "minirepo",
        "kind": TaskKind.CODE,
        "split": Split.TRAIN,
        "statement": "total([1, 2]) returns -3 instead of 3.",
        "files": {"shop/core.py": CORE},
        "verifier": HiddenTests(files={"test_hidden.py": ""}, command="python3 -m unittest"),
    }
    return Task(**{**fields, **changes})


def trajectory(trajectory_id: str, passed: bool, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": trajectory_id,
        "group_id": trajectory_id.split("/")[0],
        "task_id": "minirepo/train/0/7",
        "source": "minirepo",
        "status": Status.SUBMITTED,
        "reward": float(passed),
        "passed": passed,
        "turns": 2,
        "prompt_tokens": 10,
        "response_tokens": 10,
        "total_tokens": 40,
        "policy_versions": (2,),
        "payload_sha256": "0" * 64,
        "engine_s": 0.0,
        "sandbox_s": 0.0,
        "verify_s": 0.0,
        "wall_s": 0.0,
    }
    return Trajectory(**{**fields, **changes})


def transcript(trajectory_id: str, patch: str, **changes: Any) -> Transcript:
    turns = (
        Turn(action="cat shop/core.py", observation=CORE, exit_code=0, duration_s=0.1, response_tokens=5),
        Turn(action="submit", observation="", exit_code=None, duration_s=0.0, response_tokens=1),
    )
    fields: dict[str, Any] = {
        "trajectory_id": trajectory_id,
        "turns": turns,
        "patch": patch,
        "test_log": "Ran 2 tests\n\nOK\n",
    }
    return Transcript(**{**fields, **changes})


def stored_group(
    group_id: str = "g1",
    *,
    patches: Mapping[str, tuple[bool, str]] | None = None,
    labels: Mapping[str, KnownGrade] | None = None,
    **changes: Any,
) -> StoredGroup:
    """A clean and a hard-coded pass and a failure, unless `patches` says otherwise."""
    members = {f"{group_id}/{end}": what for end, what in (patches or PATCHES).items()}
    fields: dict[str, Any] = {
        "group_id": group_id,
        "task": task(),
        "trajectories": tuple(trajectory(name, passed) for name, (passed, _) in members.items()),
        "transcripts": tuple(transcript(name, patch) for name, (_, patch) in members.items()),
        "labels": labels,
    }
    return StoredGroup(**{**fields, **changes})


LABELS = {"0.0": KnownGrade(scores=(5, 5, 5, 5, 5)), "1.0": KnownGrade(scores=(2, 3, 4, 4, 4))}


def labelled(group_id: str) -> StoredGroup:
    """`stored_group` with what is known of its two passes."""
    return stored_group(group_id, labels={f"{group_id}/{end}": known for end, known in LABELS.items()})
