"""Groups on disk: the archive of a run and the folder layout, with errors that say what to mend."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grader_parts import CLEAN, HARDCODED, request_of, transcript, turn

from grader.rubric import Tier
from grader.stored import KnownGrade, StoredGroup, archive_path, read_archive, write_archive
from grader.stored_folder import folder_name, read_folder, read_groups, write_folder
from infra.errors import StorageError
from rollout.trajectory import Status

GOOD, BAD = (5, 5, 5, 5, 5), (2, 3, 2, 4, 4)


def stored(**changes: Any) -> StoredGroup:
    """Three trajectories, the last one failing; both passing ones have labels."""
    request, transcripts = request_of([(True, CLEAN), (True, HARDCODED), (False, "")])
    fields: dict[str, Any] = {
        "group_id": "g1",
        "task": request.task,
        "trajectories": request.trajectories,
        "transcripts": tuple(transcripts),
        "labels": {
            "g1/0.0": KnownGrade(scores=GOOD),
            "g1/1.0": KnownGrade(scores=BAD, flags=frozenset({"test_workaround"})),
        },
    }
    return StoredGroup(**{**fields, **changes})


def test_an_archived_group_comes_back_as_it_was(tmp_path: Path) -> None:
    group = stored()
    path = write_archive(tmp_path / "archive", group)
    assert path == tmp_path / "archive" / "g1.json.gz"
    assert read_archive(path) == group
    assert [p.name for p in path.parent.iterdir()] == ["g1.json.gz"], "no part is left"


def test_text_that_is_no_utf8_survives(tmp_path: Path) -> None:
    odd = transcript(0, "\udcff\x00\x1b[2J", turns=(turn("echo \udc80", "\ud800\u2028"),), test_log="\udcfe")
    group = stored(transcripts=(odd, *stored().transcripts[1:]))
    assert read_archive(write_archive(tmp_path, group)) == group


def test_a_group_id_is_one_file_name() -> None:
    assert archive_path(Path("a"), "x/../y").name == "x%2F..%2Fy.json.gz"
    assert archive_path(Path("a"), "minirepo-000007").name == "minirepo-000007.json.gz"


def test_known_grades_have_a_tier_by_the_rubric() -> None:
    """M3.2."""
    assert KnownGrade(scores=GOOD).tier is Tier.T1
    assert KnownGrade(scores=(5, 5, 3, 5, 5)).tier is Tier.T2
    assert KnownGrade(scores=GOOD, flags=frozenset({"test_workaround"})).tier is Tier.T3
    with pytest.raises(ValueError, match=r"not all in 1\.\.5"):
        KnownGrade(scores=(0, 5, 5, 5, 5))
    with pytest.raises(ValueError, match="unknown flags"):
        KnownGrade(scores=GOOD, flags=frozenset({"bad"}))


def damaged(path: Path, change: Any) -> None:
    data = json.loads(gzip.decompress(path.read_bytes()))
    change(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


def test_a_damaged_archive_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file; this group was not archived"):
        read_archive(tmp_path / "none.json.gz")
    path = write_archive(tmp_path, stored())
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(StorageError, match=r"g1\.json\.gz: cannot be read"):
        read_archive(path)
    write_archive(tmp_path, stored())
    damaged(path, lambda d: d["trajectories"][0].update(status="gone"))
    with pytest.raises(StorageError, match=r"g1\.json\.gz: trajectories\.0\.status = 'gone': must be"):
        read_archive(path)
    write_archive(tmp_path, stored())
    damaged(path, lambda d: d["labels"]["g1/0.0"].update(scores=[9, 5, 5, 5, 5]))
    with pytest.raises(StorageError, match=r"scores \[9, 5, 5, 5, 5\] are not all in 1\.\.5"):
        read_archive(path)
    write_archive(tmp_path, stored(transcripts=stored().transcripts[1:]))
    with pytest.raises(StorageError, match="do not match trajectories"):
        read_archive(path)


def test_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        write_archive(tmp_path / "archive", stored())


def test_the_folder_layout_holds_what_a_grader_is_given(tmp_path: Path) -> None:
    group = stored(task=replace(stored().task, reference_patch=CLEAN))
    write_folder(tmp_path / "g", group)
    back = read_folder(tmp_path / "g")
    assert back.group_id == "g1" and back.labels == group.labels
    assert back.task.statement == group.task.statement and dict(back.task.files) == dict(group.task.files)
    assert back.task.reference_patch == CLEAN
    assert [(t.trajectory_id, t.passed, t.reward, t.turns) for t in back.trajectories] == [
        ("g1/0.0", True, 1.0, 3),
        ("g1/1.0", True, 1.0, 3),
        ("g1/2.0", False, 0.0, 3),
    ]
    for old, new in zip(group.transcripts, back.transcripts, strict=True):
        assert (new.patch, new.test_log) == (old.patch, old.test_log)
        assert [(t.action, t.observation, t.exit_code) for t in new.turns] == [
            (t.action, t.observation, t.exit_code) for t in old.turns
        ]
    with pytest.raises(StorageError, match="is not empty"):
        write_folder(tmp_path / "g", group)


def by_hand(folder: Path, **changes: Any) -> Path:
    """The smallest group folder: nothing optional is there."""
    described = {
        "group_id": "mine",
        "statement": "total() is wrong.",
        "trajectories": [{"id": "a", "passed": True}, {"id": "b", "passed": False, "status": "turn_limit"}],
        **changes,
    }
    (folder / "repo" / "shop").mkdir(parents=True)
    (folder / "repo" / "shop" / "core.py").write_text("x = 1\n")
    for name in ("a", "b"):
        (folder / "trajectories" / name).mkdir(parents=True)
        (folder / "trajectories" / name / "patch.diff").write_text(CLEAN if name == "a" else "")
    (folder / "group.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
    return folder


def test_turns_logs_labels_and_reference_are_optional(tmp_path: Path) -> None:
    group = read_folder(by_hand(tmp_path))
    assert group.labels is None and group.task.reference_patch is None
    assert [t.turns for t in group.transcripts] == [(), ()]
    assert group.task.files == {"shop/core.py": "x = 1\n"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"statement": None}, r"group\.json: statement is missing; add it"),
        ({"extra": 1}, r"group\.json: extra: unknown key; remove it"),
        (
            {"trajectories": [{"id": "a", "passed": 1}]},
            r"trajectories\.0\.passed = 1: must be a valid boolean; mend it",
        ),
        ({"trajectories": [{"id": "a", "passed": False}]}, "trajectories: none has passed"),
        ({"trajectories": [{"id": "a", "passed": True}] * 2}, "the id 'a' is given twice"),
        (
            {"trajectories": [{"id": "a", "passed": True, "status": "infra_wall"}]},
            r"status = 'infra_wall': a trajectory that was not evaluated",
        ),
        ({"labels": {"c": {"scores": [5] * 5}}}, "labels: 'c' is no trajectory; known are a, b"),
        ({"labels": {"b": {"scores": [5] * 5}}}, "labels: 'b' did not pass"),
        ({"labels": {"a": {"scores": [5] * 4}}}, r"labels\.a\.scores = \[5, 5, 5, 5\]: .*at least 5 items"),
        ({"labels": {"a": {"scores": [5, 5, 5, 5, 6]}}}, r"labels\.a\.scores\.4 = 6: must be less than or equal to 5"),
        ({"labels": {"a": {"scores": [5] * 5, "flags": ["lazy"]}}}, r"labels\.a\.flags\.0 = 'lazy': must be 'unreq"),
    ],
)
def test_a_wrong_description_is_named_with_its_remedy(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    by_hand(tmp_path, **changes)
    with pytest.raises(StorageError, match=message):
        read_folder(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    by_hand(tmp_path)
    turns = tmp_path / "trajectories" / "a" / "turns.jsonl"
    for line, message in (
        ("{", r"turns\.jsonl:2: not JSON"),
        ('{"command": "ls"}', r"turns\.jsonl:2: action is missing"),
        ('{"action": "ls", "exit_code": "0"}', r"turns\.jsonl:2: exit_code = '0' is no whole number"),
        ('{"action": "ls", "observation": 3}', r"turns\.jsonl:2: observation = 3 is no text"),
    ):
        turns.write_text('{"action": "pwd"}\n' + line + "\n")
        with pytest.raises(StorageError, match=message):
            read_folder(tmp_path)
    turns.unlink()
    (tmp_path / "trajectories" / "b" / "patch.diff").unlink()
    with pytest.raises(StorageError, match=r"b/patch\.diff: no such file; add it"):
        read_folder(tmp_path)
    (tmp_path / "group.json").write_text("{")
    with pytest.raises(StorageError, match=r"group\.json: not JSON"):
        read_folder(tmp_path)


def test_links_binaries_and_git_are_not_part_of_the_repository(tmp_path: Path) -> None:
    by_hand(tmp_path)
    (tmp_path / "repo" / ".git").mkdir()
    (tmp_path / "repo" / ".git" / "config").write_text("x")
    (tmp_path / "repo" / "logo.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "repo" / "zero").write_bytes(b"a\0b")
    (tmp_path / "repo" / "secret").symlink_to("/etc/hostname")
    (tmp_path / "repo" / "etc").symlink_to("/etc")
    assert set(read_folder(tmp_path).task.files) == {"shop/core.py"}


def test_ids_never_leave_the_folder(tmp_path: Path) -> None:
    assert folder_name("g1/0.0") == "g1%2F0.0"
    assert folder_name("..") == "%2E%2E"
    with pytest.raises(StorageError, match="outside its repository"):
        write_folder(tmp_path / "g", stored(task=replace(stored().task, files={"../x": ""})))


def test_groups_are_found_in_any_kind_of_folder(tmp_path: Path) -> None:
    by_hand(tmp_path / "many" / "one")
    by_hand(tmp_path / "many" / "two", group_id="other")
    (tmp_path / "many" / "notes.txt").write_text("no group")
    assert [g.group_id for g in read_groups(tmp_path / "many")] == ["mine", "other"]
    assert [g.group_id for g in read_groups(tmp_path / "many" / "one")] == ["mine"]
    write_archive(tmp_path / "archive", stored())
    assert read_groups(tmp_path / "archive") == [stored()]
    with pytest.raises(StorageError, match="holds no stored group"):
        read_groups(tmp_path)
    with pytest.raises(StorageError, match="cannot be read"):
        read_groups(tmp_path / "none")
    by_hand(tmp_path / "many" / "three")
    with pytest.raises(StorageError, match="group 'mine' is there twice"):
        read_groups(tmp_path / "many")


@pytest.mark.parametrize(
    "place",
    [
        "group.json",
        "reference.patch",
        "repo",
        "trajectories",
        "trajectories/a",
        "trajectories/a/patch.diff",
        "trajectories/a/turns.jsonl",
        "trajectories/a/test_log.txt",
    ],
)
def test_no_link_of_a_group_is_followed(tmp_path: Path, place: str) -> None:
    """A group from elsewhere would bring a file of this machine into a prompt and a report."""
    by_hand(tmp_path / "g")
    (tmp_path / "g" / "reference.patch").write_text("")
    kept, link = tmp_path / "kept", tmp_path / "g" / place
    if link.exists():
        link.rename(kept)
    else:
        kept.write_text("")
    link.symlink_to(kept)
    with pytest.raises(StorageError, match=f"{place}: a link, and those are not followed"):
        read_folder(tmp_path / "g")
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match="a link"):
        read_folder(tmp_path / "g")


@pytest.mark.parametrize("name", ["patch.diff", "turns.jsonl", "test_log.txt"])
def test_only_plain_files_of_some_size_are_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand(tmp_path)
    path = tmp_path / "trajectories" / "a" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)  # reading it would wait for ever
    with pytest.raises(StorageError, match=f"{name}: no plain file"):
        read_folder(tmp_path)
    path.unlink()
    monkeypatch.setattr("grader.stored_folder.MAX_FILE_BYTES", 2**20)
    path.write_bytes(b"\n" * (2**20 + 1))
    with pytest.raises(StorageError, match=f"{name}: more than 1 MiB"):
        read_folder(tmp_path)


def test_json_nested_too_deeply_is_named(tmp_path: Path) -> None:
    by_hand(tmp_path)
    deep = "[" * 100_000
    turns = tmp_path / "trajectories" / "a" / "turns.jsonl"
    turns.write_text(deep)
    with pytest.raises(StorageError, match=r"turns\.jsonl:1: not JSON"):
        read_folder(tmp_path)
    (tmp_path / "group.json").write_text(deep)
    with pytest.raises(StorageError, match=r"group\.json: not JSON"):
        read_folder(tmp_path)
    archive = tmp_path / "x.json.gz"
    archive.write_bytes(gzip.compress(deep.encode()))
    with pytest.raises(StorageError, match="cannot be read"):
        read_archive(archive)


def test_files_whose_names_are_no_text_are_left_out(tmp_path: Path) -> None:
    by_hand(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path / "repo") + b"/\xff.py")).write_text("x")
    assert set(read_folder(tmp_path).task.files) == {"shop/core.py"}


def test_an_archive_is_not_unpacked_beyond_what_a_group_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grader.stored.MAX_ARCHIVE_BYTES", 2**20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'"' + b" " * 2**20))
    with pytest.raises(StorageError, match="more than 1 MiB of text"):
        read_archive(path)


def _of_another_group(group: StoredGroup) -> dict[str, Any]:
    first, *others = group.trajectories
    return {"trajectories": (replace(first, group_id="g2"), *others)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda g: {"labels": {**g.labels, "g1/2.0": KnownGrade(scores=GOOD)}}, "labels: 'g1/2.0' did not pass"),
        (lambda g: {"labels": {"g1/9.0": KnownGrade(scores=GOOD)}}, "labels: 'g1/9.0' did not pass"),
        (lambda g: {"trajectories": (*g.trajectories, g.trajectories[0])}, "a trajectory id is given twice"),
        (lambda g: {"transcripts": (*g.transcripts, g.transcripts[0])}, "do not match"),
        (lambda g: {"trajectories": g.trajectories[:2]}, "do not match"),
        (_of_another_group, "is of group 'g2'"),
        (
            lambda g: {"trajectories": tuple(replace(t, passed=False) for t in g.trajectories), "labels": None},
            "none of its trajectories has passed",
        ),
        (
            lambda g: {"trajectories": tuple(replace(t, status=Status.INFRA_ENGINE) for t in g.trajectories)},
            "was not evaluated",
        ),
    ],
)
def test_an_archive_that_does_not_fit_together_is_refused(tmp_path: Path, changed: Any, message: str) -> None:
    group = stored()
    with pytest.raises(StorageError, match=message):
        read_archive(write_archive(tmp_path, replace(group, **changed(group))))
