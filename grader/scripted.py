"""A grader without a model, for fast tests of whatever asks for grades. Never what a run gets."""

from __future__ import annotations

from collections.abc import Callable

from configs.schema import RubricConfig
from grader.candidates import Candidate, label_group
from grader.exchange import GradeReply, GradeRequest
from grader.rubric import Flag
from grader.verdict import CandidateVerdict, compose_verdict, render_verdict, validate
from rollout.trajectory import Transcript

Judge = Callable[[Candidate], CandidateVerdict]


def judge_by_size(candidate: Candidate) -> CandidateVerdict:
    """Up to two changed lines are T1, up to six T2, more are T3; without any change T2."""
    changed = candidate.patch.changed
    reasons = [f"{len(changed)} changed lines"] * 5
    if not changed:
        return CandidateVerdict(evidence=[], reasons=reasons, flags=[], scores=[3, 3, 3, 3, 3])
    if len(changed) <= 2:
        return CandidateVerdict(evidence=[], reasons=reasons, flags=[], scores=[5, 5, 5, 5, 5])
    if len(changed) <= 6:
        return CandidateVerdict(evidence=[], reasons=reasons, flags=[], scores=[4, 4, 3, 4, 4])
    flags, scores = [Flag.UNREQUESTED_REWRITE], [3, 3, 1, 2, 2]
    return CandidateVerdict(evidence=[changed[0].reference], reasons=reasons, flags=flags, scores=scores)


class ScriptedGrader:
    """Grades from the patches alone, deterministically, through the real validation."""

    def __init__(self, rubric: RubricConfig | None = None, judge: Judge = judge_by_size) -> None:
        self.rubric = rubric or RubricConfig()
        self.judge = judge
        self.requests: list[GradeRequest] = []

    async def grade(self, request: GradeRequest, *transcripts: Transcript) -> GradeReply:
        """See `grader.exchange.Grader`."""
        return self.reply(request, *transcripts)

    def reply(self, request: GradeRequest, *transcripts: Transcript) -> GradeReply:
        """`grade` without an event loop.

        Raises:
            MismatchError, InvalidVerdict: the test's own group or judge is not sound.
        """
        self.requests.append(request)
        group = label_group(
            group_id=request.group_id,
            task=request.task,
            trajectories=request.trajectories,
            transcripts=transcripts,
            order_seed=request.order_seed,
        )
        verdict = compose_verdict({c.label: self.judge(c) for c in group.passing}, self.rubric)
        return GradeReply(
            group_id=request.group_id,
            attempt=request.attempt,
            base_state=request.base_state,
            policy_versions={t.trajectory_id: t.policy_versions for t in request.trajectories},
            order_seed=request.order_seed,
            grade=validate(verdict, group, self.rubric),
            fallback_reason=None,
            detail="",
            model="scripted",
            queue_s=0.0,
            run_s=0.0,
            turns=1,
            prompt_tokens=0,
            completion_tokens=0,
            verdict=render_verdict(verdict),
            labels={c.label: c.trajectory.trajectory_id for c in group.candidates},
        )
