"""The in-process replay says exactly what a real shell, git and unittest say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from configs.schema import ArithSource, FilesSource, MinirepoSource
from envs.minirepo.templates import KINDS
from envs.replay import TEST_COMMAND, final_files, judge, patch_of, replay
from envs.source import make_source
from envs.task import ExactAnswer, ExpertTrace, FinalState, HiddenTests, Quality, Split, Task, TaskKind

_MARK = "\x01"
_SHARE = 5
"""One trace in this many is run in the real shell."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A PATH on which python3 is this interpreter, and a git that knows who commits."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python3").symlink_to(sys.executable)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@localhost",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@localhost",
    }


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


def _read(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def _shell(commands: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[tuple[str, int]]:
    """Output and exit code of each command, in one bash."""
    script = "exec 2>&1\n" + "".join(f"{command}\nprintf '{_MARK}%d{_MARK}' $?\n" for command in commands)
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, timeout=60)
    parts = done.stdout.decode().split(_MARK)
    return [(parts[index], int(parts[index + 1])) for index in range(0, len(parts) - 1, 2)]


def _git_diff(task: Task, commands: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    before = ["git init -q", "git config core.abbrev 7", "git add -A", "git commit -q -m base"]
    outputs = _shell([*before, *commands, "git add -A", "git diff --cached"], folder, environment)
    return outputs[-1][0]


def _sample(kind: str) -> Iterator[ExpertTrace]:
    if kind == "files":
        source = make_source("files", FilesSource(type="files", groups_per_step=1, seed=3))
        tasks = [source.task(split, index) for split in Split for index in range(15)]
        share = 1
    else:
        source = make_source("code", MinirepoSource(type="minirepo", groups_per_step=1, seed=3))
        tasks = [source.task(split, index) for split in Split for index in range(len(KINDS))]
        share = _SHARE
    traces = [trace for task in tasks for trace in source.experts(task)]
    yield from traces[::share]


def _without_tests(trace: ExpertTrace) -> list[str]:
    return [action for action in trace.actions[:-1] if action != TEST_COMMAND]


@pytest.mark.parametrize("kind", ["files", "minirepo"])
def test_replay_equals_the_real_shell(kind: str, tmp_path: Path, environment: dict[str, str]) -> None:
    count = 0
    for number, trace in enumerate(_sample(kind)):
        folder = tmp_path / str(number)
        _write(folder, trace.task.files)
        commands = _without_tests(trace)
        if trace.task.kind is TaskKind.CODE:
            assert patch_of(trace.task, commands) == _git_diff(trace.task, commands, folder, environment)
            _write(tmp_path / f"{number}b", trace.task.files)
            folder = tmp_path / f"{number}b"
        assert replay(trace.task, commands) == _shell(commands, folder, environment), commands
        assert final_files(trace.task, commands) == _read(folder), commands
        count += 1
    assert count >= 100


def test_unittest_line_equals_the_real_one(tmp_path: Path, environment: dict[str, str]) -> None:
    traces = [trace for trace in _sample("minirepo") if TEST_COMMAND in trace.actions]
    lines = set()
    for number, trace in enumerate(traces[:: len(traces) // 30]):
        _write(tmp_path / str(number), trace.task.files)
        expected = replay(trace.task, trace.actions)
        assert expected == _shell(trace.actions[:-1], tmp_path / str(number), environment), trace.actions
        lines |= {
            output for (output, _), action in zip(expected, trace.actions, strict=False) if action == TEST_COMMAND
        }
    assert {"OK\n", "FAILED (failures=1)\n", "FAILED (errors=1)\n"} <= lines


def test_verdict_equals_the_real_hidden_tests(tmp_path: Path, environment: dict[str, str]) -> None:
    seen = set()
    for number, trace in enumerate(list(_sample("minirepo"))[::16]):
        assert isinstance(trace.task.verifier, HiddenTests)
        folder = tmp_path / str(number)
        _write(folder, final_files(trace.task, trace.actions))
        _write(folder, trace.task.verifier.files)
        code = _shell([trace.task.verifier.command], folder, environment)[0][1]
        assert judge(trace.task, trace.actions) == (code == 0), trace.actions
        seen.add(code)
    assert seen == {0, 1}


def test_reference_patches_apply(tmp_path: Path, environment: dict[str, str]) -> None:
    source = make_source("code", MinirepoSource(type="minirepo", groups_per_step=1, seed=4))
    for index in range(8):
        task = source.task(Split.TRAIN, index)
        folder = tmp_path / str(index)
        assert task.reference_patch is not None
        assert isinstance(task.verifier, HiddenTests)
        _write(folder, task.files)
        done = subprocess.run(["git", "apply", "-"], input=task.reference_patch.encode(), cwd=folder, env=environment)
        assert done.returncode == 0
        _write(folder, task.verifier.files)
        assert _shell([task.verifier.command], folder, environment)[0][1] == 0


def _task(files: Mapping[str, str], verifier: HiddenTests | FinalState | ExactAnswer) -> Task:
    return Task(
        task_id="t", source="s", kind=TaskKind.CODE, split=Split.TRAIN, statement="", files=files, verifier=verifier
    )


@pytest.mark.parametrize(
    "command",
    [
        "python3 x.py",
        "ls -la",
        'echo "$HOME"',
        "cat a*",
        "sed -i 's/\\(a\\)/b/' f",
        "grep -n 'a.b' f",
        "echo a; echo b",
    ],
)
def test_unknown_forms_are_refused(command: str) -> None:
    task = _task({"f": "a\n"}, FinalState(files={}))
    with pytest.raises(ValueError, match="unknown"):
        replay(task, [command])


def test_special_characters_of_sed(tmp_path: Path, environment: dict[str, str]) -> None:
    files = {"f": 'a[0].b * c ^ $x / y & "z"\nsecond\n'}
    commands = [
        "sed -i '1s/a\\[0\\]\\.b \\*/& \\& [+]/' f",
        "sed -i '1s|/|//|' f",
        "sed -i '1s#\\^ \\$x#.#' f",
        "sed -i '2s/.*/x\\n    &/' f",
        "sed -i '2a\\    if a: return {\"k\": 1}' f",
        "sed -i '1i\\# first' f",
        "sed -i '2d' f",
        "sed -i '9s/a/b/' f",
        "cat f",
        "grep -n '' missing",
        "sed -i 's/e/E/g' f",
        "cat f",
    ]
    _write(tmp_path, files)
    assert replay(_task(files, FinalState(files={})), commands) == _shell(commands, tmp_path, environment)


def test_answers_are_judged_by_the_last_message() -> None:
    source = make_source("sums", ArithSource(type="arith", groups_per_step=1))
    task = source.task(Split.TRAIN, 0)
    assert isinstance(task.verifier, ExactAnswer)
    assert judge(task, [f" {task.verifier.answer}\n"])
    assert not judge(task, [task.verifier.answer + "0"])
    assert not judge(task, [])
    assert replay(task, [task.verifier.answer]) == []


def test_right_and_wrong_are_both_sampled() -> None:
    qualities = {trace.quality for kind in ("files", "minirepo") for trace in _sample(kind)}
    assert qualities == set(Quality)
