"""What loaders of other people's tasks take, what they refuse and how they say it; no sandbox runs here."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import types
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.schema import FolderSource, HarborSource, SwebenchSource
from envs.formats.listing import default_config, find_format, make_listed, read_listing
from envs.formats.reverse import reversed_diff
from envs.formats.stream import ListedTasks
from envs.formats.validate import Judgement, judged
from envs.patch import unified_diff
from envs.reports import Status, read_json, read_junit, read_log
from envs.source import make_source
from envs.task import HiddenTests, Image, RepositoryTests, Results, Split, Task
from envs.tree import RepoTree
from envs.verifier import Verification
from infra.errors import WorkspaceError

TASKS = Path(__file__).parents[1] / "data" / "tasks"
REPOS = TASKS / "repos"
ROW: dict[str, Any] = json.loads((TASKS / "swebench.jsonl").read_text().splitlines()[0])


def swebench(tmp_path: Path, *rows: Mapping[str, Any], **keys: Any) -> tuple[list[Task], list[str]]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SwebenchSource(type="swebench", groups_per_step=0, path=str(file), **{"repos": str(REPOS), **keys})
    listing = read_listing(config)
    return [record.task for record in listing.records], [
        str(finding).removeprefix(f"{file}:") for finding in listing.findings
    ]


def hidden(task: Task) -> RepositoryTests:
    assert isinstance(task.verifier, RepositoryTests)
    return task.verifier


def test_a_row_becomes_a_task_with_its_tests() -> None:
    task = read_listing(default_config("swebench", TASKS / "swebench.jsonl", REPOS)).records[0].task
    tests = hidden(task)
    assert tests.must_pass == ("test_long (tests.test_span.TestSpan)", "test_short (tests.test_span.TestSpan)")
    assert (tests.results, tests.command) == (Results.LOG, "python3 -m unittest -v tests.test_span 2>&1")
    assert tests.patch == ROW["test_patch"] and task.reference_patch == ROW["patch"]
    assert task.image is None and "clock/span.py" in task.files
    assert "hour has sixty" not in task.statement


def test_of_smith_the_patch_makes_the_bug() -> None:
    task = read_listing(default_config("swebench", TASKS / "swebench.jsonl", REPOS)).records[1].task
    assert "words.count(word) < words.count(best)" in task.files["bag/count.py"]
    assert isinstance(task.files, RepoTree)
    sound = dict(RepoTree(path=task.files.path))
    assert "words.count(word) > words.count(best)" in sound["bag/count.py"]
    assert dict(RepoTree(path=task.files.path, patch=task.files.patch)) == dict(task.files)
    assert "+        if words.count(word) > words.count(best):" in (task.reference_patch or "")
    assert task.image == Image(name="swesmith/acme__bag.0a1b2c3d", folder="/testbed", patch=task.files.patch)


def test_images_follow_the_convention_of_each_data_set(tmp_path: Path) -> None:
    row = {**ROW, "instance_id": "Acme__clock-1"}
    tasks, findings = swebench(tmp_path, row, repos=None)
    assert findings == []
    assert tasks[0].image == Image(name="swebench/sweb.eval.x86_64.acme_1776_clock-1:latest", folder="/testbed")
    tasks, _ = swebench(tmp_path, row, repos=None, dataset="gym")
    assert tasks[0].image is not None
    assert tasks[0].image.name == "xingyaoww/sweb.eval.x86_64.acme_s_clock-1:latest"
    tasks, _ = swebench(tmp_path, row, repos=None, image="mine/{id}:2")
    assert tasks[0].image is not None and tasks[0].image.name == "mine/acme__clock-1:2"
    source = make_source("a", SwebenchSource(type="swebench", groups_per_step=1, path=str(tmp_path / "rows.jsonl")))
    assert isinstance(source, ListedTasks) and source.images_needed == ("Acme__clock-1",)


def test_pro_rows_run_their_own_script_and_reader(tmp_path: Path) -> None:
    row = {key: value for key, value in ROW.items() if key not in ("FAIL_TO_PASS", "PASS_TO_PASS", "test_cmd")}
    row |= {
        "fail_to_pass": '["tests/test_span.py | test_long"]', "pass_to_pass": "[]", "dockerhub_tag": "acme.clock-1",
        "selected_test_files_to_run": '["tests/test_span.py", "tests/a b.py"]', "interface": "minutes(text) -> int",
    }  # fmt: skip
    assert swebench(tmp_path, row)[1] == [
        "1: acme__clock-1: scripts: SWE-bench Pro runs each task by a script; set scripts to its run_scripts folder"
    ]
    scripts = tmp_path / "run_scripts" / "acme__clock-1"
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text("run\n")
    (scripts / "parser.py").write_text("parse\n")
    tasks, findings = swebench(tmp_path, row, scripts=str(tmp_path / "run_scripts"))
    assert findings == []
    tests = hidden(tasks[0])
    assert tasks[0].image == Image(name="jefzda/sweap-images:acme.clock-1", folder="/app")
    assert tests.results is Results.JSON and tests.must_pass == ("tests/test_span.py | test_long",)
    assert "run_script.sh tests/test_span.py 'tests/a b.py' >" in tests.command
    assert dict(tests.outside["/tests"]) == {"run_script.sh": "run\n", "parser.py": "parse\n"}
    assert tasks[0].statement.endswith("Interface:\nminutes(text) -> int\n")


def test_an_evaluation_script_leaves_patches_to_the_verifier(tmp_path: Path) -> None:
    row = {key: value for key, value in ROW.items() if key != "test_cmd"}
    row["eval_script"] = (
        "#!/bin/bash\ncd /testbed\ngit checkout abc tests/a.py\ngit apply -v - <<'EOF_114'\ndiff --git a/x b/x\n"
        "EOF_114\npytest -rA tests/a.py\ngit checkout abc tests/a.py\n"
    )
    tasks, _ = swebench(tmp_path, row)
    assert hidden(tasks[0]).command == "#!/bin/bash\ncd /testbed\npytest -rA tests/a.py\n"
    tasks, _ = swebench(tmp_path, row, test_command="pytest -rA {tests}")
    assert hidden(tasks[0]).command == "pytest -rA tests/test_span.py"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"instance_id": "../x"}, "instance_id = '../x': must start with a letter or digit"),
        ({"problem_statement": " "}, "problem_statement = ' ': is empty; give text"),
        ({"problem_statement": None}, "problem_statement: is missing; give text"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS = []: is empty, so nothing tells a solution from the start"),
        ({"FAIL_TO_PASS": "test_a"}, "FAIL_TO_PASS = 'test_a': is neither a list nor a list in JSON"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS = [1]: must be a list of text"),
        ({"PASS_TO_PASS": None}, "PASS_TO_PASS: is missing; give a list of tests"),
        ({"patch": "change it"}, "patch = 'change it\\n': is no unified diff"),
        ({"test_patch": "--- a/x\n+++ b/../../x\n"}, "test_patch = 'b/../../x': leads out of the repository"),
        ({"test_cmd": None}, "eval_script: the row says not how to run the tests; set test_command"),
        ({"log_parser": "parse_log_pytest"}, "log_parser = 'parse_log_pytest': needs the package swebench"),
        ({"instance_id": "acme__other-1"}, "repo = 'acme/clock': is not in '"),
    ],
)
def test_a_broken_row_is_named_by_line_field_value_and_remedy(
    tmp_path: Path, change: dict[str, Any], finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "swebench", None)
    tasks, findings = swebench(tmp_path, ROW, {**ROW, **change})
    assert len(tasks) == 1 and len(findings) == 1
    assert findings[0].startswith("2: ") and finding in findings[0]


def test_lines_that_are_no_rows_and_ids_that_come_twice(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n\n[1]\n{{oops\n{json.dumps(ROW)}\n")
    listing = read_listing(default_config("swebench", file, REPOS))
    assert [str(finding) for finding in listing.findings] == [
        f"{file}:3: line = [1]: must be an object of fields",
        f"{file}:4: column 2 = '{{oops': is no JSON (Expecting property name enclosed in double quotes); give one "
        "object a line",
        f"{file}:5: acme__clock-1: instance_id = 'acme__clock-1': is also the id of {file}:1; give each record its own",
    ]
    with pytest.raises(ConfigError, match=r"sources\.mine\.path: 3 things are wrong with its records"):
        make_listed("mine", SwebenchSource(type="swebench", groups_per_step=1, path=str(file), repos=str(REPOS)))


def test_mimo_rows_name_image_and_folder() -> None:
    first, second, *_ = read_listing(default_config("mimo", TASKS / "mimo.jsonl")).records
    assert first.task.image == Image(name="registry.example.com/dice:1", folder="/testbed")
    assert hidden(first.task).timeout_s == 60.0 and hidden(first.task).results is Results.EXIT_CODE
    assert dict(first.task.files) == {} and second.record_id == "mail-1"


def harbor(tmp_path: Path, file: str, old: str, new: str | None) -> list[str]:
    shutil.copytree(TASKS / "harbor", tmp_path / "h", dirs_exist_ok=True)
    place = tmp_path / "h" / file
    if new is None:
        place.unlink()
    else:
        text = place.read_text()
        assert old in text
        place.write_text(text.replace(old, new))
    config = HarborSource(type="harbor", groups_per_step=0, path=str(tmp_path / "h"))
    return [str(finding) for finding in read_listing(config).findings]


@pytest.mark.parametrize(
    ("file", "old", "new", "finding"),
    [
        ("add-tax/tests/test.sh", "", None, "tests/test.sh: is missing"),
        ("add-tax/environment/Dockerfile", "COPY", "RUN true\nCOPY", "Dockerfile has RUN, which needs building"),
        ("add-tax/environment/Dockerfile", "./", "/etc/", "copies to /etc/till.py, outside of /app"),
        (
            "add-tax/environment/Dockerfile",
            "till.py ./",
            "../x ./",
            "Dockerfile = '../x': is copied but not there",
        ),
        ("add-tax/task.toml", "timeout_sec = 60.0", "timeout_sec = -1", "timeout_sec = -1: must be a number above 0"),
        ("add-tax/task.toml", "[agent]", 'env = {K = "${K}"}\n[agent]', "env.K = '${K}': takes a value from the host"),
        ("add-tax/task.toml", "[agent]", "[agent", "task.toml: is no TOML"),
        ("count-lines/task.yaml", "pytest", "swebench", "parser_name = 'swebench': is not known here"),
    ],
)
def test_a_broken_harbor_task_is_named(tmp_path: Path, file: str, old: str, new: str | None, finding: str) -> None:
    findings = harbor(tmp_path, file, old, new)
    assert len(findings) == 1 and finding in findings[0]


def test_what_a_harbor_task_asks_for_goes_to_its_container(tmp_path: Path) -> None:
    new = 'docker_image = "acme/tax:1"\ncpus'
    assert harbor(tmp_path, "add-tax/task.toml", "cpus", new) == []
    config = HarborSource(type="harbor", groups_per_step=0, path=str(tmp_path / "h"))
    record = read_listing(config).records[0]
    assert record.task.image == Image(name="acme/tax:1", folder="/app", memory_mib=512, cpus=1.0)
    assert list(record.task.files) == ["till.py"] and record.solution is not None


def folder(tmp_path: Path, text: str) -> list[str]:
    shutil.copytree(TASKS / "folder" / "slug", tmp_path / "f" / "slug", dirs_exist_ok=True)
    (tmp_path / "f" / "slug" / "task.toml").write_text(text)
    config = FolderSource(type="folder", groups_per_step=0, path=str(tmp_path / "f"))
    return [str(finding) for finding in read_listing(config).findings]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("labels = {}", "tests: field required"),
        ("[tests]\ncommand = 'true'\nresult = 'log'", "tests.result = 'log': extra inputs are not permitted"),
        ("[tests]\nmodules = ['a']\ncommand = 'true'", "tests.command = 'true': has no effect beside modules"),
        ("[tests]", "tests.command: is missing; give a command"),
        ("[tests]\ncommand = 'true'\nresults = 'junit'", "writes no report; let it write to $GAGAR_REPORT"),
        ("[tests]\ncommand = 'true'\nmust_pass = ['a']", "tests.must_pass = ['a']: needs a status for each test"),
        ("[tests]\ncommand = 'true'\nhidden = 'none'", "tests.hidden = 'none': is no folder"),
        ("[tests]\ncommand = 'true'\n[repository]\npath = 'x'", "repository.path = 'x': is not there"),
    ],
)
def test_a_broken_folder_is_named(tmp_path: Path, text: str, finding: str) -> None:
    findings = folder(tmp_path, text)
    assert len(findings) == 1 and finding in findings[0]
    assert findings[0].startswith(f"{tmp_path}/f/slug/task.toml: slug: ")


def test_tests_as_modules_run_apart_from_the_tested_code() -> None:
    records = {r.record_id: r.task for r in read_listing(default_config("folder", TASKS / "folder")).records}
    assert type(records["stock"].verifier) is HiddenTests
    assert records["stock"].verifier.modules == ("test_hidden", "test_visible")
    assert list(hidden(records["slug"]).files) == ["test_more.py"]


def test_formats_are_told_apart(tmp_path: Path) -> None:
    assert [find_format(TASKS / name) for name in ("swebench.jsonl", "mimo.jsonl", "harbor", "folder")] == [
        "swebench", "mimo", "harbor", "folder",
    ]  # fmt: skip
    assert find_format(TASKS / "folder" / "slug") == "folder"
    with pytest.raises(ConfigError, match="no tasks of a known format"):
        find_format(tmp_path)


def numbered(tmp_path: Path, count: int, step: int = 1, **keys: Any) -> ListedTasks:
    file = tmp_path / "many.jsonl"
    rows = [{**ROW, "instance_id": f"a-{n}", "image_name": "i"} for n in range(count)][::step]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_listed("mine", SwebenchSource(type="swebench", groups_per_step=1, path=str(file), **keys))


def test_each_task_comes_once_an_epoch_in_another_order(tmp_path: Path) -> None:
    source = numbered(tmp_path, 20, seed=3)
    tasks = [source.task(Split.TRAIN, index) for index in range(40)]
    first, second = ([task.meta["record"] for task in tasks[at : at + 20]] for at in (0, 20))
    assert sorted(first) == sorted(second) == sorted(f"a-{n}" for n in range(20)) and first != second
    assert len({task.task_id for task in tasks}) == 40
    assert tasks[25].task_id == "mine/train/3/25" and tasks[25].meta["epoch"] == "1"
    assert numbered(tmp_path, 20, seed=3).task(Split.TRAIN, 33) == tasks[33]
    assert [numbered(tmp_path, 20, seed=4).task(Split.TRAIN, n).meta["record"] for n in range(20)] != first
    with pytest.raises(ConfigError, match=r"sources\.mine\.heldout_share: no task is held out"):
        source.task(Split.HELDOUT, 0)


def test_held_out_tasks_follow_from_their_ids_alone(tmp_path: Path) -> None:
    few, many = (numbered(tmp_path, count, step, heldout_share=0.3) for count, step in ((40, 1), (80, -1)))
    held = {record.record_id for record in few.records[Split.HELDOUT]}
    assert 4 <= len(held) <= 20
    assert held <= {record.record_id for record in many.records[Split.HELDOUT]}
    assert held.isdisjoint(record.record_id for record in many.records[Split.TRAIN])
    with pytest.raises(ConfigError, match=r"heldout_path: 40 of its tasks are in path, too \(e\.g\. a-0\)"):
        numbered(tmp_path, 40, heldout_path=str(tmp_path / "many.jsonl"))


def test_a_tree_is_small_when_pickled_and_says_where_it_should_lie(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "big.txt").write_text("x" * 10**6)
    (tmp_path / "r" / "raw").write_bytes(b"\xff\x00")
    tree = RepoTree(path=str(tmp_path / "r"))
    assert tree["raw"].encode("utf-8", "surrogateescape") == b"\xff\x00" and len(tree) == 2
    assert len(pickle.dumps(tree)) < 500 and pickle.loads(pickle.dumps(tree)) == tree
    assert tree.packed() == tree.packed()
    with pytest.raises(WorkspaceError, match=r"gone cannot be read .* it must lie there on every node"):
        dict(RepoTree(path=str(tmp_path / "gone")))


PYTEST = """\
tests/test_a.py::test_one PASSED                              [ 25%]
tests/test_a.py::test_two[a - b] FAILED                       [ 50%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_dash[x - y]
FAILED tests/test_a.py::test_two[a] - assert 1 == 2
ERROR tests/test_b.py - ImportError: no
SKIPPED [1] tests/test_a.py:7: later
XFAIL tests/test_a.py::test_known - reason
"""
UNITTEST = """\
test_a (pkg.test_x.TestX.test_a) ... ok
test_b (pkg.test_x.TestX.test_b)
A docstring. ... FAIL
test_c (pkg.test_x.TestX) ... skipped 'why'
test_d (pkg.test_x.TestX) ... expected failure
test parse::number ... ok
"""


def test_logs_of_the_usual_runners() -> None:
    assert read_log(PYTEST) == {
        "tests/test_a.py::test_one": Status.PASSED,
        "tests/test_a.py::test_two[a - b]": Status.FAILED,
        "tests/test_a.py::test_dash[x - y]": Status.PASSED,
        "tests/test_a.py::test_two[a]": Status.FAILED,
        "tests/test_b.py": Status.ERROR,
        "tests/test_a.py::test_known": Status.XFAIL,
    }
    found = read_log(UNITTEST)
    assert found["test_a (pkg.test_x.TestX)"] is found["test_a (pkg.test_x.TestX.test_a)"] is Status.PASSED
    assert found["test_b (pkg.test_x.TestX)"] is Status.FAILED
    assert found["test_c (pkg.test_x.TestX)"] is Status.SKIPPED
    assert found["test_d (pkg.test_x.TestX)"] is Status.XFAIL
    assert found["parse::number"] is Status.PASSED
    assert read_log("--- FAIL: TestA (0.00s)\n    --- PASS: TestA/x (0.00s)\n") == {
        "TestA": Status.FAILED, "TestA/x": Status.PASSED,
    }  # fmt: skip


def test_a_test_that_is_told_twice_has_the_worse_of_both() -> None:
    for log in ("PASSED a.py::t\nFAILED a.py::t\n", "FAILED a.py::t\nPASSED a.py::t\n"):
        assert read_log(log) == {"a.py::t": Status.FAILED}


def test_readers_of_the_swebench_package_are_used_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("swebench", "swebench.harness", "swebench.harness.log_parsers")
    module, harness, parsers = parts = [types.ModuleType(name) for name in names]
    known = {"mine": lambda log, spec: {log: "PASSED", "b": "FAILED"}}
    monkeypatch.setattr(parsers, "PARSER_REGISTRY", known, raising=False)
    monkeypatch.setattr(harness, "log_parsers", parsers, raising=False)
    monkeypatch.setattr(module, "harness", harness, raising=False)
    for name, part in zip(names, parts, strict=True):
        monkeypatch.setitem(sys.modules, name, part)
    assert read_log("a", "mine") == {"a": Status.PASSED, "b": Status.FAILED}
    with pytest.raises(ConfigError, match="log_parser = other: the installed swebench has no such reader"):
        read_log("a", "other")


def test_reports_outside_the_repository() -> None:
    xml = (
        '<testsuites><testsuite><testcase classname="tests.test_a.TestA" name="test_x"/>'
        '<testcase classname="tests.test_a" name="test_y"><failure/></testcase>'
        '<testcase classname="tests.test_a" name="test_z"><skipped type="pytest.xfail"/></testcase>'
        '<testcase file="t/b.py" classname="t.b.C" name="test_w"><error/></testcase></testsuite></testsuites>'
    )
    assert read_junit(xml) == {
        "tests/test_a.py::TestA::test_x": Status.PASSED,
        "tests/test_a.py::test_y": Status.FAILED,
        "tests/test_a.py::test_z": Status.XFAIL,
        "t/b.py::C::test_w": Status.ERROR,
    }
    for bad in ('<!DOCTYPE a [<!ENTITY b "c">]><a/>', "<a", ""):
        with pytest.raises(ValueError, match="no JUnit XML"):
            read_junit(bad)
    assert read_json('{"tests": [{"name": "a", "status": "PASSED"}, {"name": "b", "status": "odd"}]}') == {
        "a": Status.PASSED, "b": Status.ERROR,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no "):
        read_json("[]")


def test_a_reversed_patch_is_the_patch_back() -> None:
    before = {"a.py": "one\ntwo\nthree\n", "gone.py": "x\n", "end": "no newline"}
    after = {"a.py": "one\n2\nthree\nfour\n", "new.py": "-- y\n", "end": "none"}
    there, back = unified_diff(before, after), unified_diff(after, before)
    turned = reversed_diff(there)
    assert reversed_diff(turned) == there
    assert Counter(turned.splitlines()) == Counter(back.splitlines())


def test_one_failure_among_passes_is_flaky() -> None:
    passed, failed = (Verification(passed=p, reward=float(p), log=str(p)) for p in (True, False))
    assert judged([failed, failed], [passed, failed]) == (Judgement.FLAKY, "False")
    assert judged([failed, passed], []) == (Judgement.FLAKY, "False")
    assert judged([passed], [passed]) == (Judgement.START_PASSES, "True")
    assert judged([failed], [failed]) == (Judgement.REFERENCE_FAILS, "False")
    assert judged([failed], []) == (Judgement.UNPROVED, "")
    assert judged([failed], [passed]) == (Judgement.SOUND, "")
