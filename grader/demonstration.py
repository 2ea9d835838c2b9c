"""A group graded as a small model should do it, written down as a conversation: what grader checkpoints learn from.

The answers are scripted; the prompts, the tools and what they say are those of a run.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from configs.schema import GraderConfig, RubricConfig
from grader.agent import AgentBudget, run_agent
from grader.candidates import CandidateGroup
from grader.client import ScriptedModel
from grader.examples import GraderExample
from grader.prompt import build_prompt, opening
from grader.tools import Desk
from grader.verdict import render_verdict, validate
from grader.workspace import Workspace

Way = Literal["agent", "candidate", "single"]
"""agent: the group with tools; candidate: one candidate by itself with tools; single: the patches, no tools."""
Message = tuple[str, str]
"""Role (user, assistant) and text."""


def demonstrate(example: GraderExample, way: Way, config: GraderConfig, rubric: RubricConfig) -> list[Message]:
    """The whole conversation, first message to verdict. Of a `candidate` way, about the first passing candidate.

    Raises:
        InvalidVerdict: the right answer is not valid for the code that judges a model's (a fault of the example).
    """
    if way == "single":
        prompt = build_prompt(example.group, style=config.style, prompt_chars=config.prompt_chars)
        return [("user", prompt.user), ("assistant", render_verdict(example.verdict))]
    only = example.group.passing[0].label if way == "candidate" else None
    group = example.group if only is None else example.group.only(only)
    said = answers(example, only)
    model = ScriptedModel(lambda told, number: said[number])
    workspace = Workspace.build(group, config.reference_patch)
    desk = Desk(workspace, rubric, style=config.style, output_chars=config.tool_output_chars, checker=None)
    first = opening(workspace, style=config.style, prompt_chars=config.prompt_chars)
    dialogue = model.open(system=first.system, user=first.user, request_id=group.group_id)
    budget = AgentBudget(turns=len(said) + 1, tokens=10**9, seconds=3600.0, answer_tokens=1)
    validate(asyncio.run(run_agent(dialogue, desk, budget, lambda _: None)), group, rubric)
    return dialogue.messages


def answers(example: GraderExample, only: str | None = None) -> list[str]:
    """The messages of a model that grades the group (or the candidate `only`) with the tools.

    First the file that the task names, then patch by patch, each judged right after it was read (M2.2), and the ranking
    last, in the order that follows from the scores.
    """
    labels = [only] if only else list(example.labels)
    steps: list[list[dict[str, Any]]] = []
    named = _named_file(example.group)
    first = [{"tool": "read", "path": f"repo/{named}"}] if named else []
    steps.append([*first, {"tool": "read", "path": f"{labels[0]}/patch"}])
    for label, following in zip(labels, [*labels[1:], None], strict=True):
        judge = {"tool": "judge", "candidate": label, **example.labels[label].verdict.model_dump(mode="json")}
        steps.append([judge, *([{"tool": "read", "path": f"{following}/patch"}] if following else [])])
    ranking = [[only]] if only else [list(tied) for tied in example.ranking]
    steps.append([{"tool": "verdict", "ranking": ranking, "hacks": []}])
    return [json.dumps({"calls": calls}, separators=(",", ":"), ensure_ascii=False) for calls in steps]


def _named_file(group: CandidateGroup) -> str | None:
    """The repository's file that the task's statement names first, if it names one."""
    found = [(group.task.statement.find(path), path) for path in group.task.files if path in group.task.statement]
    return min(found)[1] if found else None
