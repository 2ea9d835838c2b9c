"""One group as a person sees it: in the terminal and on a page of its own."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graded_run import fallback, hack, record_of, write_run
from html_page import Page
from rich.console import Console
from stored_groups import CLEAN, stored_group, task, transcript

from grader.candidates import Candidate
from grader.evidence import CheckResult
from grader.exchange import GradeReply
from grader.rubric import Flag
from grader.scripted import judge_by_size
from grader.stored import StoredGroup
from grader.verdict import CandidateVerdict
from infra.errors import StorageError
from infra.unseen import visible
from orchestrator.candidate_page import MAX_PATCH_LINES
from orchestrator.group_view import GroupView, group_view
from orchestrator.show import show_group


def citing(candidate: Candidate) -> CandidateVerdict:
    """The hard-coded patch is a test workaround, citing its patch, a turn and the log."""
    if "[1, 2]" not in candidate.transcript.patch:
        return judge_by_size(candidate)
    return CandidateVerdict(
        evidence=["shop/core.py:2", "turn:1", "log:3"],
        reasons=["only the example works", "other lists fail", "small", "none", "odd"],
        flags=[Flag.TEST_WORKAROUND],
        scores=[1, 2, 4, 4, 3],
    )


def view_of(group: StoredGroup | None = None, **options: Any) -> GroupView:
    group = group or stored_group()
    return group_view(record_of(group, **options), group)


def shown(run_dir: Path, group_id: str = "g1", width: int = 200) -> str:
    out = io.StringIO()
    show_group(run_dir, group_id, console=Console(file=out, width=width))
    return out.getvalue()


# ---- the view --------------------------------------------------------------------------------------------------------


def test_candidates_stand_best_first_with_what_the_grade_changed() -> None:
    """p = 2/3, so A = 1/3 on passes; f = 1 (T1) and .2 (T3): lambda = 2 / 1.2 = 5/3, capped at 1.5 (M4.3)."""
    view = view_of(judge=citing)
    assert [(c.trajectory_id, c.tier, c.factor) for c in view.candidates] == [
        ("g1/0.0", "T1", 1.0),
        ("g1/1.0", "T3", 0.2),
        ("g1/2.0", None, None),
    ]
    assert view.lam == pytest.approx(5 / 3) and view.capped and view.lambda_max == 1.5
    assert [c.before for c in view.candidates] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    # B = .5, .1, -2/3; its mean -1/45 is taken off.
    assert [c.after for c in view.candidates] == pytest.approx([0.5 + 1 / 45, 0.1 + 1 / 45, -2 / 3 + 1 / 45])
    worst = view.candidates[1]
    assert worst.flags == "test_workaround" and worst.label.startswith("C")
    assert [(s.name, s.value, s.reason) for s in worst.scores][:2] == [
        ("approach", 1, "only the example works"),
        ("precision", 2, "other lists fail"),
    ]
    assert view.statement == task().statement


def test_evidence_shows_what_stands_at_the_place_it_cites() -> None:
    """M2.4."""
    worst = view_of(judge=citing).candidates[1]
    patch, turn, log = worst.evidence
    assert (patch.text, patch.quote) == ("shop/core.py:2", "+     if items == [1, 2]:")
    assert (turn.text, turn.quote) == ("turn:1", "cat shop/core.py")
    assert (log.text, log.quote) == ("log:3", "OK")
    assert [line.anchor for line in worst.patch if line.cited] == [patch.anchor]
    assert [t.anchor for t in worst.turn_views if t.cited] == [turn.anchor]
    assert [line.anchor for line in worst.log if line.cited] == [log.anchor]


def test_patch_lines_stand_under_the_numbers_that_citations_use() -> None:
    best = view_of().candidates[0]
    assert [(line.number, line.kind, line.text) for line in best.patch] == [
        (None, "file", "shop/core.py"),
        (1, "context", "def total(items):"),
        (2, "context", "    result = 0"),
        (3, "context", "    for item in items:"),
        (4, "remove", "        result -= item"),
        (4, "add", "        result += item"),
        (5, "context", "    return result"),
    ]


def test_a_check_is_evidence_that_can_be_shown() -> None:
    def change(reply: GradeReply) -> GradeReply:
        assert reply.grade is not None
        label = {name: label for label, name in reply.labels.items()}["g1/1.0"]
        check = CheckResult(number=1, candidate=label, command="python3 -m unittest", exit_code=1, output="no")
        return replace(hack("1.0", "run:1")(reply), checks=(check,))

    view = view_of(change=change)
    (evidence,) = next(c for c in view.candidates if c.hack).evidence
    assert evidence.quote == "python3 -m unittest (exit 1)" and evidence.anchor == view.checks[0].anchor


def test_checks_of_one_number_are_shown_apart() -> None:
    """With grader.scope: candidate each candidate's own checks are counted from 1."""

    def change(reply: GradeReply) -> GradeReply:
        ids = {name: label for label, name in reply.labels.items()}
        passing = [ids["g1/0.0"], ids["g1/1.0"]]
        checks = tuple(
            CheckResult(number=1, candidate=c, command=f"check {c}", exit_code=0, output="") for c in passing
        )
        return replace(hack("1.0", "run:1")(reply), checks=checks)

    view = view_of(change=change)
    hacked = next(c for c in view.candidates if c.hack)
    (evidence,) = hacked.evidence
    assert len({check.anchor for check in view.checks}) == 2
    assert [check.candidate for check in view.checks if check.anchor == evidence.anchor] == [hacked.label]


def test_a_cited_line_of_a_long_patch_is_kept() -> None:
    added = "".join(f"+line {i}\n" for i in range(1, 1001))
    long = f"diff --git a/x.py b/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/x.py\n@@ -0,0 +1,1000 @@\n{added}"

    def judge(candidate: Candidate) -> CandidateVerdict:
        return replace_evidence(judge_by_size(candidate), "x.py:900" if candidate.transcript.patch == long else None)

    group = stored_group(patches={"0.0": (True, long), "1.0": (True, CLEAN), "2.0": (False, "")})
    (one,) = [c for c in view_of(group, judge=judge).candidates if c.evidence]
    numbers = [line.number for line in one.patch if line.number is not None]
    assert numbers == [*range(1, MAX_PATCH_LINES + 1), *range(897, 904)]
    assert one.evidence[0].quote == "+ line 900" and one.patch_note == "593 more lines are not shown"
    assert [line.kind for line in one.patch].count("gap") == 1


def replace_evidence(verdict: CandidateVerdict, reference: str | None) -> CandidateVerdict:
    return verdict if reference is None else verdict.model_copy(update={"evidence": [reference]})


def test_what_is_no_patch_is_shown_as_it_is() -> None:
    group = stored_group(patches={"0.0": (True, CLEAN), "1.0": (False, "GIT binary patch\nzc$@*A")})
    failing = view_of(group).candidates[1]
    assert [line.text for line in failing.patch] == ["GIT binary patch", "zc$@*A"]
    assert "shown as it is" in failing.patch_note
    assert view_of().candidates[2].patch_note == "no change"


def test_without_an_archive_the_audit_line_is_shown() -> None:
    view = group_view(record_of(stored_group(), judge=citing), None)
    assert "not archived" in view.note and view.statement == ""
    assert view.candidates[1].evidence[0].text == "shop/core.py:2"
    assert view.candidates[1].evidence[0].anchor == "" and view.candidates[1].patch == ()


def test_text_from_outside_cannot_move_a_cursor() -> None:
    assert visible("a\x1b[2Jb\u202ec\udcff\td\n") == "a\\x1b[2Jb\\u202ec\\udcff\td\n"
    assert visible("größer 漢字 \U000e0041") == "größer 漢字 \\U000e0041"
    assert visible("x" * 50, 20) == "x" * 10 + "\n[30 characters not shown]\n" + "x" * 10


# ---- the terminal ----------------------------------------------------------------------------------------------------


def test_the_terminal_shows_the_group(tmp_path: Path) -> None:
    group = stored_group()
    write_run(tmp_path, [(group, record_of(group, judge=citing))])
    text = shown(tmp_path)
    for part in (
        "trained at step 3, task minirepo/train/0/7, mode redistribute, lambda 1.667, capped at 1.5",
        "total([1, 2]) returns -3",
        "only the example works",
        "test_workaround",
        "shop/core.py:2  +     if items == [1, 2]:",
        "4 +         result += item",
        "+0.333 -> +0.522",
        "g1/2.0",
        "failed",
    ):
        assert part in text, text
    lines = text.splitlines()
    assert any("T1" in line and "T3" in line for line in lines), "side by side"
    assert not any("T1" in line and "T3" in line for line in shown(tmp_path, width=80).splitlines())


def test_fallbacks_hacks_and_hostile_text(tmp_path: Path) -> None:
    evil = "\x1b[31m[bold]x[/bold]\u202e"
    first = stored_group("g1", task=task(statement=evil))
    second = stored_group("g2")
    odd = transcript("g2/0.0", CLEAN.replace("result += item", evil))
    second = replace(second, transcripts=(odd, *second.transcripts[1:]))
    write_run(
        tmp_path,
        [(first, record_of(first, change=fallback)), (second, record_of(second, change=hack("1.0", "turn:2")))],
    )
    text = shown(tmp_path)
    assert "fallback: not_json (no JSON)" in text and '{"cand' in text
    assert "\\x1b[31m[bold]x[/bold]\\u202e" in text and "\x1b" not in text
    text = shown(tmp_path, "g2")
    assert "hack" in text and "turn:2  submit" in text
    assert "\x1b" not in text and "\\x1b[31m" in text


def test_an_unknown_group_names_those_that_are_near(tmp_path: Path) -> None:
    group = stored_group("code-000012")
    write_run(tmp_path, [(group, record_of(group))])
    with pytest.raises(StorageError, match="no group 'code-00012' has ended there; try code-000012"):
        shown(tmp_path, "code-00012")
    (tmp_path / "groups.jsonl").write_text("")
    with pytest.raises(StorageError, match=r"its groups\.jsonl is empty"):
        shown(tmp_path)
    with pytest.raises(StorageError, match="not the folder of a run"):
        shown(tmp_path / "nowhere")


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_of_a_group_links_evidence_to_the_cited_line(tmp_path: Path) -> None:
    group = stored_group()
    write_run(tmp_path / "run", [(group, record_of(group, judge=citing))])
    out = io.StringIO()
    show_group(tmp_path / "run", "g1", tmp_path / "g.html", console=Console(file=out, width=80))
    assert f"wrote {tmp_path / 'g.html'}" in out.getvalue()
    page = Page(tmp_path / "g.html")
    assert page.external() == []
    links = page.links()
    assert len(links) == 3
    assert [page.text_at(link) for link in links] == [
        "2+    if items == [1, 2]:",
        "1cat shop/core.pydef total(ite",
        "3OK",
    ]
    assert len(page.ids) == len(set(page.ids))


def test_an_unwritable_page_is_one_clear_error(tmp_path: Path) -> None:
    group = stored_group()
    write_run(tmp_path / "run", [(group, record_of(group))])
    with pytest.raises(StorageError, match="cannot be written"):
        show_group(tmp_path / "run", "g1", tmp_path / "no" / "such" / "g.html")
