"""Identifiers and literals of generated code.

Names are made of consonant-vowel syllables, so that the pool is too large to memorise and a policy has to copy. The
splits draw from complementary parts of one pool: same letters, same lengths, no name in common.
"""

from __future__ import annotations

import builtins
import json
import keyword
import random
import sys
from collections.abc import Sequence
from typing import TypeVar

from envs.task import Split

T = TypeVar("T")

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_FINALS = "klmnrst"
_HELDOUT_EVERY = 4
"""One name in this many belongs to the held-out split."""
_RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"git", "sed", "self", "test", "unittest"}
_CODE_WORDS = (
    "return range default reverse sorted enumerate split strip lower upper title count join replace format partition"
)
_OPERATORS = ("or", "is", "len", "max", "min")
"""A name that is part of a code word, or holds an operator, could be found in the wrong place by a substitution."""


def owner(name: str) -> Split:
    """The only split that may use a name as an identifier or as a word in data."""
    return Split.HELDOUT if sum(name.encode()) % _HELDOUT_EVERY == 0 else Split.TRAIN


def _usable(name: str) -> bool:
    if len(name) > 3 and name in sys.stdlib_module_names:  # no package: Python would import its own
        return False
    return name not in _RESERVED and name not in _CODE_WORDS and not any(part in name for part in _OPERATORS)


class Draw:
    """Random choices for one task: names of its split without repetition, numbers, and the constants already chosen."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split
        self.consts: dict[str, str] = {}
        """What `$c`, `$d`, `$k`, `$j` of a shape stand for in this task."""
        self._used: set[str] = set()

    def _name(self, pattern: str) -> str:
        pools = {"C": _CONSONANTS, "V": _VOWELS, "F": _FINALS}
        while True:
            name = "".join(self.rng.choice(pools[letter]) for letter in pattern)
            if owner(name) is self.split and name not in self._used and _usable(name):
                self._used.add(name)
                return name

    def short(self) -> str:
        """A three-letter name for parameters and locals."""
        return self._name("CVF")

    def long(self) -> str:
        """A four- or five-letter name for functions, modules, packages and keys."""
        return self._name(self.rng.choice(("CVCV", "CVCVF")))

    def file(self) -> str:
        """A four-letter name: none is the beginning of another, so that every locale lists them in one order."""
        return self._name("CVCV")

    def word(self) -> str:
        """A short word as data."""
        return self._name("CVF")

    def words(self, low: int, high: int) -> list[str]:
        """Between `low` and `high` words."""
        return [self.word() for _ in range(self.rng.randint(low, high))]

    def number(self, low: int, high: int) -> int:
        """A number between `low` and `high`, both included."""
        return self.rng.randint(low, high)

    def numbers(self, low: int, high: int, top: int = 9) -> list[int]:
        """Between `low` and `high` numbers from 1 to `top`."""
        return [self.rng.randint(1, top) for _ in range(self.rng.randint(low, high))]

    def near(self, const: str, spread: int = 2) -> int:
        """A number at most `spread` away from a numeric constant of the shape."""
        return int(self.consts[const]) + self.rng.randint(-spread, spread)

    def maybe(self, share: float) -> bool:
        """True with probability `share`."""
        return self.rng.random() < share

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self.rng.choice(options)


def literal(value: object) -> str:
    """Python source of a value, strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(literal(item) for item in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)
