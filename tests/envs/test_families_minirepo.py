"""Generated code-repair tasks: solvable, judged alike every time, and with experts whose quality is what they say."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
from unidiff import PatchSet

from configs.schema import MinirepoSource
from envs.minirepo.family import MinirepoTasks
from envs.minirepo.shape import Shape
from envs.minirepo.templates import KINDS, SHAPES
from envs.minirepo.wording import DIAGNOSES, FILES_LINES, NOTES, REPORTS, SCENES
from envs.replay import final_files, judge, patch_of
from envs.task import ExpertTrace, HiddenTests, Quality, Split, Task
from infra.errors import ConfigError

_SCAFFOLD = {
    "unittest",
    "TestCase",
    "TestVisible",
    "TestHidden",
    "self",
    "assertEqual",
    *(f"test_{c}" for c in "abcdef"),
}
"""Names of the test files that every task has."""
_METHODS = {name for kind in (str, list, dict) for name in dir(kind)}


def _source(seed: int = 0, kinds: tuple[str, ...] = ()) -> MinirepoTasks:
    return MinirepoTasks("code", MinirepoSource(type="minirepo", groups_per_step=1, seed=seed, kinds=kinds))


def _every_template(split: Split, times: int = 1) -> list[Task]:
    """Tasks in order of index until each template came `times` times."""
    source, tasks = _source(), []
    missing = dict.fromkeys((shape.name for shape in SHAPES[split]), times)
    for index in range(2000):
        task = source.task(split, index)
        if missing.get(task.meta["template"], 0):
            missing[task.meta["template"]] -= 1
            tasks.append(task)
        if not any(missing.values()):
            return tasks
    raise AssertionError(f"templates never drawn: {missing}")


@pytest.fixture(scope="module", params=list(Split))
def traces(request: pytest.FixtureRequest) -> list[ExpertTrace]:
    """Every scripted solution of two tasks a template."""
    source = _source()
    return [trace for task in _every_template(request.param, 2) for trace in source.experts(task)]


@pytest.mark.parametrize("split", list(Split))
def test_hidden_tests_fail_before_and_pass_with_the_reference_five_times_alike(split: Split) -> None:
    source = _source()
    for task in _every_template(split):
        clean = next(trace for trace in source.experts(task) if trace.strategy == "clean")
        assert patch_of(task, clean.actions) == task.reference_patch
        assert [judge(task, ()) for _ in range(5)] == [False] * 5
        assert [judge(task, clean.actions) for _ in range(5)] == [True] * 5


def test_a_task_depends_on_seed_split_and_index_alone() -> None:
    one, two, other = _source(), _source(), _source(seed=1)
    two.task(Split.TRAIN, 7)
    for split in Split:
        for index in (0, 1, 40, 10**9):
            assert one.task(split, index) == two.task(split, index)
            assert [t.actions for t in one.experts(one.task(split, index))] == [
                t.actions for t in two.experts(two.task(split, index))
            ]
    assert len({one.task(Split.TRAIN, index).statement for index in range(300)}) == 300
    assert one.task(Split.TRAIN, 0).files != other.task(Split.TRAIN, 0).files
    assert one.task(Split.TRAIN, 5).task_id == "code/train/0/5"


def test_experts_are_as_good_as_they_say(traces: list[ExpertTrace]) -> None:
    for trace in traces:
        passed = judge(trace.task, trace.actions)
        assert passed == (trace.quality is not Quality.WRONG), (trace.task.meta, trace.strategy, trace.actions)


def test_quality_follows_from_scores_and_flags(traces: list[ExpertTrace]) -> None:
    for trace in traces:
        if trace.quality is Quality.WRONG:
            assert (trace.scores, trace.flags, trace.evidence) == (None, frozenset(), ())
            continue
        assert trace.scores is not None
        approach, _, minimality, side_effects, _ = trace.scores
        t3 = bool(trace.flags & {"unrequested_rewrite", "test_workaround"}) or approach == 1
        if t3 or (minimality <= 2 and side_effects <= 2):
            tier = Quality.T3
        else:
            tier = Quality.T1 if min(trace.scores) >= 4 and not trace.flags else Quality.T2
        assert trace.quality is tier, trace.strategy
        assert all(1 <= score <= 5 for score in trace.scores)


def test_evidence_is_a_line_that_the_patch_adds(traces: list[ExpertTrace]) -> None:
    cited = 0
    for trace in traces:
        if trace.quality is Quality.WRONG:
            continue
        patch = PatchSet(patch_of(trace.task, trace.actions))
        added = {
            f"{file.path}:{line.target_line_no}" for file in patch for hunk in file for line in hunk if line.is_added
        }
        assert set(trace.evidence) <= added
        assert trace.scores is not None
        if trace.flags or min(trace.scores) <= 2:
            assert trace.evidence, trace.strategy
            cited += 1
    assert cited > 100


def test_every_task_offers_every_quality(traces: list[ExpertTrace]) -> None:
    qualities: dict[str, set[Quality]] = defaultdict(set)
    for trace in traces:
        qualities[trace.task.task_id].add(trace.quality)
    assert all(found == set(Quality) for found in qualities.values())


def test_most_bug_kinds_can_be_worked_around(traces: list[ExpertTrace]) -> None:
    passing: dict[str, set[str]] = defaultdict(set)
    for trace in traces:
        if trace.quality is not Quality.WRONG:
            passing[trace.task.meta["bug"]].add(trace.strategy)
    assert set(passing) == set(KINDS)
    assert len(KINDS) >= 12
    everything = {"call_sites", "clean", "clean_long", "hardcode", "hardcode_sites", "noisy", "noisy_more", "rewrite"}
    assert sum(everything <= strategies for strategies in passing.values()) >= len(KINDS) / 2
    assert sum("swallow" in strategies for strategies in passing.values()) >= 3


def test_commands_are_single_lines_that_do_not_name_the_strategy(traces: list[ExpertTrace]) -> None:
    telling = re.compile("|".join(sorted({trace.strategy for trace in traces})))
    for trace in traces:
        assert trace.actions[-1] == "submit"
        assert all("\n" not in action and not telling.search(action) for action in trace.actions)


def test_sources_are_small_enough_for_a_small_model() -> None:
    for split in Split:
        for task in _every_template(split):
            helper = _helper(task)
            assert len(task.files) == 4
            assert task.files[helper].count("\n") <= 14
            assert all(
                text.count("\n") <= 8 for path, text in task.files.items() if path not in (helper, "test_visible.py")
            )
            assert len(task.statement) <= 400
            assert helper in task.statement
            assert "test_hidden" not in task.statement


def _helper(task: Task) -> str:
    assert task.reference_patch is not None
    return PatchSet(task.reference_patch)[0].path


def _identifiers(task: Task) -> Iterator[str]:
    assert isinstance(task.verifier, HiddenTests)
    for path, text in [*task.files.items(), *task.verifier.files.items()]:
        if not path.startswith("test_"):
            yield from re.findall(r"[a-z]+", path.removesuffix(".py"))
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.Attribute(attr=name) | ast.alias(name=name):
                    yield from name.split(".")
                case ast.ImportFrom(module=str(name)):
                    yield from name.split(".")
                case ast.Constant(value=str(name)):
                    yield from re.findall(r"[a-z]\w*", name.lower())


def test_splits_share_no_identifier() -> None:
    names = {split: {name for task in _every_template(split, 4) for name in _identifiers(task)} for split in Split}
    shared = names[Split.TRAIN] & names[Split.HELDOUT]
    assert shared <= _SCAFFOLD | _METHODS | set(dir(builtins))
    assert all(len(found - shared) > 500 for found in names.values())


def _skeleton(shape: Shape) -> str:
    """The function with placeholders numbered in order of appearance."""
    text = "\n".join((shape.head, *shape.body))
    seen = list(dict.fromkeys(re.findall(r"\$[a-z]", text)))
    return re.sub(r"\$[a-z]", lambda match: f"${seen.index(match.group())}", text)


def test_no_package_or_module_has_a_name_of_the_standard_library() -> None:
    """Task 305 had a package `time`, which Python would never have imported."""
    tasks = MinirepoTasks("mine", MinirepoSource(type="minirepo", groups_per_step=1))
    tops = {path.split("/")[0].removesuffix(".py") for path in tasks.task(Split.TRAIN, 305).files}
    assert not tops & sys.stdlib_module_names


def test_splits_share_no_template() -> None:
    train, heldout = SHAPES[Split.TRAIN], SHAPES[Split.HELDOUT]
    assert not {shape.name for shape in train} & {shape.name for shape in heldout}
    assert not {_skeleton(shape) for shape in train} & {_skeleton(shape) for shape in heldout}
    assert not {text for shape in train for text in shape.symptoms} & {
        text for shape in heldout for text in shape.symptoms
    }
    for texts in (SCENES, REPORTS, DIAGNOSES, FILES_LINES, NOTES):
        assert not set(texts[Split.TRAIN]) & set(texts[Split.HELDOUT])
    for shapes in (train, heldout):
        assert {shape.kind for shape in shapes} == set(KINDS)
        assert len({shape.name for shape in shapes}) == len(shapes)


def test_kinds_can_be_chosen() -> None:
    source = _source(kinds=("boundary", "none_guard"))
    assert {source.task(Split.TRAIN, index).meta["bug"] for index in range(2)} == {"boundary", "none_guard"}
    everything = _source()
    assert {everything.task(Split.HELDOUT, index).meta["bug"] for index in range(len(KINDS))} == set(KINDS)


def test_unknown_kind_and_negative_index_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sources\.code\.kinds.*'typo'.*boundary"):
        _source(kinds=("typo",))
    with pytest.raises(ValueError, match="negative"):
        _source().task(Split.TRAIN, -1)


def test_the_visible_tests_show_the_bug_and_cannot_be_edited_away() -> None:
    source = _source()
    for task in _every_template(Split.TRAIN)[:10]:
        assert isinstance(task.verifier, HiddenTests)
        assert task.verifier.files["test_visible.py"] == task.files["test_visible.py"]
        edit = next(trace for trace in source.experts(task) if trace.strategy == "test_edit")
        assert final_files(task, edit.actions)["test_visible.py"] != task.files["test_visible.py"]
        assert not judge(task, edit.actions)
