"""The desk of one grading: what the model asked for, what it was told, and what it has judged so far.

A call never fails for what a model asked: it is answered with "error: ..." and how to mend it. Judgements are checked
when they are filed, by the code that checks the verdict (M2.6), and what was filed is what the verdict is made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.schema import RubricConfig
from grader.checks import Checker, CheckError
from grader.evidence import CheckResult
from grader.offers import Offer, Situation, make_offer
from grader.pages import Page, Row, citable, show_rows
from grader.prompt import Style as Style
from grader.quoting import COMPACT_LINE_CHARS, LINE_CHARS, frame, one_line, word
from grader.verdict import (
    CandidateVerdict,
    InvalidVerdict,
    Judgement,
    Verdict,
    compose_verdict,
    judge_candidate,
    parse_judgement,
    verdict_from,
)
from grader.workspace import Workspace, WorkspaceError
from infra.errors import SandboxError

MAX_COMMAND_CHARS = 2000
MAX_PATHS = 256
"""Paths that a compact offer lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the model."""

    tool: str
    arguments: Mapping[str, Any]
    call_id: str | None = None
    """Native function calling: what the answer is attached to."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _List(_Arguments):
    path: str | None = None


class _Read(_Arguments):
    path: str
    start: int | None = None
    end: int | None = None


class _Search(_Arguments):
    pattern: str = Field(max_length=400)
    path: str | None = None


class _Diff(_Arguments):
    a: str
    b: str


class _Turn(_Arguments):
    candidate: str
    turn: int


class _Run(_Arguments):
    candidate: str
    command: str = Field(min_length=1, max_length=MAX_COMMAND_CHARS)


class Desk:
    """One grading's state. Calls are executed one at a time."""

    def __init__(
        self, workspace: Workspace, rubric: RubricConfig, *, style: Style, output_chars: int, checker: Checker | None
    ) -> None:
        """`output_chars` bounds each result, head and tail stay; without a `checker` no command can be run."""
        self.workspace = workspace
        self.rubric = rubric
        self.style = style
        self.output_chars = output_chars
        self.checker = checker
        self.judgements: dict[str, CandidateVerdict] = {}
        """By label, the latest of each candidate."""
        self.verdict: Verdict | None = None
        """What the last `verdict` call came to; not validated."""
        self._judged: dict[str, Judgement] = {}
        self._read: set[str] = set()
        self._shown: dict[str, tuple[str, ...]] = {}

    @property
    def checks(self) -> tuple[CheckResult, ...]:
        """The commands run so far."""
        return self.checker.results if self.checker else ()

    async def execute(self, call: Call) -> str:
        """The answer to one call, ready to be shown."""
        try:
            return await self._answer(call)
        except ValidationError as error:
            return self.error(_fault(error))
        except (WorkspaceError, CheckError, InvalidVerdict) as error:
            return self.error(str(error))
        except SandboxError:
            return self.error("the sandbox was lost")

    def offer(self, final: bool = False) -> Offer:
        """Which calls can be made now; `final` leaves the verdict alone, with what it still needs."""
        group = self.workspace.group
        compact = self.style == "compact"
        return make_offer(
            Situation(
                labels=self.workspace.labels,
                passing=[c.label for c in group.passing],
                judged=self._judged,
                final=final,
                checks=self.checker is not None and self.checker.left > 0,
                paths=self._unread() if compact else (),
                references=self._references(final) if compact else None,
            )
        )

    def _references(self, final: bool) -> Mapping[str, Sequence[str]]:
        """What the compact style lets be cited: of patches that were shown, and in a last answer of all."""
        if final:
            for candidate in self.workspace.group.passing:
                if candidate.label not in self._shown:
                    self._show(self.workspace.read(f"{candidate.label}/patch", brief=True))
        return self._shown

    def _unread(self) -> list[str]:
        files = sorted(self.workspace.group.task.files)
        paths = [*(f"{label}/patch" for label in self.workspace.labels), *(f"repo/{path}" for path in files)]
        return [path for path in paths if path not in self._read][:MAX_PATHS]

    async def _answer(self, call: Call) -> str:
        arguments = call.arguments
        match call.tool:
            case "list":
                return self._page(self.workspace.list(_List.model_validate(arguments).path or ""))
            case "read":
                return self._open(_Read.model_validate(arguments))
            case "search":
                search = _Search.model_validate(arguments)
                return self._page(self.workspace.search(search.pattern, search.path or ""))
            case "diff":
                diff = _Diff.model_validate(arguments)
                return self._page(self.workspace.diff(diff.a, diff.b))
            case "turn":
                turn = _Turn.model_validate(arguments)
                return self._page(self.workspace.turn(turn.candidate, turn.turn))
            case "run":
                return await self._run(_Run.model_validate(arguments))
            case "judge":
                return self._judge(arguments)
            case "verdict":
                return self._end(arguments)
            case other:
                return self.error(f"there is no tool {other}; there are {', '.join(self.offer().names)}")

    def _open(self, read: _Read) -> str:
        compact = self.style == "compact"
        page = self.workspace.read(read.path, read.start, read.end, brief=compact)
        self._read.add(page.path)
        rest = page.path.partition("/")[2]
        return self._framed(page.path, self._show(page) if compact and rest == "patch" else self._lines(page))

    def _show(self, page: Page) -> list[str]:
        """The lines of a patch; what of it can be cited is remembered."""
        label = page.path.partition("/")[0]
        lines, cited = show_rows(page.rows, self.output_chars, self._line_chars)
        self._shown[label] = citable(self.workspace.candidate(label), cited)
        return lines

    async def _run(self, run: _Run) -> str:
        candidate = self.workspace.candidate(run.candidate)
        if self.checker is None:
            raise CheckError("no commands can be run here; read instead")
        result = await self.checker.run(candidate.label, run.command)
        code = "none, stopped at its time limit" if result.exit_code is None else str(result.exit_code)
        head = f"run:{result.number} {result.candidate} exit {code}"
        said = result.output.rstrip("\n")
        rows = [Row(mark="| ", text=line) for line in said.split("\n")] if said else []
        body = self._lines(Page(path="", rows=tuple(rows)))
        return "\n".join(
            [f"## {head}", *body] if self.style == "compact" else [head, *frame(f"run:{result.number}", body)]
        )

    def _judge(self, arguments: Mapping[str, Any]) -> str:
        label = arguments.get("candidate")
        if not isinstance(label, str):
            raise WorkspaceError("judge needs the candidate's label")
        candidate = self.workspace.candidate(label)
        filed = parse_judgement(arguments)
        judged = judge_candidate(filed, candidate, self.rubric, self.checks)
        self.judgements[label], self._judged[label] = filed, judged
        head = "## " if self.style == "compact" else ""
        lines = [f"{head}judged {label}: {judged.tier.value} W {judged.weighted:.2f}"]
        if judged.dropped:
            lines.append(f"not evidence, nothing there: {'; '.join(one_line(text, 80) for text in judged.dropped)}")
        passing = [c.label for c in self.workspace.group.passing]
        if all(name in self.judgements for name in passing):
            order = compose_verdict({name: self.judgements[name] for name in passing}, self.rubric).ranking
            lines.append(f"order: {json.dumps(order, separators=(',', ':'))}")
        return "\n".join(lines)

    def _end(self, arguments: Mapping[str, Any]) -> str:
        given = arguments.get("candidates") or {}
        if not isinstance(given, Mapping):
            raise WorkspaceError("candidates must be an object: label -> judgement")
        filed = {label: one.model_dump(mode="json") for label, one in self.judgements.items()}
        anew = {label: body for label, body in given.items() if body is not None}
        self.verdict = verdict_from({"hacks": [], **arguments, "candidates": {**filed, **anew}})
        return "the verdict is filed"

    def _page(self, page: Page) -> str:
        return self._framed(page.path, self._lines(page))

    def _lines(self, page: Page) -> list[str]:
        return show_rows(page.rows, self.output_chars, self._line_chars)[0]

    @property
    def _line_chars(self) -> int:
        longest = COMPACT_LINE_CHARS if self.style == "compact" else LINE_CHARS
        return min(longest, max(self.output_chars // 4, 40))

    def _framed(self, title: str, lines: Sequence[str]) -> str:
        name = re.sub("[<>]", "?", word(title, LINE_CHARS))
        return "\n".join([f"## {name}", *lines] if self.style == "compact" else frame(name, lines))

    def error(self, message: str) -> str:
        """How a fault is told to the model."""
        head = "## " if self.style == "compact" else ""
        return f"{head}error: {one_line(message)}"


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the arguments"
    return f"{where}: {first['msg']}"
