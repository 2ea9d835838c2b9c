"""Keys out of everything that a run writes or says: one function, which every sink applies.

Hidden are the values of environment variables whose names look secret, those of the variables that a configuration
names (`api_key_env`, `token_env`), and whatever has the shape of a key (configs/secrecy.py).
"""

from __future__ import annotations

import json
import logging
import netrc
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from configs.schema import DaytonaSandbox, EndpointGraderBackend, RemoteSandbox, RunConfig
from configs.secrecy import HIDDEN, hide_shapes, names_secret

_SHORTEST = 6
"""Shorter values would hide ordinary words with them."""
_PLACES = ("_PATH", "_FILE", "_DIR", "_FOLDER")
"""Such a variable says where a secret lies."""
_SHORT_NAMES = ("_PWD", "_PASS", "_PAT")
"""MYSQL_PWD, SMTP_PASS, AZURE_DEVOPS_EXT_PAT: names of secrets in an environment, of other things elsewhere."""


class _Known:
    """Values to hide in this process, the longest first, so that no part of one stays."""

    values: tuple[str, ...] | None = None
    names: frozenset[str] = frozenset()


def scrub(text: str) -> str:
    """The text with every secret replaced by ***."""
    if _Known.values is None:
        hide(())
    for value in _Known.values or ():
        if value in text:
            text = text.replace(value, HIDDEN)
    return hide_shapes(text)


def scrubbed(value: Any) -> Any:
    """The same of every text inside mappings and sequences; anything else as it is."""
    if isinstance(value, str):
        return scrub(value) if len(value) >= _SHORTEST else value
    if isinstance(value, Mapping):
        return {key: scrubbed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(item) for item in value]
    return value


def hide(names: Iterable[str]) -> None:
    """From now on hide the values of these environment variables too, whatever their names look like; the environment
    is read anew."""
    _Known.names |= frozenset(names)
    secret = [v for n, v in os.environ.items() if n in _Known.names or (_is_secret(n, v))]
    forms = {form for value in [*secret, *_netrc_keys()] for form in _forms(value)}
    _Known.values = tuple(sorted((f for f in forms if len(f) >= _SHORTEST), key=len, reverse=True))


def key_variables(config: RunConfig) -> list[str]:
    """Environment variables that a configuration takes keys from."""
    names = []
    if config.grader is not None and isinstance(config.grader.backend, EndpointGraderBackend):
        names.append(config.grader.backend.api_key_env)
    for sandbox in (config.rollout.sandbox, config.grader.sandbox if config.grader is not None else None):
        if isinstance(sandbox, RemoteSandbox):
            names.append(sandbox.token_env)
        if isinstance(sandbox, DaytonaSandbox):
            names.append(sandbox.api_key_env)
    return names


def install(names: Iterable[str] = ()) -> None:
    """Hide `names` as `hide` does, and have every log record of this process scrubbed, tracebacks included."""
    hide(names)
    before = logging.getLogRecordFactory()
    if getattr(before, "scrubs", False):
        return

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = before(*args, **kwargs)
        try:
            made.msg, made.args = scrub(made.getMessage()), ()
        except (TypeError, ValueError):  # a message that does not fit its arguments; logging itself says so
            return made
        if made.exc_info and made.exc_info[0] is not None:
            made.exc_text = scrub(logging.Formatter().formatException(made.exc_info))
        return made

    record.scrubs = True  # type: ignore[attr-defined]  # a mark, so that a second call does not wrap it again
    logging.setLogRecordFactory(record)


def _is_secret(name: str, value: str) -> bool:
    """A number is a size or a count, whatever it is called: MAX_TOKEN=100000."""
    plain = value.isdecimal() and len(value) <= 9
    secret = names_secret(name) or name.upper().endswith(_SHORT_NAMES)
    return secret and not name.upper().endswith(_PLACES) and not plain


def _forms(value: str) -> Iterable[str]:
    """How a value may stand in a text: as it is, in JSON, in an address."""
    return value, json.dumps(value)[1:-1], quote(value, safe="")


def _netrc_keys() -> list[str]:
    """What `wandb login` leaves, under whatever name."""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return [entry[2] for entry in netrc.netrc(path).hosts.values() if entry[2]]
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return []
