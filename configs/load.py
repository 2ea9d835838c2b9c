"""Read a configuration: a YAML file, arms merged over it, dotted overrides, then validation against a schema.

Syntax of overrides, one argument each: `learner.optimizer.lr=1e-4`, `grader=null`, `rollout.sandbox={type: jail}`
(the value is YAML), `~algorithm.lambda_max` (back to the default). Every problem is found before anything starts, and
all of them are reported together, one line each: where it stands, key path, value, what is wrong, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from configs.errors import ConfigError
from configs.problems import KeyPath, Problem, line, report, show
from configs.schema import RunConfig
from configs.secrecy import redact
from configs.sft_schema import SftRecipe
from configs.trace_schema import TraceConfig
from configs.values import explain_all

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[Model]):
    """A valid configuration and where its values came from."""

    config: Model
    file: Path
    origins: Mapping[KeyPath, str]
    """Key path -> "file:line" or "override 'key=value'"."""

    def refuse(self, problems: Sequence[Problem]) -> ConfigError:
        """The one error that reports these problems."""
        return _report(self.file, problems, self.origins)

    def lines(self, problems: Sequence[Problem]) -> list[str]:
        """What is to be said about these, one line each, where nothing is refused."""
        return [line(self.file, problem, self.origins) for problem in _hidden(problems)]


def load(model: type[Model], file: Path, overrides: Sequence[str] = (), arms: Sequence[Path] = ()) -> Loaded[Model]:
    """The configuration in `file`, with `arms` merged over it in order and `overrides` applied last.

    Relative model folders are resolved against the folder of `file`.

    Raises:
        ConfigError: names every problem with place, key path, value and remedy.
    """
    origins: dict[KeyPath, str] = {}
    shipped = Path(__file__).parent
    folders: dict[type[BaseModel], Path] = {SftRecipe: shipped / "sft", TraceConfig: shipped / "traces"}
    data = _read(file, origins, folders.get(model, shipped))
    _refuse_other_kind(model, file, data)
    for arm in arms:
        arm_origins: dict[KeyPath, str] = {}
        _merge(data, _read(arm, arm_origins, shipped / "arms"), origins, arm_origins, ())
    for override in overrides:
        _apply(data, override, origins, file)
    try:
        config = model.model_validate(data, context={"folder": file.absolute().parent})
    except ValidationError as error:
        problems = explain_all(error.errors(include_url=False), model, data)
        raise _report(file, problems, origins) from None
    return Loaded(config=config, file=file, origins=origins)


def _refuse_other_kind(model: type[BaseModel], file: Path, data: Mapping[str, Any]) -> None:
    """A recipe where a run's configuration is wanted, or the other way round: one message instead of twenty."""
    wanted, other = (SftRecipe, RunConfig) if issubclass(model, SftRecipe) else (RunConfig, SftRecipe)
    required = [name for name, field in wanted.model_fields.items() if field.is_required()]
    if not set(data).isdisjoint(required) or len(set(data) & set(other.model_fields)) < 3:
        return
    names = {RunConfig: "the configuration of a run (gagar train)", SftRecipe: "a recipe (gagar sft)"}
    raise ConfigError(f"{file}: is {names[other]}, not {names[wanted]}; give one of those, or use the other command")


def _report(file: Path, problems: Sequence[Problem], origins: Mapping[KeyPath, str]) -> ConfigError:
    """The error for these problems, without what looks like a secret in a value."""
    return report(file, _hidden(problems), origins)


def _hidden(problems: Sequence[Problem]) -> list[Problem]:
    return [replace(p, shown=None if p.shown is None else redact(p.shown)) for p in problems]


# ---- reading YAML ---------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number and 2026-11-30 is text (as in YAML 1.2)."""


_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_PLAIN_VALUES = (str, int, float, bool, type(None))

_Loader.yaml_implicit_resolvers = {
    key: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _read(file: Path, origins: dict[KeyPath, str], shipped: Path) -> dict[str, Any]:
    """The data of a file; `shipped` is where files of its kind are found."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        examples = ", ".join(str(path) for path in sorted(shipped.glob("*.yaml")))
        raise ConfigError(f"{file}: no such file; give the path of one, e.g. {examples or shipped}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); give the path of a readable YAML file") from None
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            data = {} if node is None else _build(loader, node, (), str(file), origins)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{file}:{line}: not valid YAML ({reason}); mend this line") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        code = f"character U+{ord(text[error.position]):04X}"
        raise ConfigError(f"{file}:{line}: not valid YAML ({code} is not allowed); remove it") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML ({error}); mend the file") from None
    except RecursionError:
        raise ConfigError(f"{file}: a section holds itself, or nests too deep; write it out") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds a {type(data).__name__}, not sections; start with e.g. `name: my-run`")
    return data


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, file: str, origins: dict[KeyPath, str]) -> Any:
    """Plain values of a node, with the line of each key noted. A key given twice is refused: one has no effect."""
    origins.setdefault(path, f"{file}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
        raise yaml.MarkedYAMLError(problem=f"tag {node.tag} is not allowed", problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be one word", problem_mark=key_node.start_mark)
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen and key != "<<":
                dotted = ".".join(map(str, (*path, key)))
                raise ConfigError(
                    f"{file}:{line}: {dotted} is given twice (first in line {seen[key]}); remove one of them"
                )
            seen[key] = line
        loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            origins[(*path, key)] = f"{file}:{key_node.start_mark.line + 1}"
            result[key] = _build(loader, value_node, (*path, key), file, origins)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, (*path, i), file, origins) for i, item in enumerate(node.value)]
    try:
        value = loader.construct_object(node, deep=True)
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as error:
        problem = f"{str(node.value)[:40]!r} cannot be read as {node.tag.rsplit(':', 1)[-1]}: {error}"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
    if not isinstance(value, _PLAIN_VALUES) or (isinstance(value, int) and value.bit_length() > 1024):
        problem = f"{str(node.value)[:40]!r} is neither text nor a number that a key could take"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return value


# ---- arms and overrides ---------------------------------------------------------------------------------------------


def _merge(
    base: dict[str, Any],
    over: dict[str, Any],
    origins: dict[KeyPath, str],
    over_origins: Mapping[KeyPath, str],
    path: KeyPath,
) -> None:
    """Sections are merged key by key; anything else, also a section of another `type` or `name`, is replaced."""
    for key, value in over.items():
        here = (*path, key)
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and _same_kind(old, value):
            origins[here] = over_origins[here]
            _merge(old, value, origins, over_origins, here)
        else:
            base[key] = value
            _forget(origins, here)
            origins.update({p: o for p, o in over_origins.items() if p[: len(here)] == here})


def _same_kind(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return all(old[tag] == new[tag] for tag in ("type", "name") if tag in old and tag in new)


def _forget(origins: dict[KeyPath, str], path: KeyPath) -> None:
    for known in [p for p in origins if p[: len(path)] == path]:
        del origins[known]


def _apply(data: dict[str, Any], override: str, origins: dict[KeyPath, str], file: Path) -> None:
    origin = f"override {_short(redact(override))!r}"
    key, equals, text = override.partition("=")
    removal = key.startswith("~") and not equals
    keys = key.removeprefix("~").strip().split(".")
    if not (equals or removal) or not all(keys):
        raise ConfigError(f"{origin}: not an override; write key.path=value, or ~key.path for the default")
    section: Any = data
    for i, part in enumerate(keys[:-1]):
        if section.get(part) is None:
            if removal:
                raise ConfigError(f"{origin}: {file} does not set {'.'.join(keys)}; leave the override out")
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            dotted = ".".join(keys[: i + 1])
            raise ConfigError(f"{origin}: {dotted} = {redact(show(section))} is not a section; set {dotted} as a whole")
    path = tuple(keys)
    _forget(origins, path)
    if removal:
        if keys[-1] not in section:
            raise ConfigError(f"{origin}: {file} does not set {'.'.join(keys)}; leave the override out")
        del section[keys[-1]]
        return
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            section[keys[-1]] = None if node is None else _build(loader, node, path, origin, {})
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        reason = (
            "it nests too deep" if isinstance(error, RecursionError) else getattr(error, "problem", None) or "syntax"
        )
        raise ConfigError(
            f"{origin}: {_short(redact(text))!r} is not a YAML value ({reason}); mend it, or quote it as text: "
            f"{key}='\"...\"'"
        ) from None
    for i in range(1, len(path) + 1):
        origins.setdefault(path[:i], origin)
    origins[path] = origin


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
