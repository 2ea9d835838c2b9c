"""What a grader can look at: one group as a small read-only file system in memory (M2.1).

    task.md  repo/<path>  C1/summary  C1/patch  C1/turns/<n>  C1/test_log  C1/tree/<path>  reference.patch

Nothing here touches a disk: paths are names in dictionaries. Lines come out raw; who shows them makes them harmless.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from envs.patch import unified_diff
from grader.candidates import Candidate, CandidateGroup
from grader.evidence import index_patch, log_lines
from grader.pages import Page, Row, file_lines, file_rows, patch_rows, plain_rows, summary_rows, turn_rows
from grader.patched import PatchError, Tree, apply_patch

MAX_FOUND = 50
"""Lines that one search returns."""
_MAX_DIFF_COST = 50_000_000
"""Bound of difflib's work on one file; two hostile files can otherwise keep it busy for hours."""


class WorkspaceError(ValueError):
    """What was asked for is not there; the message says so to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One group's material; pure but for remembering the trees it computed."""

    group: CandidateGroup
    reference: str | None
    """The task's reference patch, if the grader may see it (M2.3)."""
    _trees: dict[str, Tree | str] = field(default_factory=dict, repr=False, compare=False)
    """Label -> patched tree, or why there is none."""

    @classmethod
    def build(cls, group: CandidateGroup, reference_patch: bool) -> Workspace:
        """The workspace of a group; `reference_patch` says whether the task's own solution is in it."""
        return cls(group=group, reference=group.task.reference_patch if reference_patch else None)

    def candidate(self, label: str) -> Candidate:
        """The candidate of a label. Raises WorkspaceError."""
        for candidate in self.group.candidates:
            if candidate.label == label:
                return candidate
        raise WorkspaceError(f"there is no candidate {label}; they are {', '.join(self.labels)}")

    @property
    def labels(self) -> tuple[str, ...]:
        """C1..Cn."""
        return tuple(c.label for c in self.group.candidates)

    def tree(self, label: str) -> Tree:
        """The repository with a candidate's patch; "repo" is the base itself. Raises WorkspaceError."""
        if label == "repo":
            return self.group.task.files
        candidate = self.candidate(label)
        if label not in self._trees:
            try:
                self._trees[label] = apply_patch(self.group.task.files, candidate.transcript.patch)
            except PatchError as error:
                self._trees[label] = f"{label}'s tree cannot be shown: {error}; read {label}/patch"
        tree = self._trees[label]
        if isinstance(tree, str):
            raise WorkspaceError(tree)
        return tree

    def list(self, path: str = "") -> Page:
        """The paths right below a folder, folders with a "/" at their end. Raises WorkspaceError."""
        path = _normal(path)
        names = self._entries(path)
        if names is None:
            raise WorkspaceError(f"{path} is no folder; list {path.rpartition('/')[0] or 'the top'}")
        return Page(path=path or "/", rows=tuple(Row(mark=f"{path}/" if path else "", text=name) for name in names))

    def read(self, path: str, start: int | None = None, end: int | None = None, *, brief: bool = False) -> Page:
        """A file, or lines `start`..`end` of it (1-based, inclusive). Raises WorkspaceError.

        Args:
            brief: leave out blank lines of files, and unchanged lines of patches.
        """
        path = _normal(path)
        rows = self._rows(path, brief)
        if start is not None or end is not None:
            first, last = 1 if start is None else start, len(rows) if end is None else end
            if first < 1 or last < first or first > max(len(rows), 1):
                raise WorkspaceError(f"{path} has lines 1 to {len(rows)}; there are no lines {first} to {last}")
            rows = rows[first - 1 : last]
        if brief and _is_source(path):
            rows = [row for row in rows if row.text.strip()]
        return Page(path=path, rows=tuple(rows))

    def turn(self, label: str, number: int) -> Page:
        """One raw turn: action, exit code, observation. Raises WorkspaceError."""
        turns = self.candidate(label).transcript.turns
        if not 1 <= number <= len(turns):
            raise WorkspaceError(f"{label} has turns 1 to {len(turns)}")
        return Page(path=f"{label}/turns/{number}", rows=tuple(turn_rows(turns[number - 1])))

    def search(self, pattern: str, path: str = "") -> Page:
        """Lines that hold a text literally, at most MAX_FOUND, below a path. Raises WorkspaceError."""
        if not pattern.strip() or "\n" in pattern:
            raise WorkspaceError("the pattern must be text on one line")
        path = _normal(path)
        found: list[Row] = []
        count = 0
        for name in self._below(path):
            try:
                hits = self._found(name, pattern)
            except WorkspaceError:
                if name == path:
                    raise
                continue  # a file that is not text
            found += [Row(mark=f"{name}:{n} ", text=line) for n, line in hits[: max(MAX_FOUND - count, 0)]]
            count += len(hits)
        if count > MAX_FOUND:
            found.append(Row(mark="", text=f"[{count - MAX_FOUND} more lines]"))
        return Page(path=f"search:{path or '/'}", rows=tuple(found) or (Row(mark="", text="[nothing found]"),))

    def diff(self, a: str, b: str) -> Page:
        """Unified diff between two candidates' trees; "repo" stands for the base. Raises WorkspaceError."""
        before, after = self.tree(a), self.tree(b)
        rows: list[Row] = []
        for path in sorted({*before, *after}):
            old, new = before.get(path), after.get(path)
            if (path in before and old is None) or (path in after and new is None):
                rows.append(Row(mark="| ", text=f"{path} is not text: not compared"))
            elif old == new:
                continue
            elif _diff_cost(old or "", new or "") > _MAX_DIFF_COST:
                rows.append(Row(mark="| ", text=f"{path} differs too much to be compared; read the patches"))
            else:
                text = unified_diff({} if old is None else {path: old}, {} if new is None else {path: new})
                rows += [Row(mark="| ", text=line) for line in text.rstrip("\n").split("\n")]
        return Page(path=f"diff:{a}..{b}", rows=tuple(rows) or (Row(mark="", text="[no difference]"),))

    def _found(self, path: str, pattern: str) -> Sequence[tuple[int, str]]:
        """(number, line) of the lines of one file that hold a text. Raises WorkspaceError."""
        head, _, rest = path.partition("/")
        tree = head if head == "repo" else f"{head}/tree" if rest.startswith("tree/") else ""
        content = self.tree(head).get(path.removeprefix(f"{tree}/")) if tree else None
        if content is None:
            lines = [row.text for row in self._rows(path, brief=False)]
        else:  # of a big repository hardly any file is worth being cut into lines
            lines = file_lines(content) if pattern in content else []
        return [(number, line) for number, line in enumerate(lines, start=1) if pattern in line]

    def _entries(self, path: str) -> Sequence[str] | None:
        head, _, rest = path.partition("/")
        if not path:
            reference = [] if self.reference is None else ["reference.patch"]
            return ["task.md", "repo/", *(f"{label}/" for label in self.labels), *reference]
        if head == "repo":
            return _children(self.group.task.files, rest)
        if head not in self.labels:
            return None
        if not rest:
            return ["summary", "patch", "turns/", "test_log", "tree/"]
        part, _, below = rest.partition("/")
        if part == "tree":
            return _children(self.tree(head), below)
        if rest == "turns":
            return [str(n) for n in range(1, len(self.candidate(head).transcript.turns) + 1)]
        return None

    def _below(self, path: str) -> Iterator[str]:
        """Every file at or below a path; trees only where asked for. Raises WorkspaceError."""
        entries = self._entries(path)
        if entries is None:
            yield path
            return
        for name in entries:
            if not name.endswith("/"):
                yield f"{path}/{name}".strip("/")
            elif not (name == "tree/" and path in self.labels):
                yield from self._below(f"{path}/{name}".strip("/"))

    def _rows(self, path: str, brief: bool) -> Sequence[Row]:
        head, _, rest = path.partition("/")
        if path == "task.md":
            return plain_rows(self.group.task.statement.strip())
        if path == "reference.patch" and self.reference is not None:
            return patch_rows(self.reference, index_patch(self.reference), brief=brief)
        if head == "repo" and rest:
            return _file_rows(self.group.task.files, rest, path)
        if head in self.labels and rest:
            return self._candidate_rows(self.candidate(head), rest, brief)
        if self._entries(path) is not None:
            raise WorkspaceError(f"{path or '/'} is a folder; list it")
        raise WorkspaceError(f"there is no {path}")

    def _candidate_rows(self, candidate: Candidate, rest: str, brief: bool) -> Sequence[Row]:
        transcript = candidate.transcript
        part, _, below = rest.partition("/")
        if rest == "summary":
            return summary_rows(candidate)
        if rest == "patch":
            return patch_rows(transcript.patch, candidate.patch, brief=brief)
        if rest == "test_log":
            lines = log_lines(transcript) or ["(empty)"]
            return [Row(mark=f"log:{n} ", text=line, reference=f"log:{n}") for n, line in enumerate(lines, start=1)]
        if part == "turns" and re.fullmatch(r"[1-9][0-9]{0,5}", below):
            return self.turn(candidate.label, int(below)).rows
        if part == "tree" and below:
            return _file_rows(self.tree(candidate.label), below, f"{candidate.label}/{rest}")
        if self._entries(f"{candidate.label}/{rest}") is not None:
            raise WorkspaceError(f"{candidate.label}/{rest} is a folder; list it")
        raise WorkspaceError(f"there is no {candidate.label}/{rest}")


def _normal(path: str) -> str:
    """A path without "./", "//" and a "/" at either end. Raises WorkspaceError for one that climbs."""
    parts = [part for part in path.strip().split("/") if part not in ("", ".")]
    if ".." in parts:
        raise WorkspaceError(f"there is no {path}; paths do not climb")
    return "/".join(parts)


def _is_source(path: str) -> bool:
    return path.startswith("repo/") or re.match(r"C[0-9]+/tree/", path) is not None


def _children(files: Tree, folder: str) -> Sequence[str] | None:
    """Names right below a folder; None if it is none."""
    prefix = f"{folder}/" if folder else ""
    names = {path[len(prefix) :].partition("/") for path in files if path.startswith(prefix)}
    found = sorted({f"{name}{slash}" for name, slash, _ in names})
    return found if found or not folder else None


def _file_rows(files: Tree, path: str, shown: str) -> list[Row]:
    if path not in files:
        if _children(files, path) is not None:
            raise WorkspaceError(f"{shown} is a folder; list it")
        raise WorkspaceError(f"there is no {shown}")
    content = files[path]
    if content is None:
        raise WorkspaceError(f"{shown} is not text")
    return file_rows(content)


def _diff_cost(old: str, new: str) -> int:
    """An upper bound of difflib's steps: pairs of equal lines, times the number of blocks that can be found."""
    a, b = Counter(old.split("\n")), Counter(new.split("\n"))
    pairs = sum(count * b[line] for line, count in a.items())
    return pairs * min(a.total(), b.total())
