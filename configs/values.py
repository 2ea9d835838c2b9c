"""Values that pydantic refuses, in the user's terms: what the key takes, and what was probably meant.

`configs.problems` explains what is wrong with sections and keys; this module explains what is wrong with values.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from configs.problems import KeyPath, Problem, explain, show
from configs.secrecy import HIDDEN, names_secret, redact

_OF_SECTIONS = ("extra_forbidden", "union_tag_invalid", "union_tag_not_found", "value_error")
"""Findings that `configs.problems.explain` words by itself."""
_TOO_SMALL = ("greater_than", "greater_than_equal")
_TOO_LARGE = ("less_than", "less_than_equal")
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_WORDS = {"yes": True, "on": True, "true": True, "1": True, "no": False, "off": False, "false": False, "0": False}
_HUGE = 1e12
_KNOWN = "known here: "
_SWITCHED_OFF = ("disabled", "none")
_UNITS = " %abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NOTHING = ("none", "null", "nil", "off", "no", "false", "nan", "~")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One type of value that a key takes."""

    kind: Any
    """bool, int, float, str, NoneType, a Literal, a StrEnum, a section, or a list or mapping of something."""
    bounds: Mapping[str, Any]
    """gt, ge, lt, le -> limit of a number; min_length -> least length of text or a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What stands at one key path."""

    options: tuple[Option, ...]
    default: Any = PydanticUndefined

    def takes(self, kind: type) -> bool:
        """Whether plain values of this type are taken."""
        return any(option.kind is kind for option in self.options)


def explain_all(findings: Sequence[ErrorDetails], model: type[BaseModel], data: Mapping[str, Any]) -> list[Problem]:
    """Every finding once, in the order found. A list of the wrong length is one problem, however many items lack."""
    return list(dict.fromkeys(explain_value(finding, model, data) for finding in findings))


def explain_value(detail: ErrorDetails, model: type[BaseModel], data: Mapping[str, Any]) -> Problem:
    """One pydantic finding; a refused value comes with what its key takes and what to write."""
    problem = explain(detail, model, data)
    kind, path = detail["type"], problem.path
    if kind == "extra_forbidden":
        secret = isinstance(detail["input"], str) and names_secret(str(path[-1]))
        message = _only_chosen(problem.message, model, path, data)
        return replace(problem, message=message, shown=HIDDEN if secret else problem.shown)
    if kind in _OF_SECTIONS:
        return problem
    if kind == "missing" and isinstance(path[-1], int):
        path = path[:-1]
    value, slot = _value_at(data, path), slot_at(model, path, data)
    if slot is None or not slot.options:
        return problem
    if kind == "missing" and path == problem.path:
        return replace(problem, message=f"{problem.message}: {describe(slot)}")
    if kind == "too_large":
        return replace(problem, message=f"{detail['msg']}; lower it{_default(slot)}")
    if kind == "one_line":
        message = f"{detail['msg']}; remove the line breaks and control characters"
        return replace(problem, message=message, shown=None if value is None else repr(str(value)[:200]))
    key = "" if isinstance(path[-1], int) else f"{path[-1]}: "
    return Problem(path=path, message=_message(key, value, slot, kind), shown=_shown(value))


def _only_chosen(message: str, model: type[BaseModel], path: KeyPath, data: Mapping[str, Any]) -> str:
    """The message about an unknown key, naming the keys of the one variant that the section's tag chose."""
    slot = slot_at(model, path[:-1], data)
    sections = [option.kind for option in slot.options if _is_section(option.kind)] if slot is not None else []
    value = _value_at(data, path[:-1])
    chosen = [section for section in sections if _is_tagged(section, value)] or sections
    if len(chosen) != 1:
        return message
    known, key = f"{_KNOWN}{', '.join(chosen[0].model_fields)}", str(path[-1])
    if having := [section for section in sections if key in section.model_fields]:
        tags = [tag for section in having for tag in section.model_fields.items() if _is_tag(*tag)]
        names = _listed([str(value) for _, field in tags for value in typing.get_args(field.annotation)])
        return f"unknown key; only sections with {tags[0][0]}: {names} have it; remove it; {known}"
    return f"{message.partition(_KNOWN)[0]}{known}" if _KNOWN in message else message


def _message(key: str, value: Any, slot: Slot, kind: str) -> str:
    choices = _choices(slot)
    if choices and isinstance(value, str):
        close = difflib.get_close_matches(value.lower(), [choice.lower() for choice in choices], n=1)
        meant = next((choice for choice in choices if close and choice.lower() == close[0]), None)
        hint = f"did you mean {meant}? " if meant else ""
        return f"not a choice; {hint}choose one of {_listed(choices)}{_default(slot)}"
    return f"must be {describe(slot)}; {_remedy(kind, key, value, slot)}"


def describe(slot: Slot) -> str:
    """What a key takes: "a whole number above 0", "text", "one of 'auto' or 'cpu'", "a list of 2 values, each ..."."""
    sections = [option for option in slot.options if _is_section(option.kind)]
    if len(sections) < 2:
        return " or ".join(dict.fromkeys(_describe(option) for option in slot.options))
    tags = [(tag, field) for s in sections for tag, field in s.kind.model_fields.items() if _is_tag(tag, field)]
    words = (
        f"a section with {tags[0][0]}: {_listed([value for _, f in tags for value in typing.get_args(f.annotation)])}"
    )
    others = [_describe(option) for option in slot.options if option not in sections]
    return " or ".join([words, *others])


def _describe(option: Option) -> str:
    kind, bounds = option.kind, option.bounds
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return _number("a whole number" if kind is int else "a finite number", bounds)
    if kind is str:
        return "text that is not empty" if bounds.get("min_length") else "text"
    if kind is types.NoneType:
        return "null"
    if origin is dict:
        inner = describe(Slot(options=_options(arguments[1])))
        return f"a section of names, each with {inner}"
    if origin in (tuple, list):
        inner = describe(Slot(options=_options(arguments[0])))
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        count = f"{len(arguments)} values" if fixed else "one value or more" if bounds.get("min_length") else "values"
        return f"a list of {count}, each {inner}"
    if _is_section(kind):
        keys = list(kind.model_fields)
        return f"a section ({', '.join(keys[:6])}{', ...' if len(keys) > 6 else ''})"
    return f"one of {_listed(_choices(Slot(options=(option,))))}"


def _number(noun: str, bounds: Mapping[str, Any]) -> str:
    """A number and its range in words."""
    if "ge" in bounds and "le" in bounds:
        return f"{noun} from {_written(bounds['ge'])} to {_written(bounds['le'])}"
    said = [f"{words} {_written(bounds[name])}" for name, words in _BOUNDS.items() if name in bounds]
    return " ".join([noun, *(["of"] if said and said[0].startswith("at") else []), " and ".join(said)]).rstrip()


def _remedy(kind: str, key: str, value: Any, slot: Slot) -> str:
    if kind in _TOO_SMALL:
        return f"raise it{_default(slot)}"
    if kind in _TOO_LARGE:
        return f"lower it{_default(slot)}"
    if isinstance(value, int | float) and abs(value) > _HUGE:
        return f"lower it{_default(slot)}"
    if (meant := _meant(value, slot)) is not None:
        return f"write {key}{redact(meant)}"
    if value is None and slot.default is not PydanticUndefined:
        return f"remove the key{_default(slot)}"
    if (
        isinstance(value, str)
        and _as_number(value.rstrip(_UNITS)) is not None
        and (slot.takes(int) or slot.takes(float))
    ):
        return "write the number alone, in the unit that docs/configuration.md names"
    if any(_is_section(option.kind) or typing.get_origin(option.kind) is dict for option in slot.options):
        return "write it as `key: value` lines below it"
    example = _example(slot)
    return f"write e.g. {key}{example}{_default(slot)}" if example is not None else "give one"


def _meant(value: Any, slot: Slot) -> str | None:
    """YAML of what was probably meant, or None: numbers and flags as text, one value in a list, a list of one."""
    numbers = [option for option in slot.options if option.kind in (int, float)]
    if isinstance(value, str):
        text = value.strip()
        if slot.takes(types.NoneType) and text.lower() in ("", *_NOTHING):
            return "null"
        if slot.takes(bool) and text.lower() in _WORDS:
            return show(_WORDS[text.lower()])
        number = _as_number(text)
        if number is None and text.endswith("%") and (percent := _as_number(text[:-1])) is not None:
            number = percent / 100
        if numbers and number is not None and _fits(number, numbers[0]):
            return _written(number)
    elif value is False and slot.takes(types.NoneType):
        return "null"
    elif value is False and (off := [choice for choice in _choices(slot) if choice in _SWITCHED_OFF]):
        return off[0]  # YAML reads `off` and `no` as false
    elif isinstance(value, int | float) and slot.takes(bool) and value in (0, 1):
        return show(bool(value))
    elif isinstance(value, bool | int | float) and slot.takes(str):
        return f'"{show(value)}"'
    elif isinstance(value, float) and math.isfinite(value) and numbers and _fits(round(value), numbers[0]):
        return str(round(value))
    elif isinstance(value, list) and len(value) == 1 and not isinstance(value[0], dict | list):
        return show(value[0]) if _takes(value[0], slot) else None
    lists = [option for option in slot.options if typing.get_args(option.kind)[1:] == (Ellipsis,)]
    if lists and isinstance(value, str | int | float):
        items = [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]
        inner = Slot(options=_options(typing.get_args(lists[0].kind)[0]))
        return show(items) if items != [""] and all(_takes(item, inner) for item in items) else None
    return None


def _takes(value: Any, slot: Slot) -> bool:
    """Whether a plain value would do."""
    for option in slot.options:
        if option.kind is type(value) and (not isinstance(value, int | float) or _fits(value, option)):
            return True
        if option.kind is float and type(value) is int and _fits(value, option):
            return True
    return isinstance(value, str) and value in _choices(slot)


def _as_number(text: str) -> float | int | None:
    """The number that a text writes: "1e-4", "1,000"."""
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < _HUGE else number


def _fits(number: float, option: Option) -> bool:
    limits = option.bounds
    return (
        (option.kind is float or float(number).is_integer())
        and ("gt" not in limits or number > limits["gt"])
        and ("ge" not in limits or number >= limits["ge"])
        and ("lt" not in limits or number < limits["lt"])
        and ("le" not in limits or number <= limits["le"])
    )


def _written(number: float) -> str:
    return str(int(number)) if float(number).is_integer() and abs(number) < 2**63 else f"{number:g}"


def _example(slot: Slot) -> str | None:
    """A value that would do: the default, or a small one."""
    if slot.default is not PydanticUndefined and slot.default is not None:
        return _yaml(slot.default)
    for option in slot.options:
        if option.kind in (int, float):
            return next((_written(number) for number in (1, 2, 4, 0.5, 0.0, 100) if _fits(number, option)), None)
        if option.kind is bool:
            return "true"
        if option.kind is str:
            return "some-text"
        if typing.get_origin(option.kind) is tuple and typing.get_args(option.kind)[1:] == (Ellipsis,):
            inner = _example(Slot(options=_options(typing.get_args(option.kind)[0])))
            return None if inner is None else f"[{inner}]"
        if choices := _choices(Slot(options=(option,))):
            return choices[0]
    return None


def _default(slot: Slot) -> str:
    """The default in brackets, where there is one."""
    if slot.default is PydanticUndefined or isinstance(slot.default, BaseModel):
        return ""
    return f" (default {_yaml(slot.default)})"


def _yaml(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "..."
    if isinstance(value, StrEnum):
        return value.value
    return show(list(value) if isinstance(value, tuple) else value)


def _shown(value: Any) -> str:
    """As written; text that could be taken for something else is in quotes."""
    if isinstance(value, str) and (not value or _as_number(value) is not None or value.lower() in (*_WORDS, *_NOTHING)):
        return f"'{value}'" if len(value) <= 200 else f"'{value[:197]}...'"
    return show(value)


def _choices(slot: Slot) -> list[str]:
    found: list[str] = []
    for option in slot.options:
        if typing.get_origin(option.kind) is typing.Literal:
            found += [str(argument) for argument in typing.get_args(option.kind)]
        elif isinstance(option.kind, type) and issubclass(option.kind, StrEnum):
            found += [member.value for member in option.kind]
    return found


def _listed(choices: Sequence[str]) -> str:
    quoted = [f"'{choice}'" for choice in choices]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else quoted[0]


# ---- what the schema says at a path ---------------------------------------------------------------------------------


def slot_at(model: type[BaseModel], path: KeyPath, data: Any) -> Slot | None:
    """What stands at `path`; where the schema has variants, the one that the section's tag chooses."""
    slot: Slot | None = Slot(options=(Option(kind=model, bounds={}),))
    value = data
    for part in path:
        slot = _inside(slot, part, value) if slot is not None else None
        value = _value_at(value, (part,))
    return slot


def _inside(slot: Slot, part: str | int, value: Any) -> Slot | None:
    sections = [option.kind for option in slot.options if _is_section(option.kind)]
    for section in sorted(sections, key=lambda s: not _is_tagged(s, value)):
        field = section.model_fields.get(str(part))
        if field is not None:
            return Slot(options=_options(field.annotation, field.metadata), default=_default_of(field))
    for option in slot.options:
        origin, arguments = typing.get_origin(option.kind), typing.get_args(option.kind)
        if origin is dict:
            return Slot(options=_options(arguments[1]))
        if origin in (tuple, list) and isinstance(part, int):
            return Slot(options=_options(arguments[0 if arguments[-1] is Ellipsis else min(part, len(arguments) - 1)]))
    return None


def _is_tagged(section: type[BaseModel], value: Any) -> bool:
    """Whether this is the variant that the value's `type` or `name` names."""
    return isinstance(value, Mapping) and any(
        value.get(name) in typing.get_args(field.annotation)
        for name, field in section.model_fields.items()
        if _is_tag(name, field)
    )


def _is_tag(name: str, field: FieldInfo) -> bool:
    return name in ("type", "name") and typing.get_origin(field.annotation) is typing.Literal


def _options(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[Option, ...]:
    """The types an annotation allows, each with its bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _options(arguments[0], [*metadata, *annotation.__metadata__])
    if origin in (typing.Union, types.UnionType):
        return tuple(option for argument in arguments for option in _options(argument, metadata))
    bounds: dict[str, Any] = {}
    for constraint in metadata:
        for item in constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]:
            for name in (*_BOUNDS, "min_length"):
                if (limit := getattr(item, name, None)) is not None:
                    bounds[name] = limit
    return (Option(kind=annotation, bounds=bounds),)


def _default_of(field: FieldInfo) -> Any:
    return PydanticUndefined if field.is_required() else field.default


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _value_at(data: Any, path: KeyPath) -> Any:
    value = data
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value
