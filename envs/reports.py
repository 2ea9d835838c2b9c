"""What test runners say of each test: logs, JUnit XML, JSON. Text from a sandbox, so nothing in it is trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

from configs.errors import ConfigError


class Status(StrEnum):
    """How one test ended."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAIL = "expected failure"


_WORDS: Mapping[str, Status] = {
    "PASSED": Status.PASSED, "PASS": Status.PASSED, "OK": Status.PASSED, "SUCCESS": Status.PASSED,
    "FAILED": Status.FAILED, "FAIL": Status.FAILED, "FAILURE": Status.FAILED, "XPASS": Status.FAILED,
    "ERROR": Status.ERROR,
    "SKIPPED": Status.SKIPPED, "SKIP": Status.SKIPPED, "IGNORED": Status.SKIPPED,
    "XFAIL": Status.XFAIL,
}  # fmt: skip
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST_SUMMARY = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+::.+|\S+\.py)")
_PYTEST_PROGRESS = re.compile(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_ENDING = re.compile(r"(.*?) \.\.\. (ok|FAIL|ERROR|ignored|expected failure|unexpected success|skipped\b.*|FAILED)")
_ENDINGS: Mapping[str, Status] = {
    "ok": Status.PASSED, "FAIL": Status.FAILED, "FAILED": Status.FAILED, "ERROR": Status.ERROR,
    "ignored": Status.SKIPPED, "expected failure": Status.XFAIL, "unexpected success": Status.FAILED,
}  # fmt: skip
_GO = re.compile(r"\s*--- (PASS|FAIL|SKIP): (\S+)")


def read_log(log: str, parser: str = "") -> dict[str, Status]:
    """Test -> status, from a log of pytest (-rA or -v), unittest -v, cargo test or go test -v.

    A test that is told twice has the worse of both. Of unittest both forms of a name are given, with and without the
    method behind the class: their runners changed it.

    Args:
        parser: name of a reader of the package `swebench`, or of a repository that it knows; empty for our own.

    Raises ConfigError where the package, or the reader in it, is missing.
    """
    if parser:
        return _swebench(log, parser)
    found: dict[str, Status] = {}
    before = ""
    for line in _COLOUR.sub("", log).splitlines():
        if match := _PYTEST_SUMMARY.match(line):
            # What went wrong stands behind the name of any other test; a parameter may hold the same dash.
            name = match[2] if match[1] == "PASSED" else match[2].split(" - ")[0]
            _note(found, name.strip(), _WORDS[match[1]])
        elif match := _PYTEST_PROGRESS.match(line):
            _note(found, match[1], _WORDS[match[2]])
        elif match := _GO.match(line):
            _note(found, match[2], _WORDS[match[1]])
        elif match := _ENDING.fullmatch(line.rstrip()):
            named = match[1].strip()
            # With a docstring the name stands on the line before.
            if not _UNITTEST.fullmatch(named) and _UNITTEST.fullmatch(before):
                named = before
            status = _ENDINGS.get(match[2], Status.SKIPPED)
            for name in _both_names(named.removeprefix("test ") if "::" in named else named):
                _note(found, name, status)
        before = line.strip()
    return found


def _both_names(named: str) -> tuple[str, ...]:
    match = _UNITTEST.fullmatch(named)
    if match is None:
        return (named.removeprefix("test "),) if named.startswith("test ") else (named,)
    method, place = match[1], match[2]
    short = place.removesuffix(f".{method}")
    return (f"{method} ({short})", f"{method} ({short}.{method})")


def _note(found: dict[str, Status], name: str, status: Status) -> None:
    if found.get(name, Status.PASSED) in (Status.PASSED, Status.XFAIL):
        found[name] = status


def swebench_parser(name: str) -> Callable[[str, Any], Mapping[str, str]]:
    """A reader of logs of the package `swebench`, by its own name or a repository's. Raises ConfigError."""
    try:
        from swebench.harness import log_parsers
    except ImportError:
        raise ConfigError(
            f"log_parser = {name}: needs the package swebench, which is not installed; pip install --no-deps swebench, "
            "or leave the key out for logs of pytest and unittest"
        ) from None
    for table in ("PARSER_REGISTRY", "MAP_REPO_TO_PARSER"):
        known: Mapping[str, Any] = vars(log_parsers).get(table, {})
        if name in known:
            parse: Callable[[str, Any], Mapping[str, str]] = known[name]
            return parse
    raise ConfigError(f"log_parser = {name}: the installed swebench has no such reader; give one that it has")


def _swebench(log: str, parser: str) -> dict[str, Status]:
    about = SimpleNamespace(version="", instance_id="")
    return {
        name: _WORDS.get(status.upper(), Status.ERROR) for name, status in swebench_parser(parser)(log, about).items()
    }


def read_junit(text: str) -> dict[str, Status]:
    """Test -> status, from JUnit XML: "file::name" where the file is given, else "class::name" and, for classes of
    pytest's dotted kind, the name by which pytest would run it. Raises ValueError."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("no JUnit XML: it declares a document type")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"no JUnit XML: {error}") from None
    found: dict[str, Status] = {}
    for case in root.iter("testcase"):
        status = Status.PASSED
        for tag, worse in (("skipped", Status.SKIPPED), ("failure", Status.FAILED), ("error", Status.ERROR)):
            if (element := case.find(tag)) is not None:
                status = Status.XFAIL if element.get("type") == "pytest.xfail" else worse
        name, place = case.get("name", ""), case.get("classname", "")
        if (file := case.get("file")) is not None:
            inside = place.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
            _note(found, "::".join(part for part in (file, *inside.split("."), name) if part), status)
        else:
            _note(found, _pytest_name(place, name), status)
    return found


def _pytest_name(place: str, name: str) -> str:
    """tests.test_a.TestB, test_c -> tests/test_a.py::TestB::test_c; modules are lower case, as everywhere."""
    words = place.split(".")
    modules = next((at for at, word in enumerate(words) if word[:1].isupper()), len(words))
    if modules == 0:
        return f"{place}::{name}"
    return "::".join(["/".join(words[:modules]) + ".py", *words[modules:], name])


def read_json(text: str) -> dict[str, Status]:
    """Test -> status, from {"tests": [{"name": ..., "status": ...}]}. Raises ValueError."""
    data = json.loads(text)
    rows = data.get("tests") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError('no {"tests": [{"name": ..., "status": ...}]}')
    found: dict[str, Status] = {}
    for row in rows:
        _note(found, str(row.get("name", "")), _WORDS.get(str(row.get("status", "")).upper(), Status.ERROR))
    return found
