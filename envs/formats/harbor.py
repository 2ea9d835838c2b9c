"""Folders of Harbor tasks, and of their predecessor Terminal-Bench."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from configs.schema import HarborSource
from envs.formats.records import (
    Broken,
    Finding,
    Listing,
    Record,
    Solution,
    checked_id,
    code_task,
    number_of,
    read_folder_files,
    text_of,
)
from envs.task import Image, RepositoryTests, Results

DEFAULT_FOLDER = "/app"
_PLAIN = ("FROM", "WORKDIR", "COPY", "CMD", "ENTRYPOINT", "LABEL", "SHELL", "EXPOSE")
"""Instructions of a Dockerfile after which the files are known without building it."""


def read_harbor(folder: Path, config: HarborSource) -> Listing:
    """The tasks of a folder: itself one, or each folder in it."""
    places = [folder] if is_harbor(folder) else sorted(path for path in _folders(folder) if is_harbor(path))
    records: list[Record] = []
    findings: list[Finding] = []
    for place in places:
        try:
            records.append(_record(place, config))
        except Broken as broken:
            findings.append(broken.at(str(place), place.name))
    return Listing(path=str(folder), records=records, findings=findings)


def is_harbor(folder: Path) -> bool:
    """Whether a folder is one task of this kind."""
    return any((folder / name).is_file() for name in ("instruction.md", "task.yaml"))


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _record(folder: Path, config: HarborSource) -> Record:
    return _terminal_bench(folder, config) if (folder / "task.yaml").is_file() else _harbor(folder, config)


def _harbor(folder: Path, config: HarborSource) -> Record:
    about = _toml(folder / "task.toml")
    environment, verifier = _table(about, "environment"), _table(about, "verifier")
    image, files = _start(folder / "environment", environment)
    tests = read_folder_files(folder / "tests")
    if "test.sh" not in tests:
        raise Broken("tests/test.sh", None, "is missing; it writes the reward to /logs/verifier/reward.txt")
    settings = _variables(verifier)
    record_id = checked_id(folder.name, "folder")
    solution = read_folder_files(folder / "solution")
    return Record(
        record_id=record_id,
        place=str(folder),
        task=code_task(
            record_id,
            _read(folder / "instruction.md"),
            files,
            RepositoryTests(
                files={},
                outside={"/tests": tests},
                command=f"{settings}bash /tests/test.sh",
                results=Results.REWARD_FILE,
                timeout_s=number_of(verifier, "timeout_sec", config.test_timeout_s),
            ),
            image=image,
            meta=_labels(about),
        ),
        solution=Solution(
            folder="/solution",
            files=solution,
            command=f"{_variables(_table(about, 'solution'))}bash /solution/solve.sh",
            timeout_s=number_of(_table(about, "agent"), "timeout_sec", config.test_timeout_s),
        )
        if "solve.sh" in solution
        else None,
    )


def _terminal_bench(folder: Path, config: HarborSource) -> Record:
    """Its tests run by run-tests.sh, and all that pytest names must pass."""
    try:
        about = yaml.safe_load(_read(folder / "task.yaml"))
    except yaml.YAMLError as error:
        raise Broken("task.yaml", None, f"is no YAML ({' '.join(str(error).split())})") from None
    if not isinstance(about, dict):
        raise Broken("task.yaml", about, "must hold fields")
    parser = text_of(about, "parser_name", default="pytest")
    if parser != "pytest":
        raise Broken("parser_name", parser, "is not known here; only pytest is")
    image, files = _start(folder, about)
    tests = {**read_folder_files(folder / "tests"), "run-tests.sh": _read(folder / "run-tests.sh")}
    record_id = checked_id(folder.name, "folder")
    solution = folder / "solution.sh"
    return Record(
        record_id=record_id,
        place=str(folder),
        task=code_task(
            record_id,
            text_of(about, "instruction"),
            files,
            RepositoryTests(
                files={},
                outside={"/tests": tests},
                command="export TEST_DIR=/tests\nbash /tests/run-tests.sh",
                results=Results.LOG,
                timeout_s=number_of(about, "max_test_timeout_sec", config.test_timeout_s),
            ),
            image=image,
            meta={"difficulty": str(about.get("difficulty", "")), "category": str(about.get("category", ""))},
        ),
        solution=Solution(
            folder="/solution",
            files={"solution.sh": _read(solution)},
            command="bash /solution/solution.sh",
            timeout_s=number_of(about, "max_agent_timeout_sec", config.test_timeout_s),
        )
        if solution.is_file()
        else None,
    )


def _start(folder: Path, environment: Mapping[str, Any]) -> tuple[Image | None, dict[str, str]]:
    """The task's image, if it names one, and its files, if its Dockerfile tells them without being built."""
    place, files, needs = _dockerfile(folder)
    image = environment.get("docker_image")
    if image is not None and (not isinstance(image, str) or not image.strip()):
        raise Broken("environment.docker_image", image, "must be the name of an image")
    if image is None and files is None:
        raise Broken(
            "environment.docker_image", None, f"is missing, and {needs}; build the image, push it and name it here"
        )
    if image is None:
        return None, files or {}
    memory = environment.get("memory_mb") or _mib(environment.get("memory"))
    return (
        Image(
            name=image,
            folder=place,
            memory_mib=None if memory is None else int(number_of({"memory_mb": memory}, "memory_mb", 1)),
            cpus=None if environment.get("cpus") is None else number_of(environment, "cpus", 1),
        ),
        files or {},
    )


def _dockerfile(folder: Path) -> tuple[str, dict[str, str] | None, str]:
    """The working folder, the files that COPY puts there or None if building it does more, and what that is."""
    place = DEFAULT_FOLDER
    files: dict[str, str] = {}
    try:
        text = (folder / "Dockerfile").read_text(encoding="utf-8")
    except OSError:
        return place, None, f"{folder}/Dockerfile is not there"
    reason = ""
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        word = word.upper()
        if not word or word.startswith("#"):
            continue
        if word == "WORKDIR":
            place = str(PurePosixPath(place if rest.strip().startswith("/") else "/") / rest.strip())
        elif word == "COPY" and not reason:
            words = shlex.split(rest)
            if len(words) != 2 or words[0].startswith("--") or any(sign in rest for sign in "*?[$"):
                reason = f"its Dockerfile has {line.strip()!r}"
            else:
                files |= _copied(folder, words[0], words[1], place)
        elif word not in _PLAIN and not reason:
            reason = f"its Dockerfile has {word}, which needs building"
    outside = [path for path in files if not path.startswith(f"{place}/")]
    if outside and not reason:
        reason = f"its Dockerfile copies to {outside[0]}, outside of {place}"
    if reason or not files:
        return place, None, reason or "its Dockerfile copies no files"
    return place, {path.removeprefix(f"{place}/"): content for path, content in files.items()}, ""


def _copied(folder: Path, source: str, target: str, place: str) -> dict[str, str]:
    """Absolute path -> content, as COPY would place it."""
    origin = (folder / source).resolve()
    if not origin.is_relative_to(folder.resolve()) or not origin.exists():
        raise Broken("environment/Dockerfile", source, "is copied but not there; give a file beside the Dockerfile")
    into = str(PurePosixPath(place) / target)
    if origin.is_file():
        name = f"{into.rstrip('/')}/{origin.name}" if target.endswith("/") or target in (".", "./") else into
        return {name: origin.read_bytes().decode("utf-8", errors="surrogateescape")}
    skipped = ("Dockerfile", ".dockerignore")
    return {f"{into}/{path}": text for path, text in read_folder_files(origin).items() if path not in skipped}


def _variables(table: Mapping[str, Any]) -> str:
    """The table's `env` as shell commands. A ${NAME} of the host is never filled in: what runs there is not trusted."""
    variables = _table(table, "env")
    lines = []
    for name, value in variables.items():
        if not isinstance(value, str) or not name.isidentifier():
            raise Broken(f"env.{name}", value, "must be text")
        if "${" in value:
            raise Broken(f"env.{name}", value, "takes a value from the host, which no sandbox gets; write a plain one")
        lines.append(f"export {name}={shlex.quote(value)}\n")
    return "".join(lines)


def _labels(about: Mapping[str, Any]) -> dict[str, str]:
    metadata = _table(about, "metadata")
    return {key: str(metadata[key]) for key in ("difficulty", "category") if key in metadata}


def _mib(text: Any) -> int | None:
    """2G, 512M -> MiB."""
    if text is None:
        return None
    number, unit = str(text)[:-1], str(text)[-1:].upper()
    if not number.isdigit() or unit not in "MG":
        raise Broken("environment.memory", text, "must be a number and M or G, e.g. 2G")
    return int(number) * (1024 if unit == "G" else 1)


def _toml(file: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(_read(file))
    except tomllib.TOMLDecodeError as error:
        raise Broken(file.name, None, f"is no TOML ({error})") from None


def _table(about: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = about.get(name, {})
    if not isinstance(value, dict):
        raise Broken(name, value, f"must be a table: [{name}]")
    return value


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Broken(file.name, None, f"cannot be read ({error})") from None
    if not text.strip():
        raise Broken(file.name, None, "is empty")
    return text
