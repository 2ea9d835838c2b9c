"""JSON as a model may write it: alone or in one fenced block, bounded, and without a key said twice."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_CHARS = 65_536


class NotJsonError(ValueError):
    """A text that is not one JSON value. The message is ASCII, safe to log and to show to a model."""


class RepeatedKeyError(ValueError):
    """An object that names a key twice: which of the two values is meant, nobody can say."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {shorten(key)} is repeated")
        self.key = key


_FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.DOTALL)


def load_json(text: str) -> Any:
    """The JSON value in a model's answer.

    NaN and Infinity come back as floats, so that whoever reads the number can say what is wrong with it.

    Raises:
        NotJsonError: it is none, it is followed by anything, it is longer than MAX_CHARS, or nested too deeply.
        RepeatedKeyError: an object says a key twice.
    """
    if len(text) > MAX_CHARS:
        raise NotJsonError(f"{len(text)} characters; at most {MAX_CHARS} are read")
    fenced = _FENCED.fullmatch(text)
    try:
        return json.loads(fenced[1] if fenced else text, object_pairs_hook=_unique)
    except RepeatedKeyError:
        raise
    except RecursionError:
        raise NotJsonError("nested too deeply") from None
    except ValueError as error:
        raise NotJsonError(shorten(str(error))) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RepeatedKeyError(key)
        result[key] = value
    return result


def shorten(text: str, limit: int = 200) -> str:
    """A fragment of what a model wrote, safe to log: ASCII, bounded."""
    return ascii(text[:limit])[1:-1]
