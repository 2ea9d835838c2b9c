"""Writes docs/configuration.md from the schema: `python -m configs.reference docs/configuration.md`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.problems import sections_of, show
from configs.schema import RunConfig, Section

INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from configs/schema/; edit the docstrings there. -->

A run is one YAML file. Start from one in `configs/`; change single keys on the command line:

    gagar train configs/quickstart.yaml steps=8 algorithm.mode=outcome grader=null
    gagar train configs/quickstart.yaml '~algorithm.group_size'          # back to the default
    gagar train configs/learn.yaml --arm configs/arms/outcome.yaml       # a file merged over it
    gagar config check configs/learn.yaml                                # what is wrong with it, before anything starts
    gagar config show configs/learn.yaml                                 # with every default filled in

Values are YAML (`true`, `null`, `1e-4`, `[0.2, 5.0]`, `{type: jail}`). An unknown key, a key given twice, a wrong
value, a combination that cannot run and a key that has no effect in its combination are all refused, each in one line
with place, key, value and remedy. Model folders are relative to the configuration file, `output` to the working
directory. Secrets never stand in a configuration: keys ending in `_env` name the variable that holds them.

Rules such as M3.2 are explained in [method.md](method.md).
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for section, paths in _sections().items():
        where = ", ".join(f"`{path}`" for path in paths) or "top level"
        parts.append(f"\n## {section.__name__}: {where}\n")
        if section.__doc__:
            parts.append(f"{inspect.cleandoc(section.__doc__)}\n")
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        documents = field_documents(section)
        for name, field in section.model_fields.items():
            meaning = documents.get(name) or _meaning(name, field)
            cells = (f"`{name}`", _value(field), _default(field), meaning)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


def field_documents(section: type[BaseModel]) -> dict[str, str]:
    """Field -> its docstring in one line, inherited ones included."""
    documents: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, Section):
            continue
        (node,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(node, ast.ClassDef)
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                documents[ast.unparse(field.target)] = " ".join(str(after.value.value).split())
    return documents


def _meaning(name: str, field: FieldInfo) -> str:
    """What needs no docstring: sections explain themselves, tags say which kind of section this is."""
    if typing.get_origin(field.annotation) is typing.Literal and name in ("type", "name"):
        return "Chooses this kind of section."
    return " / ".join(inspect.cleandoc(s.__doc__ or "").split("\n")[0] for s in sections_of(field.annotation))


def _sections() -> dict[type[BaseModel], list[str]]:
    """Every section with the key paths at which it stands, outermost first."""
    found: dict[type[BaseModel], list[str]] = {}

    def visit(section: type[BaseModel], path: str) -> None:
        places = found.setdefault(section, [])
        if path and path not in places:
            places.append(path)
        for name, field in section.model_fields.items():
            star = ".*" if typing.get_origin(field.annotation) is dict else ""
            for inner in sections_of(field.annotation):
                visit(inner, f"{path}.{name}{star}" if path else f"{name}{star}")

    visit(RunConfig, "")
    return found


def _value(field: FieldInfo) -> str:
    """The kind of value, with its bounds."""
    bounds = [
        f"{sign} {limit}"
        for constraint in _constraints(field.annotation, field.metadata)
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if (limit := getattr(constraint, name, None)) is not None
    ]
    kind = _kind(field.annotation)
    return f"{kind}, {', '.join(f'{bound}' for bound in bounds)}" if bounds else kind


def _constraints(annotation: Any, metadata: list[Any]) -> list[Any]:
    """Bounds of a number, also where it may be null."""
    found = list(metadata)
    if typing.get_origin(annotation) is typing.Annotated:
        for item in annotation.__metadata__:
            found += getattr(item, "metadata", [item])
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            found += _constraints(argument, [])
    return found


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(argument) for argument in arguments))
    if origin is tuple:
        return "list of " + (_kind(arguments[0]) if arguments[-1] is Ellipsis else f"{len(arguments)} numbers")
    if origin is dict:
        return "section of sections" if sections_of(annotation) else f"section of {_kind(arguments[1])}s"
    if annotation is types.NoneType:
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{_anchor(annotation)})"
    return {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def _anchor(section: type[BaseModel]) -> str:
    """The anchor that GitHub makes of the section's heading."""
    where = ", ".join(_sections()[section]) or "top level"
    return re.sub(r"[^a-z0-9 _-]", "", f"{section.__name__}: {where}".lower()).replace(" ", "-")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, Enum):
        value = value.value
    return f"`{show(list(value) if isinstance(value, tuple) else value)}`"


def main(arguments: list[str]) -> int:
    """Write the page to the file named in `arguments`."""
    Path(arguments[0]).write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
