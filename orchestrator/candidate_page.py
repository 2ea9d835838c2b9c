"""One candidate's patch, turns and log as a person reads them, and where its citations point. Pure.

Everything here was written by the policy: `visible` leaves no character that could move a cursor or reorder a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grader.evidence import ChangeSign, PatchIndex, PatchLine, index_patch, log_lines
from infra.unseen import one_line, visible
from rollout.trajectory import Transcript

MAX_PATCH_LINES = 400
MAX_PATCH_CHARS = 400_000
"""A longer patch is shown as text, cut: reading it line by line would take too long."""
TEXT_CHARS = 3000
"""Of a statement, a turn's action, or what came back."""
MAX_TURNS = 60
AROUND = 3
"""Lines kept around a cited one where a patch is too long."""

_KINDS = {ChangeSign.ADDED: "add", ChangeSign.REMOVED: "remove", ChangeSign.CONTEXT: "context"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineView:
    """One line of a patch or a log."""

    number: int | None
    kind: str
    """add, remove, context, file (a heading), gap, or plain."""
    text: str
    anchor: str = ""
    """Its id on a page; empty where nothing can point at it."""
    cited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn of the policy."""

    number: int
    action: str
    observation: str
    exit_code: int | None
    anchor: str
    cited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceView:
    """One citation with what stands there."""

    text: str
    quote: str
    """The cited line, turn or command; empty if the group is not archived."""
    anchor: str
    """Where it is on the page; empty if it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckView:
    """A command that the grader ran."""

    number: int
    candidate: str
    command: str
    exit_code: int | None
    anchor: str


class CandidatePage:
    """What one candidate's citations can point at, with the anchors on the page."""

    def __init__(
        self, transcript: Transcript | None, cited: Sequence[str], checks: Sequence[CheckView], anchor: str
    ) -> None:
        self._transcript = transcript
        self._anchor = anchor
        self._checks = {f"run:{c.number}": c for c in checks}
        self._cited = frozenset(cited)
        patch = "" if transcript is None else transcript.patch
        self._index = (
            index_patch(patch) if len(patch) <= MAX_PATCH_CHARS else PatchIndex(lines=(), references=frozenset())
        )
        self._targets = _targets(self._index)
        self._log = [] if transcript is None else log_lines(transcript)

    def evidence(self, text: str) -> EvidenceView:
        """A citation with what it points at."""
        quote, anchor = "", ""
        kind, _, number = text.partition(":")
        if (at := self._targets.get(text)) is not None:
            line = self._index.lines[at]
            quote, anchor = f"{line.sign.value} {line.text}", f"{self._anchor}-p{at}"
        elif (check := self._checks.get(text)) is not None:
            code = "stopped" if check.exit_code is None else f"exit {check.exit_code}"
            quote, anchor = f"{check.command} ({code})", check.anchor
        elif number.isascii() and number.isdigit() and self._transcript is not None:
            at = int(number)
            if kind == "turn" and 1 <= at <= len(self._transcript.turns):
                quote, anchor = self._transcript.turns[at - 1].action, f"{self._anchor}-t{at}"
            elif kind == "log" and 1 <= at <= len(self._log):
                quote, anchor = self._log[at - 1], f"{self._anchor}-o{at}"
        return EvidenceView(text=one_line(text), quote=one_line(quote), anchor=anchor)

    def patch_lines(self) -> tuple[tuple[LineView, ...], str]:
        """The patch's lines, each under the number that a citation uses; and what is left out."""
        patch = "" if self._transcript is None else self._transcript.patch
        lines = self._index.lines
        if not lines:
            if not patch.strip():
                return (), "" if self._transcript is None else "no change"
            text = visible(patch, 2 * TEXT_CHARS).split("\n")
            note = "not a patch that can be read line by line; shown as it is"
            return tuple(LineView(number=None, kind="plain", text=one_line(line)) for line in text), note
        near = {
            i
            for text in self._cited
            if (at := self._targets.get(text)) is not None
            for i in range(at - AROUND, at + AROUND + 1)
        }
        keep = [i for i in range(len(lines)) if i < MAX_PATCH_LINES or i in near]
        left_out = len(lines) - len(keep)
        return tuple(self._numbered(keep)), f"{left_out} more lines are not shown" if left_out else ""

    def _numbered(self, keep: Sequence[int]) -> Iterator[LineView]:
        path, previous, before = "", 0, -1
        marked = {self._targets[text] for text in self._cited if text in self._targets}
        for i in keep:
            line = self._index.lines[i]
            if line.path != path:
                path, previous = line.path, line.base_line
                yield LineView(number=None, kind="file", text=one_line(path))
            elif line.base_line - previous > 1 or i != before + 1:
                yield LineView(number=None, kind="gap", text="...")
            previous, before = line.base_line, i
            yield LineView(
                number=line.line,
                kind=_KINDS[line.sign],
                text=one_line(line.text),
                anchor=f"{self._anchor}-p{i}",
                cited=i in marked,
            )

    def turns(self) -> tuple[TurnView, ...]:
        """The turns, without the middle ones where there are too many; cited ones stay."""
        turns = () if self._transcript is None else self._transcript.turns
        return tuple(
            TurnView(
                number=number,
                action=visible(turn.action, TEXT_CHARS),
                observation=visible(turn.observation, TEXT_CHARS),
                exit_code=turn.exit_code,
                anchor=f"{self._anchor}-t{number}",
                cited=f"turn:{number}" in self._cited,
            )
            for number, turn in enumerate(turns, 1)
            if len(turns) <= MAX_TURNS
            or number <= MAX_TURNS // 2
            or number > len(turns) - MAX_TURNS // 2
            or f"turn:{number}" in self._cited
        )

    def log(self) -> tuple[LineView, ...]:
        """The test log, which the verifier has cut already."""
        return tuple(
            LineView(
                number=number,
                kind="plain",
                text=one_line(line),
                anchor=f"{self._anchor}-o{number}",
                cited=f"log:{number}" in self._cited,
            )
            for number, line in enumerate(self._log, 1)
        )


def _targets(index: PatchIndex) -> dict[str, int]:
    """Reference -> position of the line it names. A number can name an added and a removed line: the added one counts,
    since citations name the new file first."""
    found: dict[str, int] = {}
    for i, line in enumerate(index.lines):
        at = found.get(line.reference)
        if at is None or _rank(line) < _rank(index.lines[at]):
            found[line.reference] = i
    return found


def _rank(line: PatchLine) -> int:
    return (ChangeSign.ADDED, ChangeSign.REMOVED, ChangeSign.CONTEXT).index(line.sign)
