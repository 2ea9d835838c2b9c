"""What the model is told first: the opening of an agent's dialogue, or the one prompt of the `single` mode.

Everything in it but the headings was written by others: it is data, made harmless (`grader.quoting`) and shown between
headings (compact) or tags (full).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from grader.budget import clip_lines, fair_shares
from grader.candidates import Candidate, CandidateGroup
from grader.instructions import agent_instructions, single_instructions
from grader.offers import verdict_schema
from grader.pages import Row, citable, patch_rows, render, show_rows, summary_rows, touched_files
from grader.quoting import frame, neutralise, one_line, word
from grader.workspace import Workspace
from rollout.trajectory import Status

Style = Literal["compact", "full"]

FAILING_CHARS = 240
"""A failing candidate is context only: one short block."""
_WORDS, _WORD_CHARS, _FILES = 10, 16, 4
"""Commands and files that a compact summary names."""
_FULL_FILES = 20


class Opening(NamedTuple):
    """The first messages of an agent's dialogue."""

    system: str | None
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderPrompt:
    """What is sent to the model in the `single` mode: its answer is the whole verdict."""

    system: str | None
    user: str
    schema: str
    """JSON schema of the verdict, as JSON."""
    references: Mapping[str, Sequence[str]] | None
    """Compact: label -> the citations that the schema allows; None where any string may be tried."""


def opening(workspace: Workspace, *, style: Style, prompt_chars: int, native: bool = False) -> Opening:
    """The opening of one group's grading: the task and a summary of every candidate (M2.2).

    Args:
        prompt_chars: bounds the user message's material; the statement gets what the candidates leave.
        native: whether calls are native function calls; if not, the full style explains the JSON action message.
    """
    if style == "compact":
        return Opening(None, _compact_opening(workspace.group, prompt_chars))
    return Opening(agent_instructions(native=native), _full_opening(workspace, prompt_chars))


def build_prompt(group: CandidateGroup, *, style: Style, prompt_chars: int) -> GraderPrompt:
    """The prompt of the `single` mode: task and patches, nothing to look up.

    `prompt_chars` bounds the material, headings included (not the full style's rubric).
    """
    if style == "compact":
        user, references = _compact_single(group, prompt_chars)
        schema = verdict_schema(group, references)
        return GraderPrompt(system=None, user=user, schema=_dump(schema), references=references)
    user = _full_single(group, prompt_chars)
    system = single_instructions()
    return GraderPrompt(system=system, user=user, schema=_dump(verdict_schema(group)), references=None)


def _dump(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, separators=(",", ":"))


def _size(lines: Sequence[str]) -> int:
    return sum(len(line) + 1 for line in lines)


# --- compact: for a small model trained on exactly this ---------------------------------------------------------------


def _compact_opening(group: CandidateGroup, budget: int) -> str:
    question = "## grade " + " ".join(c.label for c in group.passing)
    candidates = [_compact_summary(c) for c in group.candidates]
    shares = fair_shares([len(line) for line in candidates], budget * 3 // 4)
    candidates = [one_line(line, share) for line, share in zip(candidates, shares, strict=True)]
    lines = ["## candidates", *candidates, question]
    statement = neutralise(group.task.statement).strip().split("\n")
    return "\n".join(["## task", *clip_lines(statement, budget - _size(["## task", *lines])), *lines])


def _compact_summary(candidate: Candidate) -> str:
    turns = [turn.action.split() for turn in candidate.transcript.turns]
    words = [word(action[0], _WORD_CHARS) for action in turns if action and action != ["submit"]]
    head = f"{_compact_status(candidate)} {len(turns)} turns: {' '.join(words[:_WORDS])}".rstrip()
    return f"{head}; {touched_files(candidate, _FILES)}"


def _compact_status(candidate: Candidate) -> str:
    status = candidate.trajectory.status
    end = "" if status is Status.SUBMITTED else f" {status.value}"
    return f"{candidate.label} {'pass' if candidate.passed else 'fail'}{end}"


def _compact_single(group: CandidateGroup, budget: int) -> tuple[str, dict[str, tuple[str, ...]]]:
    statement = clip_lines(neutralise(group.task.statement).strip().split("\n"), budget // 4)
    question = "## grade " + " ".join(c.label for c in group.passing)
    headings = [f"## {_compact_status(c)}" for c in group.candidates]
    lines = ["## task", *statement]
    room = budget - _size([*lines, *headings, question])
    blocks = _patches(group, [patch_rows(c.transcript.patch, c.patch, brief=True) for c in group.candidates], room)
    references: dict[str, tuple[str, ...]] = {}
    for candidate, heading, (shown, cited) in zip(group.candidates, headings, blocks, strict=True):
        lines += [heading, *shown]
        if candidate.passed:
            references[candidate.label] = citable(candidate, cited)
    return "\n".join([*lines, question]), references


def _patches(
    group: CandidateGroup, pages: Sequence[Sequence[Row]], budget: int
) -> list[tuple[list[str], tuple[str, ...]]]:
    """Lines of each patch, cut evenly, and the citations among them; failing ones are short whatever is left."""
    wanted = [
        min(_bound(rows, budget), budget if c.passed else FAILING_CHARS)
        for rows, c in zip(pages, group.candidates, strict=True)
    ]
    return [show_rows(rows, share) for rows, share in zip(pages, fair_shares(wanted, budget), strict=True)]


def _bound(rows: Sequence[Row], limit: int) -> int:
    """How many characters the rows take; `limit`, not counted, where they are more than that anyway."""
    return limit if len(rows) > limit else _size([render(row) for row in rows])


# --- full: for language models that can read instructions -------------------------------------------------------------


def _full_opening(workspace: Workspace, budget: int) -> str:
    group = workspace.group
    headings = [_full_heading(c) for c in group.candidates]
    frames = [frame(f"{c.label}/summary", ()) for c in group.candidates]
    labels = ", ".join(c.label for c in group.passing)
    question = f"Judge each of the passing candidates ({labels}), then give the verdict."
    statement = neutralise(group.task.statement).strip().split("\n")
    room = max(0, budget - _size([*frame("task.md", ()), *headings, *(line for f in frames for line in f), question]))
    statement = clip_lines(statement, room // 3)
    summaries = [[one_line(line) for line in _full_summary(c)] for c in group.candidates]
    shares = fair_shares([_size(text) for text in summaries], room - _size(statement))
    lines = frame("task.md", statement)
    for candidate, heading, text, share in zip(group.candidates, headings, summaries, shares, strict=True):
        lines += [heading, *frame(f"{candidate.label}/summary", clip_lines(text, share))]
    return "\n".join([*lines, question])


def _full_heading(candidate: Candidate) -> str:
    return (
        f"Candidate {candidate.label}: {'PASSED' if candidate.passed else 'FAILED'} the hidden tests; "
        f"ended as {candidate.trajectory.status.value} after {len(candidate.transcript.turns)} turns."
    )


def _full_summary(candidate: Candidate) -> Iterator[str]:
    yield f"files: {touched_files(candidate, _FULL_FILES)}"
    yield from map(str, summary_rows(candidate))


def _full_single(group: CandidateGroup, budget: int) -> str:
    headings = [_full_heading(c) for c in group.candidates]
    frames = [line for c in group.candidates for line in frame(f"{c.label}/patch", ())]
    labels = ", ".join(c.label for c in group.passing)
    question = f"Grade the passing candidates: {labels}. Answer with the verdict as one JSON object and nothing else."
    room = max(0, budget - _size([*frame("task.md", ()), *headings, *frames, question]))
    statement = clip_lines(neutralise(group.task.statement).strip().split("\n"), room // 3)
    pages = [patch_rows(c.transcript.patch, c.patch, brief=not c.passed) for c in group.candidates]
    blocks = _patches(group, pages, room - _size(statement))
    lines = frame("task.md", statement)
    for candidate, heading, (shown, _) in zip(group.candidates, headings, blocks, strict=True):
        lines += [heading, *frame(f"{candidate.label}/patch", shown)]
    return "\n".join([*lines, question])
