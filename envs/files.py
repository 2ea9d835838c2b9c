"""The `files` source: terminal tasks of one to three commands, judged by the files that are there at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from configs.schema import FilesSource
from envs.names import Draw
from envs.task import ExpertTrace, FinalState, Quality, Split, Task, TaskKind

SUBMIT = "submit"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One task of an operation: where it starts, where it must end, and ways to get there or to miss."""

    files: Mapping[str, str]
    final: Mapping[str, str | None]
    words: Mapping[str, str]
    """For the wording."""
    right: tuple[str, ...]
    """Commands that solve it, after a look."""
    wrong: Mapping[str, str]
    """Strategy -> one command that does not."""
    looks: tuple[str, ...]
    by_hand: str | None = None
    """A command that writes what the agent worked out itself from what it saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    name: str
    make: Callable[[Draw], _Job]
    wordings: Mapping[Split, tuple[str, ...]]


class FilesTasks:
    """Tasks in order of their index; every stretch of as many tasks as there are operations holds each once."""

    kind = TaskKind.GENERAL

    def __init__(self, name: str, config: FilesSource) -> None:
        self.name = name
        self._seed = config.seed
        self._job = lru_cache(maxsize=256)(self._make)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` >= 0 of a split."""
        return self._job(split, index)[0]

    def experts(self, task: Task) -> Iterator[ExpertTrace]:
        """Every scripted solution of a task of this source."""
        _, split, _, index = task.task_id.rsplit("/", 3)
        task, job = self._job(Split(split), int(index))
        shown = [f"cat {path}" for path in job.final if path in job.words.values() and job.final[path] is not None]
        for look in job.looks:
            yield _trace(task, (look, *job.right), "direct", Quality.T1, (5, 5, 5, 5, 5))
            if shown:
                yield _trace(task, (look, *job.right, shown[0]), "checked", Quality.T1, (5, 5, 5, 5, 5))
        if job.by_hand is not None:
            yield _trace(task, (job.looks[-1], job.by_hand), "by_hand", Quality.T2, (3, 4, 5, 5, 4))
        for strategy, command in job.wrong.items():
            yield _trace(task, (job.looks[-1], command), strategy, Quality.WRONG, None)
        yield _trace(task, job.looks, "no_edit", Quality.WRONG, None)

    def _make(self, split: Split, index: int) -> tuple[Task, _Job]:
        if index < 0:
            raise ValueError(f"task index {index} is negative")
        block, place = divmod(index, len(_OPERATIONS))
        order = list(_OPERATIONS)
        random.Random(f"files/order/{self._seed}/{split}/{block}").shuffle(order)
        operation = order[place]
        draw = Draw(random.Random(f"files/{self._seed}/{split}/{index}"), split)
        job = operation.make(draw)
        wording = draw.rng.randrange(len(operation.wordings[split]))
        task = Task(
            task_id=f"{self.name}/{split}/{self._seed}/{index}",
            source=self.name,
            kind=self.kind,
            split=split,
            statement=operation.wordings[split][wording].format(**job.words),
            files=job.files,
            verifier=FinalState(files=job.final),
            meta={"operation": operation.name, "template": f"{split}/{operation.name}/{wording}"},
        )
        return task, job


def _trace(
    task: Task,
    commands: tuple[str, ...],
    strategy: str,
    quality: Quality,
    scores: tuple[int, int, int, int, int] | None,
) -> ExpertTrace:
    return ExpertTrace(task=task, actions=(*commands, SUBMIT), quality=quality, strategy=strategy, scores=scores)


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _txt(draw: Draw) -> str:
    return draw.file() + ".txt"


def _rename(draw: Draw) -> _Job:
    old, new, other = _txt(draw), _txt(draw), _txt(draw)
    text, rest = _text(draw.words(1, 3)), _text(draw.words(1, 2))
    return _Job(
        files={old: text, other: rest},
        final={new: text, old: None, other: rest},
        words={"old": old, "new": new},
        right=(f"mv {old} {new}",),
        wrong={"copy": f"cp {old} {new}", "other_file": f"mv {other} {new}"},
        looks=("ls -1", f"cat {old}"),
    )


def _move(draw: Draw) -> _Job:
    name, folder, kept = _txt(draw), draw.file(), _txt(draw)
    text, rest = _text(draw.words(1, 3)), _text(draw.words(1, 2))
    return _Job(
        files={name: text, f"{folder}/{kept}": rest},
        final={f"{folder}/{name}": text, name: None, f"{folder}/{kept}": rest},
        words={"name": name, "folder": folder},
        right=(f"mv {name} {folder}/{name}",),
        wrong={"copy": f"cp {name} {folder}/{name}", "over_other": f"mv {name} {folder}/{kept}"},
        looks=("ls -1", f"ls -1 {folder}"),
    )


def _new_folder(draw: Draw) -> _Job:
    name, outer, inner = _txt(draw), draw.file(), draw.file()
    text = _text(draw.words(1, 3))
    return _Job(
        files={name: text},
        final={f"{outer}/{inner}/{name}": text, name: None},
        words={"name": name, "folder": f"{outer}/{inner}"},
        right=(f"mkdir -p {outer}/{inner}", f"mv {name} {outer}/{inner}/{name}"),
        wrong={"no_folder": f"mv {name} {outer}/{inner}/{name}", "only_folder": f"mkdir -p {outer}/{inner}"},
        looks=("ls -1",),
    )


def _copy(draw: Draw) -> _Job:
    old, new = _txt(draw), _txt(draw)
    text = _text(draw.words(1, 3))
    return _Job(
        files={old: text},
        final={new: text, old: text},
        words={"old": old, "new": new},
        right=(f"cp {old} {new}",),
        wrong={"move": f"mv {old} {new}", "name_only": f"echo '{old}' > {new}"},
        looks=("ls -1", f"cat {old}"),
    )


def _delete(draw: Draw) -> _Job:
    name, other = _txt(draw), _txt(draw)
    rest = _text(draw.words(1, 2))
    return _Job(
        files={name: _text(draw.words(1, 2)), other: rest},
        final={name: None, other: rest},
        words={"name": name},
        right=(f"rm {name}",),
        wrong={"other_file": f"rm {other}", "renamed_other": f"mv {other} {name}"},
        looks=("ls -1", f"cat {name}"),
    )


def _join(draw: Draw) -> _Job:
    first, second, out = _txt(draw), _txt(draw), _txt(draw)
    one, two = _text(draw.words(1, 2)), _text(draw.words(1, 2))
    return _Job(
        files={first: one, second: two},
        final={out: one + two, first: one, second: two},
        words={"first": first, "second": second, "out": out},
        right=(f"cat {first} {second} > {out}",),
        wrong={"wrong_order": f"cat {second} {first} > {out}", "one_only": f"cat {first} > {out}"},
        looks=("ls -1", f"cat {first} {second}"),
    )


def _replace(draw: Draw) -> _Job:
    name, old, new = _txt(draw), draw.word(), draw.word()
    words = [*draw.words(1, 2), old, old]
    draw.rng.shuffle(words)
    final = _text([new if word == old else word for word in words])
    return _Job(
        files={name: _text(words)},
        final={name: final},
        words={"name": name, "old": old, "new": new},
        right=(f"sed -i 's/{old}/{new}/' {name}",),
        wrong={"swapped": f"sed -i 's/{new}/{old}/' {name}", "first_line": f"sed -i '1s/{words[0]}/{new}/' {name}"},
        looks=(f"cat {name}",),
    )


def _add_line(draw: Draw) -> _Job:
    name, word = _txt(draw), draw.word()
    text = _text(draw.words(1, 3))
    return _Job(
        files={name: text},
        final={name: text + word + "\n"},
        words={"name": name, "word": word},
        right=(f"echo '{word}' >> {name}",),
        wrong={"overwrite": f"echo '{word}' > {name}", "on_top": f"sed -i '1i\\{word}' {name}"},
        looks=(f"cat {name}",),
    )


def _computed(
    draw: Draw, lines: list[str], result: str, command: str, slip: str, extra: Mapping[str, str] | None = None
) -> _Job:
    """A task that writes something about one file into another; `command` and `slip` hold {name}."""
    name, out = _txt(draw), _txt(draw)
    by_hand = result.count("\n") == 1
    return _Job(
        files={name: _text(lines)},
        final={out: result, name: _text(lines)},
        words={"name": name, "out": out, **(extra or {})},
        right=(f"{command.replace('@', name)} > {out}",),
        wrong={"other_fact": f"{slip.replace('@', name)} > {out}", "all_of_it": f"cat {name} > {out}"},
        looks=("ls -1", f"cat {name}"),
        by_hand=f"echo '{result.strip()}' > {out}" if by_hand else None,
    )


def _line_count(draw: Draw) -> _Job:
    lines = draw.words(2, 6)
    return _computed(draw, lines, f"{len(lines)}\n", "wc -l < @", "wc -w @")


def _largest(draw: Draw) -> _Job:
    numbers = _distinct(draw)
    return _computed(
        draw, [str(n) for n in numbers], f"{max(numbers)}\n", "sort -n @ | tail -n 1", "sort -n @ | head -n 1"
    )


def _smallest(draw: Draw) -> _Job:
    numbers = _distinct(draw)
    return _computed(
        draw, [str(n) for n in numbers], f"{min(numbers)}\n", "sort -n @ | head -n 1", "sort -n @ | tail -n 1"
    )


def _sum(draw: Draw) -> _Job:
    numbers = _distinct(draw)
    rows = [f"{draw.word()} {number}" for number in numbers]
    add, count = "awk '{s += $2} END {print s}' @", "wc -l < @"
    return _computed(draw, rows, f"{sum(numbers)}\n", add, count)


def _matching(draw: Draw) -> _Job:
    word = draw.word()
    lines = [f"{word} {draw.word()}" for _ in range(draw.number(1, 2))] + [
        f"{w} {draw.word()}" for w in draw.words(1, 2)
    ]
    draw.rng.shuffle(lines)
    found = _text([line for line in lines if word in line])
    return _computed(draw, lines, found, f"grep {word} @", f"grep -v {word} @", {"word": word})


def _unique(draw: Draw) -> _Job:
    words = draw.words(2, 3)
    lines = [*words, words[0]]
    draw.rng.shuffle(lines)
    return _computed(draw, lines, _text(sorted(words)), "sort -u @", "sort @")


def _first_lines(draw: Draw) -> _Job:
    lines, count = draw.words(4, 6), draw.number(2, 3)
    return _computed(
        draw, lines, _text(lines[:count]), f"head -n {count} @", f"tail -n {count} @", {"count": str(count)}
    )


def _distinct(draw: Draw) -> list[int]:
    return draw.rng.sample(range(5, 60), draw.number(2, 4))


def _operation(
    name: str, make: Callable[[Draw], _Job], *, train: tuple[str, ...], heldout: tuple[str, ...]
) -> _Operation:
    return _Operation(name=name, make=make, wordings={Split.TRAIN: train, Split.HELDOUT: heldout})


_OPERATIONS = (
    _operation(
        "rename",
        _rename,
        train=("Rename {old} to {new}.", "Please rename the file {old}; call it {new}."),
        heldout=("The file {old} should be named {new}.",),
    ),
    _operation(
        "move",
        _move,
        train=("Move {name} into the folder {folder}.", "Put {name} into {folder}."),
        heldout=("{name} belongs in the folder {folder}, move it there.",),
    ),
    _operation(
        "new_folder",
        _new_folder,
        train=("Make the folder {folder} and move {name} into it.", "Move {name} into a new folder {folder}."),
        heldout=("Create {folder}, a new folder, and put {name} there.",),
    ),
    _operation(
        "copy",
        _copy,
        train=("Copy {old} to {new}.", "Make a copy of {old} called {new}."),
        heldout=("{new} should be a copy of {old}.",),
    ),
    _operation(
        "delete",
        _delete,
        train=("Delete {name}.", "Remove the file {name}."),
        heldout=("Get rid of {name}, delete it.",),
    ),
    _operation(
        "join",
        _join,
        train=("Join {first} and {second} into {out}.", "Write {first} and then {second} to {out}."),
        heldout=("{out} should hold {first} followed by {second}.",),
    ),
    _operation(
        "replace",
        _replace,
        train=("Replace {old} by {new} in {name}.", "In {name}, change every {old} to {new}."),
        heldout=("Every {old} in {name} should be {new}.",),
    ),
    _operation(
        "add_line",
        _add_line,
        train=("Add the line {word} at the end of {name}.", "Append {word} to {name}."),
        heldout=("{name} needs one more line at the end: {word}",),
    ),
    _operation(
        "line_count",
        _line_count,
        train=(
            "Write the number of lines of {name} to {out}.",
            "Count the lines of {name} and write the count to {out}.",
        ),
        heldout=("How many lines has {name}? Put the number in {out}.",),
    ),
    _operation(
        "largest",
        _largest,
        train=(
            "Write the largest number in {name} to {out}.",
            "Find the largest number in {name} and write it to {out}.",
        ),
        heldout=("Which number in {name} is largest? Put it in {out}.",),
    ),
    _operation(
        "smallest",
        _smallest,
        train=(
            "Write the smallest number in {name} to {out}.",
            "Find the smallest number in {name} and write it to {out}.",
        ),
        heldout=("Which number in {name} is smallest? Put it in {out}.",),
    ),
    _operation(
        "sum",
        _sum,
        train=(
            "Write the sum of the second column of {name} to {out}.",
            "Add up column 2 of {name} and write the sum to {out}.",
        ),
        heldout=("What is the sum of column 2 in {name}? Put it in {out}.",),
    ),
    _operation(
        "matching",
        _matching,
        train=(
            "Write the lines of {name} with {word} to {out}.",
            "Find the lines with {word} in {name} and write them to {out}.",
        ),
        heldout=("Which lines of {name} have {word}? Put them in {out}.",),
    ),
    _operation(
        "unique",
        _unique,
        train=(
            "Write the lines of {name} to {out}, sorted and each once.",
            "Sort {name} into {out} without repeated lines.",
        ),
        heldout=("{out} should hold the lines of {name} sorted, without repeats.",),
    ),
    _operation(
        "first_lines",
        _first_lines,
        train=(
            "Write the first lines of {name} to {out}; count: {count}.",
            "Take the first {count} of the lines of {name} and write them to {out}.",
        ),
        heldout=("Put the top of {name} in {out}, number of lines: {count}.",),
    ),
)
