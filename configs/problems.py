"""What keeps a configuration from running, in the user's terms: place, key path, value, what is wrong, what to do."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from configs.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that keeps a configuration from running."""

    path: KeyPath
    message: str
    """What is wrong and what to do, e.g. "must be above 0; raise it"."""
    shown: str | None = None
    """The value as the user wrote it, shortened; None where there is none."""
    idle: bool = False
    """Whether the key merely has no effect: without it the configuration means the same."""


def report(file: Path, problems: Sequence[Problem], origins: Mapping[KeyPath, str]) -> ConfigError:
    """One error for all problems, one line each."""
    lines = [line(file, problem, origins) for problem in problems]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n".join([f"{file} has {len(lines)} problems:", *(f"  {text}" for text in lines)]))


def line(file: Path, problem: Problem, origins: Mapping[KeyPath, str]) -> str:
    """Place, key, value, what is wrong and what to do."""
    where = str(file)
    for length in range(len(problem.path), 0, -1):
        if (found := origins.get(problem.path[:length])) is not None:
            where = found
            break
    if where.startswith("override"):
        where = f"{file}, {where}"
    dotted = ".".join(map(str, problem.path))
    value = f" = {problem.shown}" if problem.shown is not None else ""
    subject = f"{dotted}{value}: " if dotted else ""
    return f"{where}: {subject}{problem.message}"


def show(value: Any) -> str:
    """A value as it would be written in one line of YAML, shortened."""
    text = " ".join(yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").split())
    return text if len(text) <= 200 else text[:197] + "..."


def explain(detail: ErrorDetails, model: type[BaseModel], data: Mapping[str, Any]) -> Problem:
    """One pydantic finding in the user's terms."""
    path, value, exists = _locate(detail["loc"], data)
    kind, context = detail["type"], detail.get("ctx", {})
    shown = show(value) if exists and not isinstance(value, dict) else None
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        message = f"unknown key; {_suggest(path, model, data)}"
    elif kind == "missing":
        message = "is required; add it"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = str(context["discriminator"]).strip("'")
        if kind == "union_tag_invalid":
            expected, shown, path = context["expected_tags"], show(context["tag"]), (*path, tag)
            close = difflib.get_close_matches(str(context["tag"]), [t.strip("' ") for t in expected.split(",")], n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            message = f"unknown {tag}; {hint}choose one of {expected}"
        elif isinstance(value, dict):
            path = (*path, tag)
            message = "is required; it says which kind of section this is (see docs/configuration.md)"
        else:
            message = f"must be a section with the key {tag} (see docs/configuration.md)"
    elif kind in ("enum", "literal_error"):
        close = difflib.get_close_matches(str(value), re.findall(r"'([^']+)'", context["expected"]), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        message = f"not a choice; {hint}choose one of {context['expected']}"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        message = "must be a section with keys of its own; write it as `key: value` lines below it"
    elif kind != "value_error":
        message = re.sub(r"^(Input|Tuple|List|String|Dictionary) should", "must", message) + "; change the value"
    return Problem(path=path, message=message, shown=shown)


def _locate(loc: Sequence[str | int], data: Any) -> tuple[KeyPath, Any, bool]:
    """The key path as the user writes it, its value, and whether it is there. (Pydantic adds the tag of unions.)"""
    path: list[str | int] = []
    value, exists = data, True
    for part in loc:
        if isinstance(value, Mapping) and part in value:  # noqa: SIM114 (each branch narrows its own type)
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(value, Mapping) and part in (value.get("type"), value.get("name")):
            continue
        else:
            value, exists = None, False
        path.append(part)
    return tuple(path), value, exists


def _suggest(path: KeyPath, model: type[BaseModel], data: Mapping[str, Any]) -> str:
    """A remedy for an unknown key: the same name further down, the close name in its section, the same name elsewhere,
    or what there is."""
    key, parent = str(path[-1]), ".".join(map(str, path[:-1]))
    elsewhere = [p for p in known_keys(model) if p.rsplit(".", 1)[-1] == key and p != ".".join(map(str, path))]
    if below := [p for p in elsewhere if parent and p.startswith(f"{parent}.")]:
        return f"did you mean {below[0]}?"
    siblings = [name for name, _ in _children(model, path[:-1], data)]
    close = difflib.get_close_matches(key, siblings, n=1)
    if close:
        return f"did you mean {'.'.join([parent, close[0]] if parent else [close[0]])}?"
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"remove it; known here: {', '.join(siblings)}" if siblings else "remove it"


def _children(model: type[BaseModel], path: KeyPath, data: Any) -> Iterator[tuple[str, Any]]:
    """Fields of the section at `path`, of the variant that its tag chooses where there are several."""
    candidates: list[type[BaseModel]] = [model]
    value: Any = data
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
        found: list[type[BaseModel]] = []
        for candidate in candidates:
            field = candidate.model_fields.get(str(part))
            found += sections_of(field.annotation) if field is not None else sections_of(candidate)
        candidates = found or [c for c in candidates if c is not model]
    tag = (value.get("type") or value.get("name")) if isinstance(value, Mapping) else None
    chosen = [c for c in candidates if tag is not None and tag in _tags(c)] or candidates
    for candidate in chosen:
        for name, field in candidate.model_fields.items():
            yield name, field.annotation


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    for name in ("type", "name"):
        field = section.model_fields.get(name)
        if field is not None and typing.get_origin(field.annotation) is typing.Literal:
            return typing.get_args(field.annotation)
    return ()


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Every section type that an annotation can hold, through unions, Annotated and dict values."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    arguments = typing.get_args(annotation)
    return [section for argument in arguments for section in sections_of(argument)]


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted path of every key; `*` stands for the names in a mapping of sections, variants are listed together."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        sections = sections_of(field.annotation)
        if typing.get_origin(field.annotation) is dict and sections:
            dotted = f"{dotted}.*"
        elif dotted not in keys:
            keys.append(dotted)
        for section in sections:
            keys += [key for key in known_keys(section, f"{dotted}.") if key not in keys]
    return keys


def is_set(config: BaseModel, dotted: str) -> bool:
    """Whether the user wrote this key (a default does not count)."""
    value: Any = config
    for part in dotted.split("."):
        if isinstance(value, BaseModel):
            if part not in value.model_fields_set:
                return False
            value = getattr(value, part)
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return False
    return True


def value_at(config: BaseModel, dotted: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in dotted.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value
