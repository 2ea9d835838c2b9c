"""Rows of a data set on the Hugging Face Hub: hf://OWNER/NAME, with @REVISION and :SPLIT where they are needed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from configs.errors import ConfigError

SCHEME = "hf://"
_ADDRESS = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>\w+))?", re.ASCII)
_REMEDY = "where no way leads to huggingface.co, fetch its parquet files elsewhere and give one of them as the path"


def is_hub(place: str) -> bool:
    """Whether a place of tasks is a data set of the Hub."""
    return place.startswith(SCHEME)


def read_hub(place: str) -> Iterator[Mapping[str, Any]]:
    """The rows of one split, from the Hub or the cache of `datasets`.

    Raises ConfigError: not an address, no such data set or split, the package is missing, or the Hub cannot be reached.
    """
    match = _ADDRESS.fullmatch(place)
    if match is None:
        raise ConfigError(f"{place}: is no data set; give hf://OWNER/NAME, hf://OWNER/NAME:SPLIT or @REVISION between")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(
            f"{place}: needs the package datasets, which is not installed; pip install --no-deps -r "
            "requirements/tasks.txt, or give a file of JSON lines"
        ) from None
    try:
        splits = load_dataset(match["name"], revision=match["revision"])
    except Exception as error:  # its own errors, those of the Hub's client, of HTTP and of the cache
        raise ConfigError(f"{place}: cannot be had ({type(error).__name__}: {error}); {_REMEDY}") from error
    split = match["split"] or (next(iter(splits)) if len(splits) == 1 else "")
    if split not in splits:
        raise ConfigError(
            f"{place}: has the splits {', '.join(splits)}; name one as hf://{match['name']}:{min(splits)}"
        )
    yield from splits[split]
