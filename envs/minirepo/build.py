"""From a shape to a repository: modules, call sites, tests, issue text and reference patch of one task."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.minirepo.shape import Shape, fill, holes, marked, unmark
from envs.minirepo.wording import DIAGNOSES, FILES_LINES, NOTES, REPORTS, SCENES
from envs.names import Draw, literal
from envs.patch import unified_diff
from envs.task import HiddenTests, Split, Task, TaskKind

_NAME_LETTERS = "xynztiab"
_TRIES = 200
HIDDEN_COMMAND = "python3 -m unittest -q test_hidden test_visible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of the call sites: arguments, what the function returns and what it should return."""

    args: tuple[object, ...]
    got: object
    """None where it raises."""
    error: str | None
    """Name of the exception that the buggy code raises."""
    want: object

    @property
    def bad(self) -> bool:
        """Whether the bug shows."""
        return self.error is not None or self.got != self.want


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A module that calls the shared function."""

    path: str
    module: str
    function: str
    lines: tuple[str, ...]
    call_line: int
    """1-based line of the call."""
    wrap: str
    """The returned expression, with @ for the call's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything known about one generated task; experts are written from it."""

    shape: Shape
    split: Split
    names: Mapping[str, str]
    helper_path: str
    helper_lines: tuple[str, ...]
    other_function: bool
    """Whether the helper module holds a second, unrelated function."""
    def_line: int
    bug_line: int
    """1-based line of the wrong fragment."""
    old: str
    new: str
    sites: tuple[Site, Site]
    params: tuple[str, ...]
    call: str
    plain: bool
    """Whether the call is the function's call and nothing more, so that both return the same."""
    case: Case
    """The example of the issue; the only arguments on which the tests can see the bug."""
    scene: str
    notes: tuple[str, ...]
    spare: tuple[str, ...]
    """Unused names of the split, for code that experts add."""
    visible: str
    task: Task

    def fixed_line(self) -> str:
        """The line of the bug after the clean fix, without indentation."""
        return self.helper_lines[self.bug_line - 1].replace(self.old, self.new, 1).strip()


def build(shape: Shape, split: Split, task_id: str, source: str, rng: random.Random) -> Plan:
    """Generate the task; the same random state gives the same task."""
    draw = Draw(rng, split)
    names = _names(draw)
    draw.consts = {letter: names[letter] for letter in "cdkj"}
    package, helper, modules = draw.long(), draw.long(), (draw.long(), draw.long())
    helper_lines, def_line, other = _helper_module(shape, names, draw)
    bug_line, old = _locate(shape, names, helper_lines, def_line)
    params = tuple(names[letter] for letter in holes(shape.call) if letter != "h")
    call = fill(shape.call, names)
    case, good = _cases(shape, names, draw)
    sites = tuple(_site(package, module, helper, names["h"], params, call, draw) for module in modules)
    first, second = sites
    visible = _tests("TestVisible", (first, second), [(first, case), (second, good[0])])
    hidden = _tests("TestHidden", (first, second), [(site, c) for site in sites for c in (case, *good)])
    helper_path = f"{package}/{helper}.py"
    files = {
        helper_path: _text(helper_lines),
        first.path: _text(first.lines),
        second.path: _text(second.lines),
        "test_visible.py": visible,
    }
    new = fill(shape.fix, names)
    fixed = list(helper_lines)
    fixed[bug_line - 1] = fixed[bug_line - 1].replace(old, new, 1)
    scene = draw.pick(SCENES[split])
    task = Task(
        task_id=task_id,
        source=source,
        kind=TaskKind.CODE,
        split=split,
        statement=_statement(shape, names, split, draw, scene, first, case, helper_path, sorted(files), old, new),
        files=files,
        verifier=HiddenTests(
            files={"test_hidden.py": hidden, "test_visible.py": visible},
            command=HIDDEN_COMMAND,
            modules=("test_hidden", "test_visible"),
        ),
        reference_patch=unified_diff(files, {**files, helper_path: _text(fixed)}),
        meta={"bug": shape.kind, "template": shape.name},
    )
    return Plan(
        shape=shape,
        split=split,
        names=names,
        helper_path=helper_path,
        helper_lines=tuple(helper_lines),
        other_function=other,
        def_line=def_line,
        bug_line=bug_line,
        old=old,
        new=new,
        sites=(first, second),
        params=params,
        call=call,
        plain=re.fullmatch(r"\$h\([^()]*\)", shape.call) is not None,
        case=case,
        scene=scene,
        notes=tuple(note.format(scene=scene) for note in NOTES[split]),
        spare=tuple(draw.long() for _ in range(4)),
        visible=visible,
        task=task,
    )


def _names(draw: Draw) -> dict[str, str]:
    names = {letter: draw.short() for letter in _NAME_LETTERS}
    names["h"] = draw.long()
    low, high = sorted(draw.rng.sample(range(2, 10), 2))
    names["c"], names["d"] = (str(low), str(high)) if draw.maybe(0.5) else (str(high), str(low))
    names["k"], names["j"] = draw.long(), draw.long()
    return names


def _function(shape: Shape, names: Mapping[str, str], replacement: str | None = None) -> list[str]:
    lines = [f"def $h({shape.head}):", *(f"    {line}" for line in shape.body)]
    return [fill(unmark(line, replacement), names) for line in lines]


def _helper_module(shape: Shape, names: Mapping[str, str], draw: Draw) -> tuple[list[str], int, bool]:
    target = _function(shape, names)
    before: list[str] = []
    after: list[str] = []
    other = draw.maybe(0.6)
    if draw.maybe(0.4):
        before += [f"{draw.long().upper()} = {draw.number(2, 9)}", ""]
    if other:
        name, arg = draw.long(), draw.short()
        small = [f"def {name}({arg}):", f"    return {arg} {draw.pick(('+', '*', '-'))} {draw.number(2, 9)}"]
        if draw.maybe(0.5):
            before += [*small, ""]
        else:
            after = ["", *small]
    return [*before, *target, *after], len(before) + 1, other


def _locate(shape: Shape, names: Mapping[str, str], lines: Sequence[str], def_line: int) -> tuple[int, str]:
    template = [shape.head, *shape.body]
    offset = next(index for index, line in enumerate(template) if marked(line) is not None)
    old = fill(marked(template[offset]) or "", names)
    return def_line + offset, old


def _cases(shape: Shape, names: Mapping[str, str], draw: Draw) -> tuple[Case, list[Case]]:
    """An example that shows the bug, and one or two that do not; together they also catch the wrong fix."""
    versions: list[Any] = []
    for replacement in (None, shape.fix, shape.wrong):
        code = _function(shape, names, replacement)
        params = ", ".join(names[letter] for letter in holes(shape.call) if letter != "h")
        code += ["", f"def call({params}):", f"    return {fill(shape.call, names)}"]
        space: dict[str, object] = {}
        try:
            exec(compile(_text(code), "<shape>", "exec"), space)
        except SyntaxError:
            if replacement is not shape.wrong:
                raise
            space["call"] = None
        versions.append(space["call"])
    bad: Case | None = None
    good: dict[str, Case] = {}
    caught = False
    for attempt in range(_TRIES):
        args = shape.args(draw)
        source = literal(args)
        got, error = _outcome(versions[0], source)
        want, failure = _outcome(versions[1], source)
        if failure is not None:
            raise ValueError(f"shape {shape.name}: the fixed function raises {failure} on {source}")
        case = Case(args=args, got=got, error=error, want=want)
        slips = _outcome(versions[2], source) == (want, None)
        if case.bad and (bad is None or not caught):
            bad, caught = case, caught or not slips
        elif not case.bad and len(good) < 2:
            good[source] = case
            caught = caught or not slips
        if bad and caught and (len(good) == 2 or (good and attempt >= 8)):
            return bad, list(good.values())
    raise ValueError(f"shape {shape.name}: no examples found that show the bug and catch the wrong fix")


def _outcome(function: Any, args: str) -> tuple[object, str | None]:
    """Call with a fresh copy of the arguments."""
    try:
        return function(*ast.literal_eval(args)), None
    except Exception as error:  # the buggy code may raise anything
        return None, type(error).__name__


def _site(package: str, module: str, helper: str, name: str, params: Sequence[str], call: str, draw: Draw) -> Site:
    function, word = draw.long(), draw.long()
    wrap = draw.pick(("@", "[@]", f'("{word}", @)', f'{{"{word}": @}}'))
    arguments = ", ".join(params)
    head = [f"from {package}.{helper} import {name}", "", f"def {function}({arguments}):"]
    if draw.maybe(0.3):
        local = draw.short()
        body = [f"    {local} = {call}", f"    return {wrap.replace('@', local)}"]
    else:
        body = [f"    return {wrap.replace('@', call)}"]
    return Site(
        path=f"{package}/{module}.py",
        module=f"{package}.{module}",
        function=function,
        lines=(*head, *body),
        call_line=len(head) + 1,
        wrap=wrap,
    )


def site_call(site: Site, case: Case) -> str:
    """The call of a call site, as source."""
    return f"{site.function}({', '.join(literal(arg) for arg in case.args)})"


def site_value(site: Site, value: object) -> str:
    """What a call site returns when the function returns `value`, as source."""
    return site.wrap.replace("@", literal(value))


def _tests(name: str, sites: Sequence[Site], checks: Sequence[tuple[Site, Case]]) -> str:
    lines = ["import unittest", ""]
    lines += [f"from {site.module} import {site.function}" for site in sites]
    lines += ["", f"class {name}(unittest.TestCase):"]
    for index, (site, case) in enumerate(checks):
        check = f"self.assertEqual({site_call(site, case)}, {site_value(site, case.want)})"
        lines += [f"    def test_{'abcdefgh'[index]}(self):", f"        {check}", ""]
    return _text(lines[:-1])


def _statement(
    shape: Shape,
    names: Mapping[str, str],
    split: Split,
    draw: Draw,
    scene: str,
    site: Site,
    case: Case,
    helper_path: str,
    files: Sequence[str],
    old: str,
    new: str,
) -> str:
    got = f"raises {case.error}" if case.error else f"returns {site_value(site, case.got)}"
    report = draw.pick(REPORTS[split]).format(
        scene=scene,
        call=site_call(site, case),
        got=got,
        want=site_value(site, case.want),
        helper=names["h"],
        path=helper_path,
        symptom=fill(draw.pick(shape.symptoms), names),
    )
    diagnosis = draw.pick(DIAGNOSES[split]).format(old=old, new=new)
    return f"{report} {diagnosis}\n" + draw.pick(FILES_LINES[split]).format(files=" ".join(files))


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
