"""Citations and what they resolve to (M2.4). What does not resolve is not evidence.

Four forms: "path:line" (a line that the candidate's patch touches, or shows in the new file), "turn:N" (1-based),
"log:N" (1-based line of the candidate's test log) and "run:N" (the check numbered N, which ran on that candidate).
A citation is resolved against its own candidate only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from grader.patched import PatchError, parse_section, sections
from rollout.trajectory import Transcript


class ChangeSign(StrEnum):
    """Which side of a diff a line stands on."""

    ADDED = "+"
    REMOVED = "-"
    CONTEXT = " "


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLine:
    """One line of a diff."""

    path: str
    name: str
    """How the file is called in citations: its path, or `odd-name-N` where that could read as something else."""
    line: int
    """Number in the new file; for removed lines in the base file."""
    base_line: int
    """Number in the base file; for added lines that of the base line just above (0 at the top of a file)."""
    sign: ChangeSign
    text: str

    @property
    def reference(self) -> str:
        """The citation that names it."""
        return f"{self.name}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchIndex:
    """A parsed patch."""

    lines: tuple[PatchLine, ...]
    references: frozenset[str]
    """Every "path:line" that resolves; an odd path goes by its `odd-name-N`."""

    @property
    def changed(self) -> tuple[PatchLine, ...]:
        """Added and removed lines, in the patch's order."""
        return tuple(line for line in self.lines if line.sign is not ChangeSign.CONTEXT)


class CitationKind(StrEnum):
    """What a citation points at."""

    PATCH = "patch"
    TURN = "turn"
    LOG = "log"
    RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """A citation that resolved."""

    kind: CitationKind
    text: str
    """Normalised, as it is written to the audit trail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A command that the grader ran in its own sandbox (M2.1)."""

    number: int
    """1-based, counted per dialogue with the model: together with the candidate, what "run:N" names."""
    candidate: str
    """Label of the candidate whose patch was applied."""
    command: str
    exit_code: int | None
    """None: stopped at its time limit."""
    output: str


class Citable(Protocol):
    """What citations are resolved against; `grader.candidates.Candidate` is one."""

    @property
    def label(self) -> str:
        """Its anonymous label."""
        ...

    @property
    def transcript(self) -> Transcript:
        """Its turns and test log."""
        ...

    @property
    def patch(self) -> PatchIndex:
        """Its parsed patch."""
        ...


_EVENT = re.compile(r"(turn|log|run):([1-9][0-9]{0,5})")
_PLACE = re.compile(r"(?:\./)?([^\s:][^:\n]{0,399}):([1-9][0-9]{0,6})")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.@+,~/-]{1,100}")
_CLAIMED = re.compile(r"turn|log|run|odd-name-[0-9]+")
"""What stands before the ":" in citations of something else than a file that is called so."""


def is_plain(path: str) -> bool:
    """Whether a file may be called by its path. A policy chooses names: they must not read as words to the grader, and
    a line of a file must not be cited as something else."""
    return _PLAIN_PATH.fullmatch(path) is not None and _CLAIMED.fullmatch(path) is None


def index_patch(patch: str) -> PatchIndex:
    """Parse a unified diff written by the policy's side. Never raises: files that do not parse are left out."""
    lines: list[PatchLine] = []
    odd: dict[str, str] = {}
    for part in sections(patch):
        lines.extend(_lines_of(part, odd))
    return PatchIndex(lines=tuple(lines), references=frozenset(line.reference for line in lines))


def _lines_of(part: str, odd: dict[str, str]) -> list[PatchLine]:
    try:
        files = parse_section(part)
    except PatchError:
        return []
    lines: list[PatchLine] = []
    for file in files:
        name = file.path if is_plain(file.path) else odd.setdefault(file.path, f"odd-name-{len(odd) + 1}")
        for hunk in file:
            above = max(hunk.source_start - 1, 0)
            for line in hunk:
                above = line.source_line_no or above
                number = line.source_line_no if line.is_removed else line.target_line_no
                if number is None:  # the "no newline at end of file" marker
                    continue
                text = line.value.rstrip("\n")
                sign = _sign(line.is_added, line.is_removed)
                lines.append(PatchLine(path=file.path, name=name, line=number, base_line=above, sign=sign, text=text))
    return lines


def _sign(added: bool, removed: bool) -> ChangeSign:
    return ChangeSign.ADDED if added else ChangeSign.REMOVED if removed else ChangeSign.CONTEXT


def log_lines(transcript: Transcript) -> list[str]:
    """The lines that "log:N" counts."""
    return transcript.test_log.rstrip("\n").split("\n") if transcript.test_log.strip() else []


def resolve(text: str, candidate: Citable, checks: Sequence[CheckResult] = ()) -> Citation | None:
    """What a citation points at in one candidate, or None if it points at nothing."""
    text = text.strip()
    if event := _EVENT.fullmatch(text):
        kind, number = CitationKind(event[1]), int(event[2])
        return Citation(kind=kind, text=text) if _happened(kind, number, candidate, checks) else None
    if place := _PLACE.fullmatch(text):
        reference = f"{place[1]}:{int(place[2])}"
        return Citation(kind=CitationKind.PATCH, text=reference) if reference in candidate.patch.references else None
    return None


def _happened(kind: CitationKind, number: int, candidate: Citable, checks: Sequence[CheckResult]) -> bool:
    if kind is CitationKind.RUN:
        return any(check.number == number and check.candidate == candidate.label for check in checks)
    transcript = candidate.transcript
    return number <= (len(transcript.turns) if kind is CitationKind.TURN else len(log_lines(transcript)))


def resolve_all(
    texts: Sequence[str], candidate: Citable, checks: Sequence[CheckResult] = ()
) -> tuple[tuple[Citation, ...], tuple[str, ...]]:
    """The citations that resolve, without repetition, and those that do not."""
    found: dict[Citation, None] = {}
    dropped: list[str] = []
    for text in texts:
        citation = resolve(text, candidate, checks)
        if citation is None:
            dropped.append(text)
        else:
            found[citation] = None
    return tuple(found), tuple(dropped)
