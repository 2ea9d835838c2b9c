"""How a group's material reads: a turn, the summary of all turns, a patch, line by line. Pure.

Rows are raw; their marks are ours, so that no line that is shown starts with what somebody else wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from grader.budget import clip_lines
from grader.candidates import Candidate
from grader.evidence import ChangeSign, PatchIndex, PatchLine, is_plain
from grader.patched import sections
from grader.quoting import LINE_CHARS, one_line, word
from rollout.trajectory import Turn

MAX_ENUM = 64
"""References of one candidate that a compact schema lists."""
_UNREAD_LINES = 6
"""Lines shown of a part of a patch that is not indexed (binary files, modes, what does not parse)."""
_COMMAND_CHARS = 160
_RESULT_CHARS = 80
_PATH_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a page."""

    mark: str
    """What stands before it: a number, a citation, a sign."""
    text: str
    reference: str = ""
    """The citation that names it, where there is one."""

    def __str__(self) -> str:
        return f"{self.mark}{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What one look shows."""

    path: str
    """Where it is, as it was asked for in normal form; may hold anything that a policy named a file."""
    rows: tuple[Row, ...]


def plain_rows(text: str) -> list[Row]:
    """Text without marks: only for what no policy wrote."""
    return [Row(mark="", text=line) for line in text.split("\n")]


def file_lines(content: str) -> list[str]:
    """The lines of a file."""
    return content.removesuffix("\n").split("\n") if content else []


def file_rows(content: str) -> list[Row]:
    """A file, numbered."""
    return [Row(mark=f"{n} ", text=line) for n, line in enumerate(file_lines(content), start=1)]


def turn_rows(turn: Turn) -> Iterator[Row]:
    """One raw turn: action, exit code, observation."""
    for line in turn.action.strip("\n").split("\n"):
        yield Row(mark="$ ", text=line)
    yield Row(mark="exit ", text="none" if turn.exit_code is None else str(turn.exit_code))
    for line in turn.observation.rstrip("\n").split("\n") if turn.observation.strip() else ():
        yield Row(mark="| ", text=line)


def summary_rows(candidate: Candidate) -> list[Row]:
    """One line a turn: first line of the command, exit code, last line of what came back."""
    rows = []
    for number, turn in enumerate(candidate.transcript.turns, start=1):
        first, *more = turn.action.strip().split("\n")
        text = first if len(first) <= _COMMAND_CHARS else f"{first[: _COMMAND_CHARS - 3]}..."
        text += f" [+{len(more)} lines]" if more else ""
        text += "" if turn.exit_code in (0, None) else f" [exit {turn.exit_code}]"
        last = turn.observation.strip().rpartition("\n")[2]
        text += f" -> {last[:_RESULT_CHARS]}" if last else ""
        rows.append(Row(mark=f"turn:{number} ", text=text, reference=f"turn:{number}"))
    return rows or [Row(mark="", text="(no turn)")]


def patch_rows(patch: str, index: PatchIndex, *, brief: bool) -> tuple[Row, ...]:
    """A patch with the line numbers that citations use; `brief` shows the changed lines only.

    What is not indexed is shown as it is, in part, so that nothing hides in it.
    """
    rows: list[Row] = []
    for path, section, lines in _files(patch, index):
        if lines:
            rows += _brief_rows(lines) if brief else _numbered_rows(path, lines)
        else:
            raw = section.rstrip("\n").split("\n")
            rows += [Row(mark="? ", text=line) for line in raw[:_UNREAD_LINES]]
            if len(raw) > _UNREAD_LINES:
                rows.append(Row(mark="? ", text=f"[{len(raw) - _UNREAD_LINES} lines cut]"))
    return tuple(rows) or (Row(mark="", text="(no change)"),)


def touched_files(candidate: Candidate, limit: int) -> str:
    """The changed files in the patch's order: "a/b.py +1 -2, x.bin ?, 3 more"; "?" says not indexed."""
    entries: list[str] = []
    more = 0
    for path, _, lines in _files(candidate.transcript.patch, candidate.patch):
        if len(entries) == limit:
            more += 1
            continue
        count = Counter(line.sign for line in lines)
        counts = f"+{count[ChangeSign.ADDED]} -{count[ChangeSign.REMOVED]}" if lines else "?"
        name = lines[0].name if lines else path if is_plain(path) else "odd-name"
        entries.append(f"{word(name, _PATH_CHARS)} {counts}")
    return ", ".join([*entries, *([f"{more} more"] if more else [])]) or "no change"


def _files(patch: str, index: PatchIndex) -> Iterator[tuple[str, str, list[PatchLine]]]:
    """(path, raw section, indexed lines) of each file of a patch; one without lines is not indexed."""
    known: dict[str, list[PatchLine]] = {}
    for line in index.lines:
        known.setdefault(line.path, []).append(line)
    for section in sections(patch):
        path = _path_of(section)
        yield path, section, known.pop(path, [])
    for path, lines in known.items():  # of sections that name several files
        yield path, "", lines


def _path_of(section: str) -> str:
    """The path of a section as the index has it: that of its header lines, without prefix, quotes left on."""
    head = section.partition("\n@@ ")[0].split("\n")
    names = {line[:4]: line[4:].partition("\t")[0] for line in head if line[:4] in ("--- ", "+++ ")}
    name = next((names[key] for key in ("--- ", "+++ ") if names.get(key, "/dev/null") != "/dev/null"), None)
    if name is None:
        name = head[0].rpartition(" ")[2]
    quote = '"' if len(name) > 1 and name[0] == name[-1] == '"' else ""
    bare = name[1:-1] if quote else name
    return f"{quote}{bare[2:] if bare[:2] in ('a/', 'b/') else bare}{quote}"


def _brief_rows(lines: Iterable[PatchLine]) -> Iterator[Row]:
    """Changed lines with their citation; a line that replaces the one just shown goes without, it is the same."""
    previous = ""
    for line in lines:
        if line.sign is ChangeSign.CONTEXT:
            continue
        where = "" if line.reference == previous else f"{line.reference} "
        yield Row(mark=f"{where}{line.sign.value} ", text=line.text, reference=line.reference)
        previous = line.reference


def _numbered_rows(path: str, lines: Iterable[PatchLine]) -> Iterator[Row]:
    known = [*lines]
    odd = known[0].name if known and known[0].name != path else ""
    yield Row(mark=f"file {odd}, named " if odd else "file ", text=path)
    previous = 0
    for line in known:
        if previous and abs(line.line - previous) > 1 and line.sign is ChangeSign.CONTEXT:
            yield Row(mark="", text="...")
        previous = line.line
        yield Row(mark=f"{line.line:>5} {line.sign.value} ", text=line.text, reference=line.reference)


# --- showing ----------------------------------------------------------------------------------------------------------


def render(row: Row | str, limit: int = LINE_CHARS) -> str:
    """One harmless line."""
    return one_line(str(row), limit).rstrip()


def show_rows(rows: Sequence[Row], limit: int, line_chars: int = LINE_CHARS) -> tuple[list[str], tuple[str, ...]]:
    """Harmless lines of at most `limit` characters, head and tail kept, and the citations among them."""
    lines = clip_lines(rows, limit, lambda row: render(row, line_chars))
    near = rows if len(rows) <= 2 * len(lines) else (*rows[: len(lines)], *rows[-len(lines) :])
    shown = set(lines)
    references = dict.fromkeys(row.reference for row in near if row.reference and render(row, line_chars) in shown)
    return lines, tuple(references)


def citable(candidate: Candidate, shown: Sequence[str]) -> tuple[str, ...]:
    """What a compact schema lets be cited of a candidate: the lines shown, at most MAX_ENUM.

    Who leaves nothing to cite in a patch can still be held to the turns.
    """
    turns = [f"turn:{n}" for n in range(1, len(candidate.transcript.turns) + 1)]
    return tuple(shown or turns)[:MAX_ENUM]
