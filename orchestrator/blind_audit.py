"""A blind comparison of two runs: the same held-out tasks, a few trajectories of each run, anonymous and shuffled.

The judge is another grader than the one that the runs were trained with, or people. Nothing in a case says which run a
candidate is of: ids, weights' versions and labels of evaluations are replaced, and the key is kept apart.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from configs.schema import RubricConfig
from grader.exchange import GradeReply
from grader.rubric import Flag, Flags, Scores, Tier, counted, rank_key, tier_of, weighted_score
from grader.stored import StoredGroup, archive_path, finding, read_archive, write_archive
from infra.errors import ConfigError, StorageError
from orchestrator.evaluation import EVALUATIONS, Evaluation, read_evaluation
from orchestrator.intervals import Estimate, Grid, difference, ratio
from rollout.trajectory import Trajectory, Transcript

Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")
CASES, KEY = "cases", "key.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One task that was drawn."""

    case: str
    """Id of its case."""
    task_id: str
    sides: Mapping[str, Side]
    """Trajectory id in the case -> the run it is of."""
    origins: Mapping[str, str]
    """Trajectory id in the case -> id in the run's evaluation."""
    passes: Mapping[Side, int]
    """Passing trajectories of each run, of those that are in the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was drawn from the two runs, and the key to it."""

    names: Mapping[Side, str]
    """What the user called the runs."""
    digest: str
    """Of everything that decides the draw: answers and grades of another one do not belong to it."""
    seed: int
    drawn: Sequence[Drawn]
    """Every task that was drawn, in the order of the draw; only those with a pass have a case that can be judged."""

    @property
    def judgeable(self) -> list[Drawn]:
        """The tasks of which anything passed."""
        return [one for one in self.drawn if any(one.passes.values())]


# ---- drawing ---------------------------------------------------------------------------------------------------------


def short_name(text: str) -> str:
    """What the user called a run, for the name of a folder and the head of a column."""
    return Path(text).name.removesuffix(".json")


def find_evaluations(text: str) -> list[Path]:
    """The evaluation files that a user means: a file, that of a run's folder (`after`, else the last one), or of
    EXPERIMENT/ARM all seeds of the arm.

    Raises:
        ConfigError: there is none.
    """
    path = Path(text)
    if path.is_file():
        return [path]
    inside = sorted((path / EVALUATIONS).glob("*.json")) if path.is_dir() else []
    if after := [p for p in inside if p.stem == "after"]:
        return after
    beside = path.parent / EVALUATIONS
    if (beside / f"{path.name}.json").is_file():  # a cell: those inside are of the training's middle
        return [beside / f"{path.name}.json"]
    if inside and not (path / "experiment.yaml").exists():
        return [max(inside, key=lambda p: read_evaluation(p).step)]
    arms = sorted(p for p in beside.glob(f"{path.name}-s*.json") if p.stem.removeprefix(f"{path.name}-s").isdecimal())
    if arms:
        return arms
    raise ConfigError(
        f"{text}: no evaluation of held-out tasks; give a run that was evaluated, a cell or an arm of an experiment "
        "(runs/ablation/redistribute), or a file that `gagar eval --output` wrote"
    )


def draw(
    names: tuple[str, str], files: tuple[Sequence[Path], Sequence[Path]], *, tasks: int, most: int, seed: int
) -> tuple[Audit, list[StoredGroup]]:
    """Draw `tasks` held-out tasks, whatever became of them, and up to `most` trajectories of each run and task. A task
    that a small source gives twice is drawn once.

    Where there are several evaluations of each run (its seeds), tasks take them in turn, the same seed for both.

    Raises:
        StorageError: the evaluations are not of the same tasks, or a kept trajectory is missing or damaged.
        ConfigError: the runs have not the same seeds, or fewer tasks than are to be drawn.
    """
    pairs = _pairs(names, files)
    first: dict[str, int] = {}
    for i, task in enumerate(pairs[0][0].evaluation.tasks):
        first.setdefault(task.task_id, i)
    known = list(first.values())
    if tasks > len(known):
        raise ConfigError(
            f"--tasks {tasks}: the evaluations have {len(known)} different tasks; give at most that, or evaluate more"
        )
    rng = random.Random(f"audit/{seed}")
    drawn, groups = [], []
    for number, index in enumerate(rng.sample(known, tasks)):
        one, group = _case(f"case-{number + 1:03d}", pairs[number % len(pairs)], index, most, rng)
        drawn.append(one)
        groups += [group] if group is not None else []
    what = json.dumps([[asdict(d) for d in drawn], seed, tasks, most], sort_keys=True)
    patches = "".join(t.patch for g in groups for t in g.transcripts)
    digest = hashlib.sha256((what + patches).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Audit(names={"a": names[0], "b": names[1]}, digest=digest, seed=seed, drawn=drawn), groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One evaluation and where it lies."""

    path: Path
    evaluation: Evaluation


def _pairs(names: tuple[str, str], files: tuple[Sequence[Path], Sequence[Path]]) -> list[tuple[_Source, _Source]]:
    """The evaluations of both runs, seed by seed, all of the same tasks."""
    if len(files[0]) != len(files[1]):
        raise ConfigError(f"{names[0]} has {len(files[0])} evaluations, {names[1]} {len(files[1])}; give as many seeds")
    seeds = [", ".join(path.stem.rpartition("-s")[2] for path in side) for side in files]
    if len(files[0]) > 1 and seeds[0] != seeds[1]:
        raise ConfigError(f"{names[0]} has the seeds {seeds[0]}, {names[1]} {seeds[1]}; give arms with the same ones")
    read = [[_Source(path=path, evaluation=read_evaluation(path)) for path in side] for side in files]
    known = [t.task_id for t in read[0][0].evaluation.tasks]
    for one in (*read[0], *read[1]):
        if [t.task_id for t in one.evaluation.tasks] != known:
            raise StorageError(f"{one.path}: is of other tasks than {files[0][0]}; evaluate both runs on the same ones")
    return list(zip(*read, strict=True))


def _case(
    case: str, pair: tuple[_Source, _Source], index: int, most: int, rng: random.Random
) -> tuple[Drawn, StoredGroup | None]:
    """One task as a case; no group where nothing of it passed."""
    picked: list[tuple[Side, Trajectory, Transcript]] = []
    task = None
    for side, source in zip(SIDES, pair, strict=True):
        stored = _stored(source.path, source.evaluation, index)
        if stored is not None:
            task = stored.task
            transcripts = {t.trajectory_id: t for t in stored.transcripts}
            few = rng.sample(list(stored.trajectories), min(most, len(stored.trajectories)))
            picked += [(side, t, transcripts[t.trajectory_id]) for t in few]
    rng.shuffle(picked)
    named = [(f"{case}/{slot}.0", *one) for slot, one in enumerate(picked)]
    drawn = Drawn(
        case=case,
        task_id=pair[0].evaluation.tasks[index].task_id,
        sides={name: side for name, side, _, _ in named},
        origins={name: trajectory.trajectory_id for name, _, trajectory, _ in named},
        passes={side: sum(bool(t.passed) for _, of, t, _ in named if of == side) for side in SIDES},
    )
    if task is None or not any(drawn.passes.values()):
        return drawn, None
    return drawn, StoredGroup(
        group_id=case,
        task=task,
        trajectories=tuple(_anonymous(trajectory, name, case) for name, _, trajectory, _ in named),
        transcripts=tuple(_untimed(transcript, name) for name, _, _, transcript in named),
    )


def _stored(path: Path, evaluation: Evaluation, index: int) -> StoredGroup | None:
    """What is kept of a task; None where nothing passed."""
    if not evaluation.tasks[index].passing:
        return None
    return read_archive(archive_path(path.with_suffix(""), evaluation.tasks[index].group_id))


def _anonymous(trajectory: Trajectory, name: str, case: str) -> Trajectory:
    """Without anything that tells one run from another: not the ids, nor how long which weights took on which node."""
    return replace(
        trajectory,
        trajectory_id=name,
        group_id=case,
        policy_versions=(0,),
        payload_sha256=None,
        engine_s=0.0,
        sandbox_s=0.0,
        sandbox_start_s=0.0,
        verify_s=0.0,
        wall_s=0.0,
        worker=None,
    )


def _untimed(transcript: Transcript, name: str) -> Transcript:
    """Under its name in the case, and without how long its commands took."""
    turns = tuple(replace(turn, duration_s=0.0) for turn in transcript.turns)
    return replace(transcript, trajectory_id=name, turns=turns)


# ---- on disk ---------------------------------------------------------------------------------------------------------

_AUDIT = TypeAdapter(Audit)


def keep(folder: Path, audit: Audit, groups: Sequence[StoredGroup]) -> None:
    """Write the cases and, apart from them, the key. A folder that holds another draw is refused.

    Raises:
        StorageError: it does, or cannot be written.
    """
    path = folder / KEY
    if path.is_file():
        if (there := read_key(folder).digest) != audit.digest:
            raise StorageError(
                f"{folder}: holds another audit ({there}, not {audit.digest}): other runs, tasks, --per-run or --seed; "
                "give another --output"
            )
        return
    for group in groups:
        write_archive(folder / CASES, group)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(audit), indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space or give another --output") from e


def read_key(folder: Path) -> Audit:
    """Raises StorageError where it is missing or damaged."""
    path = folder / KEY
    try:
        return _AUDIT.validate_json(path.read_bytes())
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e})") from e
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise StorageError(f"{path}: {finding(first['loc'], first['msg'])}; remove the folder and draw again") from None


# ---- judgements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a judge says of one passing candidate."""

    scores: Scores
    tier: str
    weighted: float
    """W of M3.1."""
    place: tuple[float, ...]
    """Sorts the candidates of a case, best first; equal is a tie."""


Judgements = Mapping[str, Mapping[str, Judged]]
"""Case -> trajectory id -> what was said."""
_TIER_ORDER = {tier.value: i for i, tier in enumerate(Tier)}


def by_grader(replies: Mapping[str, GradeReply]) -> Judgements:
    """From a grader's replies by case; fallbacks judge nothing, and a hack is not a pass (M1.5)."""
    return {
        case: {
            name: Judged(
                scores=c.scores,
                tier=c.tier.value,
                weighted=c.weighted,
                place=(float(_TIER_ORDER[c.tier.value]), float(c.tie)),
            )
            for name, c in reply.grade.candidates.items()
        }
        for case, reply in replies.items()
        if reply.grade is not None
    }


def by_person(answers: Mapping[str, Mapping[str, tuple[Scores, frozenset[Flag]]]], rubric: RubricConfig) -> Judgements:
    """From scores and flags; tier and order follow by the rubric (M3)."""
    return {
        case: {
            name: Judged(
                scores=scores,
                tier=tier_of(counted(scores, rubric), Flags(flags)).value,
                weighted=weighted_score(scores, rubric),
                place=rank_key(scores, Flags(flags), rubric),
            )
            for name, (scores, flags) in given.items()
        }
        for case, given in answers.items()
    }


# ---- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFigures:
    """What one judge's answers come to; intervals are over tasks."""

    tasks: int
    judged: int
    """Tasks with a judgement."""
    both: int
    """Of these, tasks in which both runs passed."""
    score: Mapping[Side, Estimate | None]
    """Mean W of the passes."""
    score_apart: Estimate | None
    win_rate: Estimate | None
    """Of a: over pairs of a pass of a and a pass of b on one task; a tie is half a win."""
    first_share: Estimate | None
    """Of a: tasks with passes of both whose best candidate is its; split where the best are tied."""
    tier1: Mapping[Side, Estimate | None]
    """Share of the passes in tier 1."""
    tier1_apart: Estimate | None
    dimensions: Mapping[str, Mapping[str, Estimate | None]]
    """Dimension -> a, b, apart: mean score."""


def audit_figures(audit: Audit, judgements: Judgements) -> AuditFigures:
    """Every figure of an audit, a minus b where two are held against each other."""
    cases = [one for one in audit.drawn if judgements.get(one.case)]

    def of(side: Side, value: Any) -> tuple[Grid, Grid]:
        sums = np.zeros((1, max(len(cases), 1)))
        counts = np.zeros((1, max(len(cases), 1)))
        for i, one in enumerate(cases):
            mine = [value(j) for name, j in judgements[one.case].items() if one.sides.get(name) == side]
            sums[0, i], counts[0, i] = sum(mine), len(mine)
        return sums, counts

    def pair(value: Any) -> dict[str, Estimate | None]:
        a, b = of("a", value), of("b", value)
        return {"a": ratio(*a), "b": ratio(*b), "apart": difference(*a, *b)}

    wins, pairs, firsts = [], [], []
    for one in cases:
        given = judgements[one.case]
        places = {side: [j.place for name, j in given.items() if one.sides.get(name) == side] for side in SIDES}
        won = sum(1.0 if x < y else 0.5 if x == y else 0.0 for x in places["a"] for y in places["b"])
        wins.append(won)
        pairs.append(float(len(places["a"]) * len(places["b"])))
        best = min(p for side in SIDES for p in places[side])
        firsts.append(places["a"].count(best) / (places["a"].count(best) + places["b"].count(best)))
    both = np.array([[float(p > 0) for p in pairs]]) if pairs else np.zeros((1, 1))
    score, tier1 = pair(lambda j: j.weighted), pair(lambda j: float(j.tier == Tier.T1.value))
    names = Scores._fields
    return AuditFigures(
        tasks=len(audit.drawn),
        judged=len(cases),
        both=int(both.sum()),
        score={"a": score["a"], "b": score["b"]},
        score_apart=score["apart"],
        win_rate=ratio(np.array([wins]), np.array([pairs])) if pairs else None,
        first_share=ratio(np.array([firsts]) * both, both) if firsts else None,
        tier1={"a": tier1["a"], "b": tier1["b"]},
        tier1_apart=tier1["apart"],
        dimensions={name: pair(lambda j, i=i: float(j.scores[i])) for i, name in enumerate(names)},
    )
