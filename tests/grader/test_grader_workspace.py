"""The workspace of a group: what is where, and the tree that a patch leaves."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from grader_parts import CLEAN, CORE, HARDCODED, NOISY, group_of, request_of, task, transcript, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from injections import new_file, quoted

from envs.patch import unified_diff
from grader.candidates import CandidateGroup, label_group
from grader.exchange import GradeRequest
from grader.pages import Page
from grader.patched import MAX_LINES, PatchError, apply_patch, unquote
from grader.workspace import MAX_FOUND, Workspace, WorkspaceError
from rollout.trajectory import Transcript

OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)]
FIXED = CORE.replace("-=", "+=")
BASE = {"shop/core.py": CORE, "README": "A shop.\n"}


@pytest.fixture(scope="module")
def space() -> Workspace:
    return Workspace.build(group_of(OUTCOMES), False)


def label(space: Workspace, slot: int) -> str:
    return next(c.label for c in space.group.candidates if c.trajectory.trajectory_id == f"g1/{slot}.0")


def lines(page: Page) -> list[str]:
    return [str(row).rstrip() for row in page.rows]


def with_transcript(**changes: object) -> Workspace:
    """One passing candidate and one failing one; the passing one's record is changed."""
    request, transcripts = request_of([(True, CLEAN), (False, CLEAN)])
    transcripts[0] = dataclasses.replace(transcripts[0], **changes)  # type: ignore[arg-type]
    return Workspace.build(as_group(request, transcripts), False)


def as_group(request: GradeRequest, transcripts: list[Transcript]) -> CandidateGroup:
    return label_group(
        group_id=request.group_id,
        task=request.task,
        trajectories=request.trajectories,
        transcripts=transcripts,
        order_seed=request.order_seed,
    )


# --- what is where (M2.1) ---------------------------------------------------------------------------------------------


def test_the_folders(space: Workspace) -> None:
    assert lines(space.list()) == ["task.md", "repo/", "C1/", "C2/", "C3/", "C4/"]
    assert lines(space.list("repo")) == ["repo/README", "repo/shop/"]
    assert lines(space.list("/repo/shop/")) == ["repo/shop/core.py"]
    assert lines(space.list("C1")) == ["C1/summary", "C1/patch", "C1/turns/", "C1/test_log", "C1/tree/"]
    assert lines(space.list("C1/turns")) == ["C1/turns/1", "C1/turns/2", "C1/turns/3"]
    noisy = label(space, 1)
    assert lines(space.list(f"{noisy}/tree/shop")) == [f"{noisy}/tree/shop/core.py", f"{noisy}/tree/shop/extra.py"]


def test_every_listed_file_can_be_read(space: Workspace) -> None:
    waiting, files = [""], 0
    while waiting:
        for row in lines(space.list(waiting.pop())):
            if row.endswith("/"):
                waiting.append(row)
            else:
                assert space.read(row).rows
                files += 1
    assert files == 1 + 2 + 4 * (3 + 3) + (2 + 3 + 2 + 2)


def test_files_are_numbered_and_cut_to_ranges(space: Workspace) -> None:
    assert lines(space.read("repo/shop/core.py"))[:2] == ["1 def total(items):", "2     result = 0"]
    assert lines(space.read("./repo//shop/core.py", 4, 5)) == ["4         result -= item", "5     return result"]
    assert lines(space.read("repo/shop/core.py", 4)) == lines(space.read("repo/shop/core.py", 4, 99))
    assert lines(space.read("repo/shop/core.py", None, 1)) == ["1 def total(items):"]
    assert lines(space.read("task.md")) == ["total([1, 2]) returns -3 instead of 3."]


def test_a_patch_shows_the_numbers_that_citations_use(space: Workspace) -> None:
    hardcoded, clean = label(space, 2), label(space, 0)
    assert lines(space.read(f"{hardcoded}/patch"))[:4] == [
        "file shop/core.py",
        "    1   def total(items):",
        "    2 +     if items == [1, 2]:",
        "    3 +         return 3",
    ]
    page = space.read(f"{clean}/patch", brief=True)
    assert lines(page) == ["shop/core.py:4 -         result -= item", "+         result += item"]
    assert [row.reference for row in page.rows] == ["shop/core.py:4"] * 2


def test_turns_and_logs_are_numbered_as_they_are_cited(space: Workspace) -> None:
    assert lines(space.turn("C1", 1)) == ["$ cat -n shop/core.py", "exit 0", "| 1 def total(items):"]
    assert lines(space.read("C1/turns/3")) == ["$ submit", "exit none"]
    assert lines(space.read("C1/test_log")) == ["log:1 Ran 2 tests", "log:2", "log:3 OK"]
    assert lines(space.read("C1/summary"))[1] == "turn:2 sed -i '4s/-/+/' shop/core.py -> [ok]"
    turns = (turn("python3 - <<'E'\nprint(1)\nE", "a\nb\n", 1), turn("", "[error] empty message", None))
    other = with_transcript(turns=turns, test_log="")
    name = label(other, 0)
    assert lines(other.read(f"{name}/summary")) == [
        "turn:1 python3 - <<'E' [+2 lines] [exit 1] -> b",
        "turn:2  -> [error] empty message",
    ]
    assert lines(other.read(f"{name}/test_log")) == ["log:1 (empty)"]


def test_the_reference_patch_is_there_only_if_it_may_be_seen() -> None:
    """M2.3."""
    request, transcripts = request_of([(True, CLEAN), (False, CLEAN)], task=task(reference_patch=HARDCODED))
    group = as_group(request, transcripts)
    hidden, shown = Workspace.build(group, False), Workspace.build(group, True)
    assert "reference.patch" not in lines(hidden.list())
    with pytest.raises(WorkspaceError, match=r"no reference\.patch"):
        hidden.read("reference.patch")
    assert not any("return 3" in row for row in lines(hidden.search("return 3")))
    assert lines(shown.list())[-1] == "reference.patch"
    assert "    3 +         return 3" in lines(shown.read("reference.patch"))
    assert Workspace.build(group_of(OUTCOMES), True).reference is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nope", "there is no nope"),
        ("repo", "is a folder"),
        ("", "is a folder"),
        ("C1", "is a folder"),
        ("C1/turns", "is a folder"),
        ("C1/tree", "is a folder"),
        ("repo/shop", "is a folder"),
        ("repo/nope.py", r"no repo/nope\.py"),
        ("C9/patch", "there is no C9/patch"),
        ("C1/turns/0", "there is no C1/turns/0"),
        ("C1/turns/4", "turns 1 to 3"),
        ("C1/turns/x", "there is no"),
        ("C1/summary/x", "there is no"),
        ("repo/../../etc/passwd", "do not climb"),
        ("/etc/passwd", "there is no etc/passwd"),
        ("C1/tree/../../../etc/passwd", "do not climb"),
    ],
)
def test_what_cannot_be_read(space: Workspace, path: str, message: str) -> None:
    with pytest.raises(WorkspaceError, match=message):
        space.read(path)


def test_what_cannot_be_asked(space: Workspace) -> None:
    for start, end in ((0, 2), (3, 2), (9, None), (-1, None)):
        with pytest.raises(WorkspaceError, match="lines 1 to 5"):
            space.read("repo/shop/core.py", start, end)
    for path in ("task.md", "nope", "C1/patch", "repo/nope", "C1/tree/nope"):
        with pytest.raises(WorkspaceError, match="no folder"):
            space.list(path)
    with pytest.raises(WorkspaceError, match="no candidate C9; they are C1, C2, C3, C4"):
        space.turn("C9", 1)
    for pattern in ("", "  ", "a\nb"):
        with pytest.raises(WorkspaceError, match="one line"):
            space.search(pattern)
    with pytest.raises(WorkspaceError, match="there is no nope"):
        space.search("a", "nope")


# --- search and differences -------------------------------------------------------------------------------------------


def test_search_is_literal(space: Workspace) -> None:
    assert lines(space.search("result -= item", "repo")) == ["repo/shop/core.py:4         result -= item"]
    assert lines(space.search(".*", "repo")) == ["[nothing found]"]
    assert lines(space.search("A shop.")) == ["repo/README:1 A shop."]
    assert lines(space.search("[1, 2]", "task.md")) == ["task.md:1 total([1, 2]) returns -3 instead of 3."]


def test_search_leaves_trees_out_unless_they_are_named(space: Workspace) -> None:
    clean = label(space, 0)
    assert not any("/tree/" in row for row in lines(space.search("result += item")))
    found = lines(space.search("result += item", f"{clean}/tree"))
    assert found == [f"{clean}/tree/shop/core.py:4         result += item"]


def test_search_numbers_are_those_of_reading(space: Workspace) -> None:
    for row in lines(space.search("item")):
        where, _, text = row.partition(" ")
        path, _, number = where.rpartition(":")
        (read,) = lines(space.read(path, int(number), int(number)))
        assert read.endswith(text)


def test_a_search_of_a_big_repository_keeps_nobody_waiting(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside the gradings of other groups, so it makes rows only of what it found."""
    monkeypatch.setattr("grader.workspace.file_rows", lambda content: pytest.fail("a file was cut into rows"))
    for path in ("", "repo", "repo/shop/core.py", f"{label(space, 0)}/tree"):
        assert any("core.py:4 " in row for row in lines(space.search("result ", path)))


def test_search_is_bounded() -> None:
    space = with_transcript(test_log="x\n" * 500)
    found = lines(space.search("x", f"{label(space, 0)}/test_log"))
    assert len(found) == MAX_FOUND + 1
    assert found[-1] == f"[{500 - MAX_FOUND} more lines]"


def test_differences_between_candidates(space: Workspace) -> None:
    clean, noisy, failed = label(space, 0), label(space, 1), label(space, 3)
    assert lines(space.diff(clean, failed)) == ["[no difference]"]
    assert "| +UNUSED = 1" in lines(space.diff(clean, noisy))
    assert "| -UNUSED = 1" in lines(space.diff(noisy, clean))
    assert [row for row in lines(space.diff("repo", clean)) if row[:4] in ("| - ", "| + ")] == [
        "| -        result -= item",
        "| +        result += item",
    ]
    with pytest.raises(WorkspaceError, match="no candidate C7"):
        space.diff("C1", "C7")


def test_a_difference_that_would_take_hours_is_refused() -> None:
    mixed = "\n".join("x" if n % 2 else f"a{n}" for n in range(8000))
    other = "\n".join("x" if n % 2 else f"b{n}" for n in range(8000))
    request, transcripts = request_of([(True, new_file("m.txt", mixed)), (True, new_file("m.txt", other))])
    space = Workspace.build(as_group(request, transcripts), False)
    start_s = time.process_time()
    assert lines(space.diff("C1", "C2")) == ["| m.txt differs too much to be compared; read the patches"]
    assert time.process_time() - start_s < 5


# --- patched trees ----------------------------------------------------------------------------------------------------


def test_the_patched_tree(space: Workspace) -> None:
    """Failing candidates have one too (M2.3: they are context)."""
    for slot in (0, 3):
        assert space.tree(label(space, slot)) == {**BASE, "shop/core.py": FIXED}
    assert space.tree(label(space, 1)) == {**BASE, "shop/core.py": FIXED, "shop/extra.py": "UNUSED = 1\nOTHER = 2\n"}
    assert space.tree("repo") == BASE


def test_a_patch_that_does_not_fit_is_an_error() -> None:
    space = with_transcript(patch=CLEAN.replace("result = 0", "result = 1"))
    name = label(space, 0)
    for look in (
        lambda: space.read(f"{name}/tree/README"),
        lambda: space.list(f"{name}/tree"),
        lambda: space.tree(name),
    ):
        with pytest.raises(
            WorkspaceError, match=rf"line 2 of shop/core\.py is not what the patch says; read {name}/patch"
        ):
            look()
    assert space.read(f"{name}/patch").rows


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (CLEAN.replace("a/shop/core.py", "a/no.py").replace("b/shop/core.py", "b/no.py"), "does not exist"),
        (new_file("README", "x"), "exists already"),
        (CLEAN.replace("@@ -1,5 +1,5 @@", "@@ -2,5 +2,5 @@"), "line 2 of"),
        (CLEAN.replace("@@ -1,5 +1,5 @@", "@@ -99,5 +99,5 @@"), "not there"),
        (CLEAN.replace("@@ -1,5 +1,5 @@", "@@ -1,9 +1,9 @@"), "does not parse"),
        ("diff --git a/x b/x\n@@ -1 +1 @@ garbage\nzzz\n", "does not parse"),
        (new_file("big", "\n" * MAX_LINES), "more than"),
    ],
)
def test_patches_that_cannot_be_applied(patch: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        apply_patch(BASE, patch)


def test_what_is_not_text() -> None:
    binary = "diff --git a/x.bin b/x.bin\nnew file mode 100644\nindex 0..1\nGIT binary patch\nliteral 3\nKcmZQ%\n\n"
    tree = apply_patch(BASE, binary)
    assert tree == {**BASE, "x.bin": None}
    space = with_transcript(patch=binary)
    name = label(space, 0)
    with pytest.raises(WorkspaceError, match="not text"):
        space.read(f"{name}/tree/x.bin")
    assert lines(space.diff("repo", name)) == ["| x.bin is not text: not compared"]
    assert lines(space.search("x", f"{name}/tree/README")) == ["[nothing found]"]


def test_the_search_of_a_tree_passes_over_what_is_not_text() -> None:
    binary = "diff --git a/x.bin b/x.bin\nnew file mode 100644\nindex 0..1\nGIT binary patch\nliteral 3\nKcmZQ%\n\n"
    space = with_transcript(patch=binary)
    name = label(space, 0)
    assert lines(space.search("A shop", f"{name}/tree")) == [f"{name}/tree/README:1 A shop."]


@pytest.mark.parametrize("name", ["a b.py", "ä.py", 'q"uote.py', "back\\slash", "tab\there", "new\nline", "\x1b[2J"])
def test_quoted_file_names(name: str) -> None:
    assert apply_patch({}, new_file(name, "x")) == {name: "x\n"}
    assert unquote(quoted(name).strip('"')) == name or quoted(name) == name


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a.py", "d/b.txt", "c c"]), st.text(alphabet="ab\n\r\t +-@\\", max_size=30), max_size=3
    ),
    st.dictionaries(
        st.sampled_from(["a.py", "d/b.txt", "c c"]), st.text(alphabet="ab\n\r\t +-@\\", max_size=30), max_size=3
    ),
)
def test_the_tree_is_what_our_diff_and_what_git_say(before: dict[str, str], after: dict[str, str]) -> None:
    assert apply_patch(before, unified_diff(before, after)) == after


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_tree_of_a_patch_that_git_wrote(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout.decode()

    base = {"keep": "1\n2\n3\n", "gone": "x\n", "no_newline": "a", "crlf": "a\r\nb\r\n", "moved": "m\n" * 20}
    base |= {"x b/y": "1\n2\n", "x b/gone": "x\n", "y b/moved": "m b/m\n" * 20}
    git("init", "-q", ".")
    for path, content in base.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content.encode())
    git("-c", "core.autocrlf=false", "add", "-A")
    git("commit", "-qm", "base")
    (tmp_path / "keep").write_text("1\nzwei\n3\n")
    (tmp_path / "gone").unlink()
    (tmp_path / "no_newline").write_text("a\nb")
    (tmp_path / "crlf").write_bytes(b"a\r\nc\r\n")
    (tmp_path / "moved").rename(tmp_path / "ö moved")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "bytes").write_bytes(b"\0\1")
    (tmp_path / "x b/y").write_text("1\nzwei\n")
    (tmp_path / "x b/gone").unlink()
    (tmp_path / "x b/new y").write_text("1\n")
    (tmp_path / "x b/empty").touch()
    (tmp_path / "x b/ä b").mkdir()
    (tmp_path / "x b/ä b/bytes").write_bytes(b"\0\1")
    (tmp_path / "z b/z b").mkdir(parents=True)
    (tmp_path / "y b/moved").rename(tmp_path / "z b/z b/moved")
    git("add", "-A")
    wanted = {
        "keep": "1\nzwei\n3\n",
        "no_newline": "a\nb",
        "crlf": "a\r\nc\r\n",
        "ö moved": "m\n" * 20,
        "empty": "",
        "link": "/etc/passwd",
        "bytes": None,
        "x b/y": "1\nzwei\n",
        "x b/new y": "1\n",
        "x b/empty": "",
        "x b/ä b/bytes": None,
        "z b/z b/moved": "m b/m\n" * 20,
    }
    for options in (["--no-renames"], ["-M"]):
        assert apply_patch(base, git("diff", "--cached", "--binary", *options, "HEAD")) == wanted


def test_nothing_of_the_group_changes(space: Workspace) -> None:
    """The record is read only: looking at everything leaves it as it was."""
    before = repr(space.group)
    for name in space.labels:
        space.tree(name)
        space.diff("repo", name)
        space.search("result", f"{name}/tree")
    assert repr(space.group) == before
    assert transcript(0, CLEAN).patch == CLEAN


def test_a_group_of_one_keeps_its_label(space: Workspace) -> None:
    """grader.scope candidate: a workspace that holds only it."""
    name = label(space, 2)
    alone = Workspace.build(space.group.only(name), False)
    assert alone.labels == (name,)
    assert lines(alone.list()) == ["task.md", "repo/", f"{name}/"]
    with pytest.raises(WorkspaceError, match="no candidate"):
        alone.turn(label(space, 0), 1)
