"""The `arith` source: one-turn arithmetic in words, judged by the exact answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from configs.schema import ArithSource
from envs.task import ExactAnswer, ExpertTrace, Quality, Split, Task, TaskKind

_THINGS: Mapping[Split, tuple[str, ...]] = {
    Split.TRAIN: ("apples", "books", "pens", "coins", "shoes", "cards", "plates", "stamps", "balls", "keys"),
    Split.HELDOUT: ("lemons", "candles", "ropes", "tickets"),
}
_PEOPLE: Mapping[Split, tuple[str, ...]] = {
    Split.TRAIN: ("Ann", "Ben", "Eva", "Ida", "Leo", "Max", "Mia", "Tom"),
    Split.HELDOUT: ("Kai", "Noa", "Rui"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    name: str
    wordings: Mapping[Split, tuple[str, ...]]


_OPERATIONS = (
    _Operation(
        name="add",
        wordings={
            Split.TRAIN: (
                "{who} has {a} {thing} and gets {b} more. How many {thing} now?",
                "There are {a} {thing} on the table and {b} on the floor. How many in all?",
                "What is {a} + {b}?",
            ),
            Split.HELDOUT: ("{who} buys {a} {thing}, then {b} more. How many in all?", "Add {a} and {b}."),
        },
    ),
    _Operation(
        name="subtract",
        wordings={
            Split.TRAIN: (
                "{who} has {a} {thing} and gives {b} away. How many {thing} are left?",
                "Of {a} {thing}, {b} are lost. How many are left?",
                "What is {a} - {b}?",
            ),
            Split.HELDOUT: ("{who} had {a} {thing} and lost {b}. How many are left?", "Take {b} away from {a}."),
        },
    ),
    _Operation(
        name="multiply",
        wordings={
            Split.TRAIN: (
                "There are {a} boxes with {b} {thing} each. How many {thing} in all?",
                "{who} packs {b} {thing} in each of {a} bags. How many {thing} in all?",
                "What is {a} * {b}?",
            ),
            Split.HELDOUT: ("{a} shelves hold {b} {thing} each. How many in all?", "Multiply {a} by {b}."),
        },
    ),
    _Operation(
        name="larger",
        wordings={
            Split.TRAIN: (
                "{who} has {a} {thing}, and a friend has {b}. How many has the one with more?",
                "Which is larger, {a} or {b}?",
            ),
            Split.HELDOUT: ("Of {a} and {b} {thing}, which is more?", "Name the larger of {a} and {b}."),
        },
    ),
)


class ArithTasks:
    """Tasks in order of their index."""

    kind = TaskKind.SINGLE_TURN

    def __init__(self, name: str, config: ArithSource) -> None:
        self.name = name
        self._seed = config.seed

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` >= 0 of a split."""
        if index < 0:
            raise ValueError(f"task index {index} is negative")
        rng = random.Random(f"arith/{self._seed}/{split}/{index}")
        operation = rng.choice(_OPERATIONS)
        a, b = _numbers(operation.name, rng)
        wording = rng.randrange(len(operation.wordings[split]))
        statement = operation.wordings[split][wording].format(
            a=a, b=b, thing=rng.choice(_THINGS[split]), who=rng.choice(_PEOPLE[split])
        )
        return Task(
            task_id=f"{self.name}/{split}/{self._seed}/{index}",
            source=self.name,
            kind=self.kind,
            split=split,
            statement=statement,
            files={},
            verifier=ExactAnswer(answer=str(_results(a, b)[operation.name])),
            meta={
                "operation": operation.name,
                "template": f"{split}/{operation.name}/{wording}",
                "a": str(a),
                "b": str(b),
            },
        )

    def experts(self, task: Task) -> Iterator[ExpertTrace]:
        """The answer, and wrong answers that are near."""
        a, b, operation = int(task.meta["a"]), int(task.meta["b"]), task.meta["operation"]
        results = _results(a, b)
        right = results.pop(operation)
        yield ExpertTrace(
            task=task, actions=(str(right),), quality=Quality.T1, strategy="answer", scores=(5, 5, 5, 5, 5)
        )
        slips = {"one_off": right + 1, "one_less": max(right - 1, 0), **results}
        for strategy, value in slips.items():
            if value != right:
                yield ExpertTrace(
                    task=task, actions=(str(value),), quality=Quality.WRONG, strategy=strategy, scores=None
                )


def _numbers(operation: str, rng: random.Random) -> tuple[int, int]:
    if operation == "multiply":
        return rng.randint(2, 6), rng.randint(2, 5)
    a, b = rng.randint(1, 12), rng.randint(1, 9)
    return (max(a, b), min(a, b)) if operation == "subtract" else (a, b)


def _results(a: int, b: int) -> dict[str, int]:
    return {"add": a + b, "subtract": a - b, "multiply": a * b, "larger": max(a, b)}
