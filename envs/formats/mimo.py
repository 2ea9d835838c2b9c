"""Rows whose `instance_json` holds a task: image, folder, statement, test patch and test command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from configs.schema import MimoSource
from envs.formats.records import Broken, Listing, Record, checked_diff, checked_id, code_task, number_of, text_of
from envs.formats.rows import find_repository, list_rows
from envs.task import Image, RepositoryTests


def read_mimo(file: Path | str, config: MimoSource) -> Listing:
    """The tasks of a file. Raises ConfigError if it cannot be read."""
    return list_rows(file, lambda row, place: _record(row, place, config), "instance_id")


def _record(row: Mapping[str, Any], place: str, config: MimoSource) -> Record:
    about = _instance(row)
    identity = row.get("instance_id") or about.get("instance_id")
    if not identity:
        raise Broken("instance_id", None, "is missing, in the row and in instance_json; give an id")
    record_id = checked_id(str(identity), "instance_id")
    cwd = text_of(about, "cwd")
    if not PurePosixPath(cwd).is_absolute():
        raise Broken("cwd", cwd, "must be an absolute folder of the image")
    files = find_repository(
        config.repos, record_id, text_of(about, "repo", default=""), text_of(about, "base_commit", default="")
    )
    return Record(
        record_id=record_id,
        place=place,
        task=code_task(
            record_id,
            text_of(about, "problem_statement"),
            {} if files is None else files,
            RepositoryTests(
                files={},
                command=text_of(about, "test_command"),
                patch=checked_diff(text_of(about, "test_patch", default=""), "test_patch"),
                timeout_s=number_of(about, "verifier_timeout_sec", config.test_timeout_s),
            ),
            image=Image(name=text_of(about, "docker_image"), folder=cwd),
            reference_patch=checked_diff(text_of(about, "patch", default=""), "patch") or None,
            meta={"repo": text_of(about, "repo", default="")},
        ),
    )


def _instance(row: Mapping[str, Any]) -> Mapping[str, Any]:
    value = row.get("instance_json")
    if value is None:
        raise Broken("instance_json", None, "is missing; give the task as an object, or as JSON text")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise Broken("instance_json", value, f"is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise Broken("instance_json", value, "must be an object of fields")
    return value
