"""Rows of SWE-bench and its relatives: SWE-bench Pro, SWE-Gym, SWE-smith."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import SwebenchSource
from envs.formats.records import Broken, Listing, Record, checked_diff, checked_id, code_task, text_of
from envs.formats.reverse import reversed_diff
from envs.formats.rows import find_repository, list_rows, names_of
from envs.protected import files_of
from envs.reports import swebench_parser
from envs.task import Image, RepositoryTests, Results

ACTIVATE = "source /opt/miniconda3/bin/activate && conda activate testbed"
"""The environment in which the images of SWE-bench, SWE-Gym and SWE-smith keep a repository's packages."""
_SMITH_COMMAND = f"{ACTIVATE}\npytest --disable-warnings --color=no --tb=no -rA {{tests}}"
_PRO_COMMAND = (
    "bash /tests/run_script.sh {tests} > /tests/stdout 2> /tests/stderr\n"
    "python3 /tests/parser.py /tests/stdout /tests/stderr $GAGAR_REPORT"
)
_HEREDOC = re.compile(r"^git apply\b.*<<\s*'?\"?(\w+)\"?'?[^\n]*\n.*?^\1\s*$\n?", re.MULTILINE | re.DOTALL)
_ABOUT_GIT = re.compile(r"^git (?:checkout|apply|status|show|diff|reset|config)\b.*\n?", re.MULTILINE)


def read_swebench(file: Path | str, config: SwebenchSource) -> Listing:
    """The tasks of a file. Raises ConfigError if it cannot be read."""
    return list_rows(file, lambda row, place: _record(row, place, config), "instance_id")


def _record(row: Mapping[str, Any], place: str, config: SwebenchSource) -> Record:
    dataset = config.dataset if config.dataset != "auto" else dataset_of(row)
    record_id = checked_id(text_of(row, "instance_id"), "instance_id")
    repo = text_of(row, "repo", default="")
    patch = checked_diff(text_of(row, "patch", default=""), "patch")
    test_patch = checked_diff(text_of(row, "test_patch", default=""), "test_patch")
    first = names_of(row, "FAIL_TO_PASS", "fail_to_pass")
    if not first:
        raise Broken("FAIL_TO_PASS", [], "is empty, so nothing tells a solution from the start; give a test")
    tests = (*first, *names_of(row, "PASS_TO_PASS", "pass_to_pass"))
    start = ""
    if dataset == "smith":
        # There the patch makes the bug, in a repository that is sound.
        if not patch:
            raise Broken("patch", None, "is missing; in SWE-smith it is what makes the bug")
        start, patch = patch, reversed_diff(patch)
    image = _image(row, record_id, dataset, config, start)
    files = find_repository(config.repos, record_id, repo, text_of(row, "base_commit", default=""), start)
    if image is None and files is None:
        raise Broken("image_name", None, "no image and no repository; give the row an image, or set repos")
    statement = text_of(row, "problem_statement")
    if config.hints and (hints := text_of(row, "hints_text", default="").strip()):
        statement = f"{statement.rstrip()}\n\n{hints}\n"
    for field in ("requirements", "interface") if dataset == "pro" else ():
        if more := text_of(row, field, default="").strip():
            statement = f"{statement.rstrip()}\n\n{field.capitalize()}:\n{more}\n"
    return Record(
        record_id=record_id,
        place=place,
        task=code_task(
            record_id,
            statement,
            {} if files is None else files,
            _tests(row, record_id, dataset, config, test_patch, tests, first),
            image=image,
            reference_patch=patch or None,
            meta={"repo": repo, "version": str(row.get("version") or ""), "dataset": dataset},
        ),
    )


def dataset_of(row: Mapping[str, Any]) -> str:
    """Which relative a row comes from, by the fields that only it has."""
    if "dockerhub_tag" in row or "selected_test_files_to_run" in row:
        return "pro"
    if str(row.get("repo", "")).startswith("swesmith/") or ("image_name" in row and "test_patch" not in row):
        return "smith"
    return "swebench"


def _image(row: Mapping[str, Any], record_id: str, dataset: str, config: SwebenchSource, start: str) -> Image | None:
    """The row's own image first, then the configured pattern, then where the data set's makers publish theirs."""
    name = next((str(row[field]) for field in ("image_name", "docker_image", "image") if row.get(field)), None)
    if name is None and config.image is not None:
        name = config.image.replace("{id}", record_id.lower())
    if name is None and dataset == "pro":
        name = f"jefzda/sweap-images:{text_of(row, 'dockerhub_tag')}"
    if name is None and dataset == "gym":
        name = f"xingyaoww/sweb.eval.x86_64.{record_id.lower().replace('__', '_s_')}:latest"
    if name is None and dataset == "swebench" and config.repos is None:
        name = f"swebench/sweb.eval.x86_64.{record_id.lower().replace('__', '_1776_')}:latest"
    if name is None:
        return None
    return Image(name=name, folder="/app" if dataset == "pro" else "/testbed", patch=start)


def _tests(
    row: Mapping[str, Any],
    record_id: str,
    dataset: str,
    config: SwebenchSource,
    test_patch: str,
    must_pass: tuple[str, ...],
    first: tuple[str, ...],
) -> RepositoryTests:
    outside: dict[str, dict[str, str]] = {}
    results = Results.LOG
    parser = text_of(row, "log_parser", default="")
    chosen = _chosen(row, dataset, test_patch, must_pass)
    command = config.test_command or next(
        (str(row[field]) for field in ("test_cmd", "test_command") if row.get(field)), None
    )
    if command is None and row.get("eval_script"):
        command = _run_only(text_of(row, "eval_script"))
    if command is None and dataset == "pro":
        outside, results, command = _pro_scripts(record_id, config), Results.JSON, _PRO_COMMAND
    if command is None and dataset == "smith":
        command = _SMITH_COMMAND
    if command is None:
        raise Broken(
            "eval_script", None, "the row says not how to run the tests; set test_command, e.g. "
            f"'{ACTIVATE.split(' && ')[0]} && conda activate testbed && pytest -rA {{tests}}'"
        )  # fmt: skip
    if parser:
        try:
            swebench_parser(parser)
        except ConfigError as error:
            raise Broken("log_parser", parser, error.message.partition(": ")[2]) from None
    return RepositoryTests(
        files={},
        command=command.replace("{tests}", " ".join(shlex.quote(name) for name in chosen)),
        timeout_s=config.test_timeout_s,
        patch=test_patch,
        outside=outside,
        results=results,
        parser=parser,
        must_pass=must_pass,
    )


def _chosen(row: Mapping[str, Any], dataset: str, test_patch: str, must_pass: tuple[str, ...]) -> list[str]:
    """What `{tests}` stands for: the files that the convention of the data set runs."""
    if dataset == "pro":
        return list(names_of(row, "selected_test_files_to_run"))
    files = sorted(path for path in files_of(test_patch) if path != "/dev/null")
    return files or sorted({name.split("::")[0] for name in must_pass if "::" in name})


def _pro_scripts(record_id: str, config: SwebenchSource) -> dict[str, dict[str, str]]:
    if config.scripts is None:
        raise Broken("scripts", None, "SWE-bench Pro runs each task by a script; set scripts to its run_scripts folder")
    folder = Path(config.scripts) / record_id
    found = {}
    for name in ("run_script.sh", "parser.py"):
        try:
            found[name] = (folder / name).read_text(encoding="utf-8")
        except OSError as error:
            raise Broken("scripts", str(folder / name), f"cannot be read ({error.strerror})") from None
    return {"/tests": found}


def _run_only(script: str) -> str:
    """An evaluation script without the lines that handle patches: the verifier does that itself, on a base of its own,
    and commits of the original repository do not exist there."""
    script = _ABOUT_GIT.sub("", _HEREDOC.sub("", script if script.endswith("\n") else f"{script}\n"))
    if not script.strip():
        raise Broken("eval_script", script, "runs nothing beside git")
    return script
