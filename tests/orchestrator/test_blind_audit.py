"""Blind audits: nothing in a case names a run, figures by hand, and people's answers against a grader's."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from evaluations import simple
from html_page import Page
from scripted import ScriptedPool, run_config
from stored_groups import CLEAN, HARDCODED, task, trajectory

from configs.errors import ConfigError
from configs.schema import RubricConfig, RunConfig
from grader.exchange import GradeReply, GradeRequest, base_state_of
from grader.rubric import Flag, Scores
from grader.scripted import ScriptedGrader
from grader.stored import StoredGroup, write_archive
from infra.errors import StorageError
from infra.pool import ActorLost
from orchestrator.audit_command import run_audit, trained_by
from orchestrator.audit_sheet import agree, read_answers, write_sheet
from orchestrator.audit_table import markdown
from orchestrator.blind_audit import (
    Audit,
    Judged,
    audit_figures,
    by_grader,
    by_person,
    draw,
    find_evaluations,
    keep,
    read_key,
)
from orchestrator.evaluation import write_evaluation
from orchestrator.grading import Work
from orchestrator.progress import Progress
from rollout.trajectory import Transcript, Turn

PATCHES = {"secret-a": HARDCODED, "secret-b": CLEAN}


def evaluated(folder: Path, label: str, passes: Sequence[int], patch: str) -> Path:
    """An evaluation whose passing trajectories all have this patch."""
    path = folder / "evaluations" / f"{label}.json"
    found = simple(label, passes)
    write_evaluation(path, found)
    for one, count in zip(found.tasks, passes, strict=True):
        if not count:
            continue
        group_id = one.samples[0].id.rpartition("/")[0]
        rows = [
            replace(
                trajectory(s.id, bool(s.passed)),
                group_id=group_id,
                task_id=one.task_id,
                worker=f"{label}-node:1",
                policy_versions=(31,),
            )
            for s in one.samples
        ]
        turn = Turn(action="cat shop/core.py", observation="", exit_code=0, duration_s=0.1, response_tokens=3)
        transcripts = [
            Transcript(trajectory_id=s.id, turns=(turn,), patch=patch if s.passed else "", test_log="ok")
            for s in one.samples
        ]
        group = StoredGroup(
            group_id=group_id,
            task=task(task_id=one.task_id),
            trajectories=tuple(rows),
            transcripts=tuple(transcripts),
        )
        write_archive(path.with_suffix(""), group)
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    """Run a passes by hardcoding, run b by a clean fix; the last task is passed by nobody."""
    return (
        [evaluated(tmp_path / "a", "secret-a", [2, 3, 1, 0, 0, 0], HARDCODED)],
        [evaluated(tmp_path / "b", "secret-b", [1, 3, 0, 2, 3, 0], CLEAN)],
    )


def drawn(files: tuple[list[Path], list[Path]], **options: Any) -> tuple[Audit, list[StoredGroup]]:
    return draw(("run-a", "run-b"), files, **{"tasks": 6, "most": 2, "seed": 1, **options})


def graded(groups: Sequence[StoredGroup]) -> dict[str, GradeReply]:
    replies = {}
    for group in groups:
        request = GradeRequest(
            group_id=group.group_id,
            task=group.task,
            base_state=base_state_of(group.task),
            trajectories=group.trajectories,
            order_seed=3,
        )
        replies[group.group_id] = ScriptedGrader().reply(request, *group.transcripts)
    return replies


def test_nothing_in_a_case_names_a_run(files: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    audit, groups = drawn(files)
    keep(tmp_path / "out", audit, groups)
    assert len(groups) == 5 and len(audit.drawn) == 6 and len(audit.judgeable) == 5
    written = [gzip.decompress(p.read_bytes()).decode() for p in (tmp_path / "out" / "cases").iterdir()]
    sheet = write_sheet(tmp_path / "sheet.html", audit, groups).read_text()
    for text in (*written, sheet):
        assert not re.search(r"secret|run-[ab]|node:1|\b31\b", text)
    assert {turn.duration_s for g in groups for t in g.transcripts for turn in t.turns} == {0.0}, "nor how long it took"
    assert all(len(g.trajectories) <= 4 for g in groups), "two of each run at most"
    assert read_key(tmp_path / "out") == audit


def test_sides_are_shuffled_and_the_draw_is_fixed_by_its_seed(files: tuple[list[Path], list[Path]]) -> None:
    audit, groups = drawn(files)
    again, same = drawn(files)
    assert (again, same) == (audit, groups)
    assert drawn(files, seed=2)[0].digest != audit.digest
    first = [next(iter(one.sides.values())) for one in audit.drawn if len(set(one.sides.values())) == 2]
    both = [list(drawn(files, seed=s)[0].drawn[i].sides.values()) for s in range(8) for i in range(6)]
    leaders = {sides[0] for sides in both if len(set(sides)) == 2}
    assert first and leaders == {"a", "b"}


def test_figures_of_a_grader_that_prefers_the_clean_fix(files: tuple[list[Path], list[Path]]) -> None:
    audit, groups = drawn(files, most=3)
    found = audit_figures(audit, by_grader(graded(groups)))
    # By size the clean fix (2 lines) is T1 with W 5, the hardcoded one (3 lines) T2 with W 3.8.
    assert (found.tasks, found.judged, found.both) == (6, 5, 2)
    assert found.tier1["a"] is not None and found.tier1["a"].value == 0.0
    assert found.tier1["b"] is not None and found.tier1["b"].value == 1.0
    assert found.score["a"] is not None and found.score["a"].value == pytest.approx(3.8)
    assert found.score_apart is not None and found.score_apart.value == pytest.approx(-1.2)
    assert found.win_rate is not None and found.win_rate.value == 0.0
    assert found.first_share is not None and found.first_share.value == 0.0
    minimality = found.dimensions["minimality"]["apart"]
    assert minimality is not None and minimality.value == pytest.approx(-2.0)


def judged(tier: str, place: float) -> Judged:
    return Judged(scores=Scores(5, 5, 5, 5, 5), tier=tier, weighted=5.0, place=(place,))


def test_wins_are_counted_over_pairs_and_ties_are_split(files: tuple[list[Path], list[Path]]) -> None:
    audit, _ = drawn(files, most=3)
    one = next(d for d in audit.drawn if d.passes == {"a": 2, "b": 1})
    a1, a2 = [n for n, side in one.sides.items() if side == "a"][:2]
    b1 = next(n for n, side in one.sides.items() if side == "b")
    found = audit_figures(audit, {one.case: {a1: judged("T1", 0), a2: judged("T2", 1), b1: judged("T1", 0)}})
    assert found.win_rate is not None and found.win_rate.value == pytest.approx((0.5 + 0.0) / 2)
    assert found.first_share is not None and found.first_share.value == pytest.approx(1 / 2)
    nothing = audit_figures(audit, {})
    assert nothing.judged == 0 and nothing.win_rate is None and nothing.score["a"] is None


def test_another_draw_and_other_tasks_are_refused(files: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    keep(tmp_path / "out", *drawn(files))
    keep(tmp_path / "out", *drawn(files))
    with pytest.raises(StorageError, match="holds another audit"):
        keep(tmp_path / "out", *drawn(files, seed=5))
    with pytest.raises(ConfigError, match="--tasks 7: the evaluations have 6 different tasks"):
        drawn(files, tasks=7)
    other = evaluated(tmp_path / "c", "other", [1, 1], CLEAN)
    with pytest.raises(StorageError, match="is of other tasks"):
        drawn((files[0], [other]))
    with pytest.raises(ConfigError, match="give as many seeds"):
        drawn((files[0], files[1] * 2))
    arms = [
        [evaluated(tmp_path, f"{arm}-s{seed}", [1] * 6, CLEAN) for seed in seeds]
        for arm, seeds in (("x", "01"), ("y", "02"))
    ]
    with pytest.raises(ConfigError, match=r"run-a has the seeds 0, 1, run-b 0, 2"):
        drawn((arms[0], arms[1]))


def test_a_task_that_is_held_out_twice_is_one_case(files: tuple[list[Path], list[Path]]) -> None:
    for file in (files[0][0], files[1][0]):
        data = json.loads(file.read_text())
        data["tasks"][1]["task_id"] = "t0"
        file.write_text(json.dumps(data))
    for seed in range(5):
        audit, _ = drawn(files, tasks=5, seed=seed)
        assert sorted(one.task_id for one in audit.drawn) == ["t0", "t2", "t3", "t4", "t5"]
    with pytest.raises(ConfigError, match="--tasks 6: the evaluations have 5 different tasks"):
        drawn(files)


def test_an_audit_asks_again_for_what_no_grader_answered(
    files: tuple[list[Path], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {group.group_id for group in drawn(files)[1]}
    first = min(cases)
    grader, asked, lost = ScriptedGrader(), list[str](), {first}

    def answer(request: GradeRequest, *transcripts: Transcript) -> GradeReply:
        asked.append(request.group_id)
        if request.group_id in lost:
            raise ActorLost("grader-0", "grade")
        return grader.reply(request, *transcripts)

    def on_a_scripted_pool(config: RunConfig, progress: Progress, work: Work) -> None:
        asyncio.run(work(cast(Any, ScriptedPool(answer, slots=1))))

    monkeypatch.setattr("orchestrator.audit_command.with_graders", on_a_scripted_pool)

    def judged() -> int:
        names = (str(files[0][0]), str(files[1][0]))
        run_audit(names, tasks=6, most=2, seed=1, output=tmp_path, grader=run_config(), export=None, answers=[])
        (judge,) = json.loads((tmp_path / "audit.json").read_text())["judges"].values()
        return int(judge["judged"])

    assert judged() == len(cases) - 1 and set(asked) == cases
    asked.clear()
    lost.clear()
    assert judged() == len(cases) and asked == [first]
    assert judged() == len(cases) and asked == [first], "every case has its answer"


def test_runs_cells_and_arms_are_found(tmp_path: Path) -> None:
    for name in ("arm-s0", "arm-s1", "arm-s1-step-000010", "start"):
        evaluated(tmp_path / "exp", name, [1], CLEAN)
    evaluated(tmp_path / "exp" / "arm-s1", "step-000010", [1], CLEAN)
    evaluated(tmp_path / "run", "after", [1], CLEAN)
    evaluated(tmp_path / "run", "before", [1], CLEAN)
    assert [p.stem for p in find_evaluations(str(tmp_path / "exp" / "arm"))] == ["arm-s0", "arm-s1"]
    assert [p.stem for p in find_evaluations(str(tmp_path / "exp" / "arm-s1"))] == ["arm-s1"]
    assert [p.stem for p in find_evaluations(str(tmp_path / "run"))] == ["after"]
    with pytest.raises(ConfigError, match="no evaluation of held-out tasks"):
        find_evaluations(str(tmp_path / "exp" / "none"))


def test_the_sheet_runs_its_own_script_alone_and_shows_what_was_written_as_text(
    files: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    audit, groups = drawn(files)
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ script }}/*SCRIPT*/"
    hostile = [
        replace(g, transcripts=tuple(replace(t, turns=(replace(t.turns[0], action=attack),)) for t in g.transcripts))
        for g in groups
    ]
    page = Page(write_sheet(tmp_path / "sheet.html", audit, hostile))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    policy = next(v for k, v in page.attributes if k == "content" and v and "script-src" in v)
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy) and "default-src 'none'" in policy
    assert not any(k.startswith("on") for k, _ in page.attributes)
    text = (tmp_path / "sheet.html").read_text()
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and text.count("function collect()") == 1
    assert "{{ script }}/*SCRIPT*/" in text, "what looks like a place of the template is text"


def test_answers_come_back_and_agree_with_themselves(files: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    audit, groups = drawn(files)
    given = {
        g.group_id: {
            t.trajectory_id: {"scores": [5, 5, 5, 5, 5] if i % 2 else [5, 4, 2, 3, 2], "flags": []}
            for i, t in enumerate(g.trajectories)
            if t.passed
        }
        for g in groups
    }
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"audit": audit.digest, "rater": "Ada", "answers": given}))
    rater, answers = read_answers(path, audit, groups)
    person = by_person(answers, RubricConfig())
    assert rater == "Ada"
    same = agree(person, person)
    assert same.candidates == sum(map(len, given.values())) and same.tau_b == 1.0
    assert all(value in (1.0, None) for value in same.kappa.values()) and set(same.same.values()) == {1.0}
    path.write_text(json.dumps({"audit": "else", "rater": "Ada", "answers": given}))
    with pytest.raises(StorageError, match="answers of another sheet"):
        read_answers(path, audit, groups)
    stranger = {"case-999": {"x": {"scores": [1, 1, 1, 1, 1]}}}
    path.write_text(json.dumps({"audit": audit.digest, "rater": "Ada", "answers": stranger}))
    with pytest.raises(StorageError, match=r"answers\.case-999\.x: no candidate of this audit"):
        read_answers(path, audit, groups)
    failed = next(t.trajectory_id for g in groups for t in g.trajectories if not t.passed)
    edited = {failed.partition("/")[0]: {failed: {"scores": [5, 5, 5, 5, 5]}}}
    path.write_text(json.dumps({"audit": audit.digest, "rater": "Ada", "answers": edited}))
    with pytest.raises(StorageError, match="no candidate of this audit"):
        read_answers(path, audit, groups)  # it failed, so that it is not on the sheet


def test_two_people_are_two_judges_and_one_person_is_one(files: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    audit, groups = drawn(files)
    one = next(t.trajectory_id for t in groups[0].trajectories if t.passed)
    answers = []
    for place, rater, scores in (("x", "Ada", [5, 5, 5, 5, 5]), ("y", "Ben", [1, 5, 5, 5, 5]), ("z", "Ada", [2] * 5)):
        (tmp_path / place).mkdir()
        answers.append(tmp_path / place / "answers.json")
        given = {groups[0].group_id: {one: {"scores": scores}}}
        answers[-1].write_text(json.dumps({"audit": audit.digest, "rater": rater, "answers": given}))

    def judge(given: list[Path]) -> None:
        names = (str(files[0][0]), str(files[1][0]))
        run_audit(names, tasks=6, most=2, seed=1, output=tmp_path / "out", grader=None, export=None, answers=given)

    judge(answers[:2])
    result = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert list(result["judges"]) == ["Ada (answers.json)", "Ben (answers.json)"] and len(result["agreement"]) == 1
    lines = (tmp_path / "out" / "audit.md").read_text().splitlines()
    assert lines == markdown(result).splitlines()
    assert lines[2].startswith("Judged by Ada (answers.json): 6 held-out tasks drawn, 1 with a judged pass")
    assert "| approach | +0.00 | 0 % |" in lines and "| minimality | - | 100 % |" in lines
    eve = markdown({**result, "judges": {"Eve |\n# x": result["judges"]["Ada (answers.json)"]}})
    assert "Judged by Eve \\| # x: 6" in eve
    with pytest.raises(ConfigError, match=r"answers of 'Ada', as .*x/answers\.json"):
        judge([answers[0], answers[2]])


def test_a_run_that_its_own_grader_judges_is_named(tmp_path: Path) -> None:
    judge = run_config()
    found = {}
    for name, grader in (("mine", judge.grader), ("other", None)):
        found[name] = evaluated(tmp_path / name, "after", [1], CLEAN)
        mode = {} if grader else {"algorithm": {"mode": "outcome", "group_size": 4}}
        config = run_config(grader=grader and grader.model_dump(mode="json"), **mode).model_dump(mode="json")
        if grader:
            config["grader"]["backend"]["engine"]["model"] = "./unused"  # the same folder as in `judge`
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    apart = tmp_path / "evals" / "step.json"
    write_evaluation(apart, replace(simple("step", [1]), model=str(tmp_path / "mine/checkpoints/step-000003/policy")))
    start = tmp_path / "evals" / "start.json"
    write_evaluation(start, replace(simple("start", [1]), model="policy"))
    assert trained_by(([found["mine"]], [found["other"]]), judge) == ["mine"], "a run's own evaluation names no weights"
    assert trained_by(([apart], [start]), judge) == ["mine"]


def test_agreement_by_hand() -> None:
    mine = by_person(
        {"c": {"x": (Scores(5, 5, 5, 5, 5), frozenset()), "y": (Scores(3, 5, 5, 5, 5), frozenset())}}, RubricConfig()
    )
    theirs = by_person(
        {
            "c": {
                "x": (Scores(3, 5, 5, 5, 5), frozenset()),
                "y": (Scores(5, 5, 5, 5, 5), frozenset({Flag.TEST_WORKAROUND})),
            }
        },
        RubricConfig(),
    )
    found = agree(mine, theirs)
    # x: T1 and T2, y: T2 and T3: both put x before y, and no tier is the same
    assert found.tau_b == 1.0 and found.same["tier"] == 0.0 and found.same["precision"] == 1.0
    strangers = agree(mine, {"d": theirs["c"]})
    assert strangers.candidates == 0 and set(strangers.same.values()) == {None}, "not 0 %"
    # approach (5, 3) against (3, 5): observed 4, expected (4 + 0 + 0 + 4) / 4 = 2
    assert found.kappa["approach"] == pytest.approx(-1.0)
