"""What rules are made of: findings about a key, and the places that several rules look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from configs.problems import KeyPath, Problem, is_set, show, value_at
from configs.schema import EngineConfig, RunConfig, SandboxConfig, VllmGraderBackend


def problem(config: RunConfig, dotted: str, message: str) -> Problem:
    """What is wrong with a key, with its value where that is a plain one."""
    path: KeyPath = tuple(dotted.split("."))
    try:
        value = value_at(config, dotted)
    except (AttributeError, KeyError):
        return Problem(path=path, message=message)
    plain = None if isinstance(value, BaseModel | dict) else show(_plain(value))
    return Problem(path=path, message=message, shown=plain)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else getattr(value, "value", value)


def idle(config: RunConfig, dotted: str, why: str, remedy: str = "remove the key") -> Iterator[Problem]:
    """A key the user wrote that nothing would read; null says so itself."""
    if is_set(config, dotted) and value_at(config, dotted) is not None:
        yield replace(problem(config, dotted, f"has no effect, because {why}; {remedy}"), idle=True)


def hidden(key: str, message: str) -> Problem:
    """A problem whose value must not be repeated."""
    return Problem(path=tuple(key.split(".")), message=message)


def repeated(values: Iterable[str]) -> str | None:
    """The first value that stands there more than once."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def check_address(config: RunConfig, key: str, address: str, example: str) -> Iterator[Problem]:
    """An address of HTTP, without anything that may be a secret."""
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield problem(config, key, f"is not an address; give e.g. {example} or http://host:8000/v1")
    elif "@" in parts.netloc or parts.query or parts.fragment:
        yield hidden(
            key, f"may hold a secret, which would stand in the run folder; give the bare address, e.g. {example}"
        )


def check_variable(config: RunConfig, key: str, name: str) -> Iterator[Problem]:
    """The name of an environment variable; what is none may be the secret itself."""
    if not (name.isascii() and name.isidentifier()):
        yield hidden(
            key, "is not the name of an environment variable (a key itself never stands here); give e.g. MY_API_KEY"
        )


def engines_of(config: RunConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Key and section of each pool of engines."""
    yield "engine", config.engine
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        yield "grader.backend.engine", config.grader.backend.engine


def sandboxes_of(config: RunConfig) -> Iterator[tuple[str, SandboxConfig]]:
    """Key and section of each kind of sandbox that is used."""
    yield "rollout.sandbox", config.rollout.sandbox
    if config.grader is not None and config.grader.sandbox is not None:
        yield "grader.sandbox", config.grader.sandbox
