"""Supervised examples for a grader checkpoint, from scripted solutions whose quality is known by construction.

The prompt comes from the same code as in a run, and every target passes the same validation as a model's verdict.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from configs.schema import GraderConfig, RubricConfig
from envs.replay import final_files, patch_of, replay, run_tests
from envs.task import ExpertSource, ExpertTrace, HiddenTests, Quality, Split, Task
from grader.candidates import Candidate, CandidateGroup, label_group
from grader.evidence import nearest_changed
from grader.prompt import GraderPrompt, build_prompt
from grader.rubric import Flag, Flags, Scores, Tier, is_negative, rank_key, tier_of
from grader.verdict import (
    CandidateVerdict,
    FallbackReason,
    Grade,
    InvalidVerdict,
    compose_verdict,
    parse_verdict,
    render_verdict,
    validate,
)
from rollout.chat import render_observation
from rollout.trajectory import Status, Trajectory, Transcript, Turn

_TASK_INDICES = 1_000_000
_OBSERVATION_CHARS = 1600
_MAX_EVIDENCE = 3
_TEST = re.compile(r"^\s*def test_", re.MULTILINE)
_LOOKS = ("grep -n ", "cat ")
_DETOUR_SHARE, _PASSING_LIMIT_SHARE, _FAILING_LIMIT_SHARE = 0.25, 0.05, 0.2
_WEIGHTS = {Quality.T1: 4, Quality.T2: 3, Quality.T3: 3}
"""How often a passing candidate is of each quality; repetitions occur, as they do in real groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateLabel:
    """What is known about one passing candidate."""

    strategy: str
    scores: Scores
    flags: Flags
    evidence: tuple[str, ...]

    @property
    def tier(self) -> Tier:
        """M3.2."""
        return tier_of(self.scores, self.flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderExample:
    """One group: what the model is asked, and the right answer."""

    group: CandidateGroup
    prompt: GraderPrompt
    target: str
    """The verdict as the model should write it."""
    labels: Mapping[str, CandidateLabel]
    """Label C1..Cn -> what is known, passing candidates only."""
    ranking: tuple[tuple[str, ...], ...]
    """Tied groups, best first."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation, target included, as chat templates want it."""
        system = [] if self.prompt.system is None else [{"role": "system", "content": self.prompt.system}]
        user = {"role": "user", "content": self.prompt.user}
        return [*system, user, {"role": "assistant", "content": self.target}]


def grader_examples(
    source: ExpertSource,
    split: Split,
    count: int,
    seed: int,
    config: GraderConfig,
    rubric: RubricConfig | None = None,
    *,
    group_size: tuple[int, int] = (4, 8),
) -> Iterator[GraderExample]:
    """`count` mixed groups of a code source; the same arguments give the same examples.

    Every group has between 1 and n - 1 passing candidates. Identical patches get identical scores, so they tie.

    Raises:
        ValueError: the source's tasks are not verified by hidden tests.
    """
    for number in range(count):
        yield grader_example(source, split, number, seed, config, rubric, group_size=group_size)


def grader_example(
    source: ExpertSource,
    split: Split,
    number: int,
    seed: int,
    config: GraderConfig,
    rubric: RubricConfig | None = None,
    *,
    group_size: tuple[int, int] = (4, 8),
) -> GraderExample:
    """Example `number` >= 0 of `grader_examples`, which depends on no other.

    Raises:
        ValueError: as `grader_examples`.
    """
    rng = random.Random(f"grader/{source.name}/{split.value}/{seed}/{number}")
    while (example := _example(source, split, rng, config, rubric or RubricConfig(), group_size)) is None:
        pass
    return example


def _example(
    source: ExpertSource,
    split: Split,
    rng: random.Random,
    config: GraderConfig,
    rubric: RubricConfig,
    group_size: tuple[int, int],
) -> GraderExample | None:
    """One group, or None if this task has no passing or no failing solution."""
    task = source.task(split, rng.randrange(_TASK_INDICES))
    solved = [_Solved(trace) for trace in source.experts(task)]
    passing, failing = [s for s in solved if s.passed], [s for s in solved if not s.passed]
    if not passing or not failing:
        return None
    size = rng.randint(*group_size)
    good = rng.randint(1, size - 1)
    chosen = [_draw(passing, rng) for _ in range(good)] + [rng.choice(failing) for _ in range(size - good)]
    rng.shuffle(chosen)
    order_seed = rng.getrandbits(31)
    group_id = f"example-{order_seed}"
    rows = [s.record(f"{group_id}/{slot}.0", group_id, rng) for slot, s in enumerate(chosen)]
    group = label_group(
        group_id=group_id,
        task=task,
        trajectories=[trajectory for trajectory, _ in rows],
        transcripts=[transcript for _, transcript in rows],
        order_seed=order_seed,
    )
    by_id = {trajectory.trajectory_id: s for (trajectory, _), s in zip(rows, chosen, strict=True)}
    prompt = build_prompt(group, style=config.style, prompt_chars=config.prompt_chars)
    labels = _labels(group, {c.label: by_id[c.trajectory.trajectory_id] for c in group.passing}, prompt, rubric)
    judged = {
        name: CandidateVerdict(
            evidence=list(label.evidence),
            flags=[flag for flag in Flag if flag in label.flags],
            scores=list(label.scores),
        )
        for name, label in labels.items()
    }
    verdict = compose_verdict(judged, rubric)
    ranking = tuple(tuple(tied) for tied in verdict.ranking)
    return GraderExample(group=group, prompt=prompt, target=render_verdict(verdict), labels=labels, ranking=ranking)


class _Solved:
    """An expert's trace with what came of it."""

    def __init__(self, trace: ExpertTrace) -> None:
        self.trace = trace
        self.passed, self.log = _verification(trace.task, trace.actions)
        self.patch = patch_of(trace.task, trace.actions)

    def record(self, trajectory_id: str, group_id: str, rng: random.Random) -> tuple[Trajectory, Transcript]:
        """What a rollout of this trace would have left; sometimes with detours, as an agent's has."""
        trace = self.trace
        actions, status = _wander(trace.actions, self.passed, rng)
        outputs: list[tuple[str, int | None]] = [*replay(trace.task, actions)]
        outputs += [("", None)] * (len(actions) - len(outputs))
        turns = tuple(
            Turn(
                action=action,
                observation=""
                if code is None
                else render_observation(output, exit_code=code, timed_out=False, max_chars=_OBSERVATION_CHARS),
                exit_code=code,
                duration_s=0.0,
                response_tokens=0,
            )
            for action, (output, code) in zip(actions, outputs, strict=True)
        )
        transcript = Transcript(trajectory_id=trajectory_id, turns=turns, patch=self.patch, test_log=self.log)
        trajectory = Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            task_id=trace.task.task_id,
            source=trace.task.source,
            status=status,
            reward=float(self.passed),
            passed=self.passed,
            turns=len(turns),
            prompt_tokens=0,
            response_tokens=0,
            total_tokens=0,
            policy_versions=(0,),
            payload_sha256=None,
            engine_s=0.0,
            sandbox_s=0.0,
            verify_s=0.0,
            wall_s=0.0,
        )
        return trajectory, transcript


def _wander(actions: Sequence[str], passed: bool, rng: random.Random) -> tuple[tuple[str, ...], Status]:
    """Repeat some looks at files, and now and then end at the turn limit instead of submitting. The patch stays."""
    steps = list(actions)
    looks = [action for action in steps if action.startswith(_LOOKS)]
    if looks and rng.random() < _DETOUR_SHARE:
        for _ in range(rng.randint(1, 2)):
            steps.insert(rng.randrange(len(steps)), rng.choice(looks))
    if rng.random() < (_PASSING_LIMIT_SHARE if passed else _FAILING_LIMIT_SHARE):
        return tuple(steps[:-1]), Status.TURN_LIMIT
    return tuple(steps), Status.SUBMITTED


def _verification(task: Task, actions: Sequence[str]) -> tuple[bool, str]:
    """The hidden tests' word on the state after the actions, and a log that ends as the verifier's does."""
    verifier = task.verifier
    if not isinstance(verifier, HiddenTests):
        raise ValueError(f"{task.task_id}: only tasks with hidden tests are graded")
    names = verifier.modules or tuple(path.removesuffix(".py") for path in verifier.files)
    last = run_tests({**final_files(task, actions), **verifier.files}, names)
    count = sum(len(_TEST.findall(content)) for content in verifier.files.values())
    bad = sum(int(number) for number in re.findall(r"=(\d+)", last))
    log = f"$ {verifier.command}\n{last}\n{max(count - bad, 0)} of {count} tests passed, 0 skipped"
    return last == "OK", log


def _draw(passing: Sequence[_Solved], rng: random.Random) -> _Solved:
    """First a quality, then a strategy, then one of its traces: rare strategies are seen as often as common ones."""
    qualities = sorted({s.trace.quality for s in passing if s.trace.quality in _WEIGHTS})
    quality = rng.choices(qualities, [_WEIGHTS[q] for q in qualities])[0]
    strategies = sorted({s.trace.strategy for s in passing if s.trace.quality is quality})
    strategy = rng.choice(strategies)
    return rng.choice([s for s in passing if s.trace.quality is quality and s.trace.strategy == strategy])


def _labels(
    group: CandidateGroup, solved: Mapping[str, _Solved], prompt: GraderPrompt, rubric: RubricConfig
) -> dict[str, CandidateLabel]:
    """Labels by candidate. Two scripts can arrive at one patch: both then get the better one's judgement."""
    best: dict[tuple[str, bool], _Solved] = {}
    for s in solved.values():
        known = best.get(_sameness(s))
        if known is None or _key(s, rubric) < _key(known, rubric):
            best[_sameness(s)] = s
    labels: dict[str, CandidateLabel] = {}
    for candidate in group.passing:
        s = best[_sameness(solved[candidate.label])]
        scores, flags = _judgement(s)
        shown = None if prompt.references is None else prompt.references[candidate.label]
        evidence = _evidence(s.trace.evidence, candidate, shown) if is_negative(scores, flags) else ()
        labels[candidate.label] = CandidateLabel(
            strategy=s.trace.strategy, scores=scores, flags=flags, evidence=evidence
        )
    return labels


def _sameness(solved: _Solved) -> tuple[str, bool]:
    return solved.patch, Flag.SEVERE_PROCESS_ISSUE.value in solved.trace.flags


def _judgement(solved: _Solved) -> tuple[Scores, Flags]:
    if solved.trace.scores is None:
        raise ValueError(f"{solved.trace.strategy} passes the hidden tests but has no scores")
    return Scores(*solved.trace.scores), Flags(frozenset(Flag(flag) for flag in solved.trace.flags))


def _key(solved: _Solved, rubric: RubricConfig) -> tuple[int, float]:
    return rank_key(*_judgement(solved), rubric)


def _evidence(cited: Sequence[str], candidate: Candidate, shown: Sequence[str] | None) -> tuple[str, ...]:
    """Citations of changed lines that the reader of the prompt can see; at least one if there is anything to cite."""
    changed = [nearest_changed(reference, candidate.patch) for reference in cited or ("",)]
    visible = [r for r in changed if r is not None and (shown is None or r in shown)]
    if not visible and shown:
        visible = [next((r for r in shown if not r.startswith("turn:")), shown[0])]
    return tuple(dict.fromkeys(visible))[:_MAX_EVIDENCE]


# --- how good a grader is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderMetrics:
    """Figures over examples with known labels."""

    groups: int
    validity_rate: float
    """Share of answers that pass M2.6."""
    invalid: Mapping[str, int]
    """Fallback reason -> count."""
    tier_agreement: float | None
    """Share of candidates in valid verdicts with the right tier; None without a valid verdict."""
    score_agreement: float | None
    """Share of their scores that are exactly right."""
    kendall_tau_b: float | None
    """Mean over valid verdicts of groups whose right ranking has at least two places."""


def evaluate_grader(answers: Iterable[tuple[GraderExample, str]], rubric: RubricConfig | None = None) -> GraderMetrics:
    """Hold a model's answers (complete ones) against the labels."""
    rubric = rubric or RubricConfig()
    invalid: Counter[FallbackReason] = Counter()
    tiers: list[bool] = []
    scores: list[bool] = []
    taus: list[float] = []
    groups = 0
    for example, text in answers:
        groups += 1
        try:
            grade = validate(parse_verdict(text), example.group, rubric)
        except InvalidVerdict as error:
            invalid[error.reason] += 1
            continue
        ids = {c.label: c.trajectory.trajectory_id for c in example.group.passing}
        for name, label in example.labels.items():
            given = grade.candidates.get(ids[name])
            tiers.append(given is not None and given.tier is label.tier)
            scores += [given is not None and given.scores[i] == label.scores[i] for i in range(len(label.scores))]
        if len(example.ranking) > 1:
            taus.append(_tau(example, grade, ids))
    return GraderMetrics(
        groups=groups,
        validity_rate=1 - invalid.total() / groups if groups else 0.0,
        invalid={reason.value: n for reason, n in invalid.items()},
        tier_agreement=_mean(tiers),
        score_agreement=_mean(scores),
        kendall_tau_b=_mean(taus),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tau(example: GraderExample, grade: Grade, ids: Mapping[str, str]) -> float:
    right = {name: place for place, tied in enumerate(example.ranking) for name in tied}
    places = {name: (c.tier.value, c.tie) for name, i in ids.items() if (c := grade.candidates.get(i))}
    given = sorted(set(places.values()))
    index = {name: given.index(places[name]) if name in places else len(given) for name in right}
    return kendall_tau_b([right[n] for n in right], [index[n] for n in right])


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings with ties; 0 where one of them ties everything."""
    concordant = discordant = tied_a = tied_b = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            da, db = a[i] - a[j], b[i] - b[j]
            pairs += 1
            tied_a += da == 0
            tied_b += db == 0
            concordant += da * db > 0
            discordant += da * db < 0
    scale = float(((pairs - tied_a) * (pairs - tied_b)) ** 0.5)
    return (concordant - discordant) / scale if scale else 0.0
