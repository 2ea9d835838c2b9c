"""M1.3 under injected failures: what remains of a group is trained on as if the lost had never been sampled.

What is equal to what: the advantages, the weights of every aggregation, the loss and its gradient of a run that lost
some trajectories, to the bit, to those computed by hand from the survivors of each group alone. That holds whatever
decides who is lost: chance, the length of a trajectory, or its outcome. (Which trajectories survive then depends on it
too; no rule can undo that, which is why lost ones are sampled again, and why a run pauses when most are lost.) A
trajectory that is sampled again is a fresh draw: it is equal to nothing but to itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from scripted import Run, TranscriptPool, run_config, tier_of, trajectory

from configs.schema import AdvantageMode, Aggregation, RatioMaskLoss
from envs.task import Task
from grader.exchange import GradeReply, GradeRequest
from grader.scripted import ScriptedGrader
from infra.pool import ActorLost
from learner.advantage import advantages
from learner.group import BatchItem
from learner.loss import ratio_mask, token_weights
from rollout.trajectory import Status, Trajectory

SIZE = 8
LOST = (Status.INFRA_SANDBOX, Status.INFRA_ENGINE, Status.INFRA_VERIFIER, Status.INFRA_WORKER, Status.INFRA_WALL)
FACTORS = {"T1": 1.0, "T3": 0.2}
"""Of the tiers that `tier_of` gives, alone in theirs (M3.4); tied ones share a k."""

Loses = Callable[[str], frozenset[int]]
"""Group -> slots that are lost."""


def drawn(group_id: str, slot: int) -> tuple[bool, int]:
    """Whether a slot's trajectory passes, and its generated tokens."""
    rng = Random(f"{group_id}/{slot}")
    return rng.random() < 0.5, rng.randint(1, 60)


def by_chance(group_id: str) -> frozenset[int]:
    return frozenset(slot for slot in range(SIZE) if Random(f"lost {group_id}/{slot}").random() < 0.3)


def _thirty_percent(group_id: str) -> int:
    """2 or 3 of 8, 2.4 on average."""
    return 3 if Random(group_id).random() < 0.4 else 2


def the_longest(group_id: str) -> frozenset[int]:
    slots = sorted(range(SIZE), key=lambda slot: -drawn(group_id, slot)[1])
    return frozenset(slots[: _thirty_percent(group_id)])


def the_passing(group_id: str) -> frozenset[int]:
    slots = sorted(range(SIZE), key=lambda slot: not drawn(group_id, slot)[0])
    return frozenset(slots[: _thirty_percent(group_id)])


ADVERSARIES = (by_chance, the_longest, the_passing)


def slot_of(trajectory_id: str) -> int:
    return int(trajectory_id.split("/")[1].split(".")[0])


def grade(request: GradeRequest, *transcripts: Any) -> GradeReply:
    return ScriptedGrader().reply(request, *transcripts)


def run_of(folder: Path, loses: Loses, mode: AdvantageMode) -> Run:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        slot = slot_of(trajectory_id)
        if slot in loses(group_id):
            status = LOST[slot % len(LOST)]
            if status is Status.INFRA_WORKER:
                raise ActorLost("rollout-0", "rollout")
            return trajectory(trajectory_id, task=task, status=status)
        passed, tokens = drawn(group_id, slot)
        return trajectory(trajectory_id, task=task, passed=passed, response_tokens=tokens, total_tokens=tokens + 20)

    algorithm = {"group_size": SIZE, "mode": mode.value}
    config = run_config(algorithm=algorithm, rollout={"infra_retries": 0}, grader=_grader(mode))
    return Run(folder, config, rollout=rollout, grade=grade, pool=TranscriptPool)


def _grader(mode: AdvantageMode) -> dict[str, Any] | None:
    if mode is AdvantageMode.OUTCOME:
        return None
    return {"backend": {"type": "vllm", "engine": {"model": "unused"}}, "timeout_s": 5.0}


def survivors(group_id: str, loses: Loses) -> list[int]:
    return [slot for slot in range(SIZE) if slot not in loses(group_id)]


def by_hand(group_id: str, slots: Sequence[int], mode: AdvantageMode, lambda_max: float) -> dict[int, float]:
    """Slot -> advantage of a group of just these trajectories."""
    passed = [drawn(group_id, slot)[0] for slot in slots]
    graded = group_id.startswith("code") and mode is not AdvantageMode.OUTCOME
    tiers = [tier_of(f"{group_id}/{slot}.0") for slot in slots]
    factors = [FACTORS[tier] if p else None for tier, p in zip(tiers, passed, strict=True)]
    used = mode if graded else AdvantageMode.OUTCOME
    return dict(
        zip(slots, advantages(used, [float(p) for p in passed], passed, factors, lambda_max).values, strict=True)
    )


@pytest.mark.parametrize("mode", list(AdvantageMode))
@pytest.mark.parametrize("loses", ADVERSARIES)
def test_advantages_are_those_of_the_survivors_alone(tmp_path: Path, loses: Loses, mode: AdvantageMode) -> None:
    run = run_of(tmp_path, loses, mode)
    groups = run.go()
    trained = [g for g in groups if g["outcome"] == "trained"]
    lost = sum(not t["valid"] for g in groups for t in g["trajectories"])
    share = lost / sum(len(g["trajectories"]) for g in groups)
    assert len(trained) == 9 and 0.2 < share < 0.4
    for g in trained:
        group_id, slots = g["group_id"], survivors(g["group_id"], loses)
        assert {slot_of(t["id"]) for t in g["trajectories"] if t["valid"]} == set(slots)
        given = {slot_of(t["id"]): t["advantage"] for t in g["trajectories"] if t["valid"]}
        assert given == by_hand(group_id, slots, mode, run.config.algorithm.lambda_max), "to the bit"
        assert all(t["reward"] is None and t["advantage"] is None for t in g["trajectories"] if not t["valid"])
        if mode in (AdvantageMode.OUTCOME, AdvantageMode.REDISTRIBUTE):
            assert math.isclose(math.fsum(given.values()), 0.0, abs_tol=1e-12), "the group still sums to 0 (M4.7)"
    for _, request, *_ in run.grader.calls:  # the graders saw the survivors only
        assert {slot_of(t.trajectory_id) for t in request.trajectories} == set(survivors(request.group_id, loses))
    run.ledger.check()


def objective(
    sequences: Sequence[tuple[str, str, int, float]], aggregation: Aggregation
) -> tuple[tuple[float, ...], float, torch.Tensor]:
    """Weights, loss and gradient of a small policy over (trajectory, group, tokens, advantage) of a whole batch."""
    torch.manual_seed(0)
    policy = torch.nn.Linear(4, 7, dtype=torch.float64)
    weights = token_weights(aggregation, [n for _, _, n, _ in sequences], [group for _, group, _, _ in sequences])
    total = torch.zeros((), dtype=torch.float64)
    for (name, _, tokens, advantage), weight in zip(sequences, weights, strict=True):
        generator = torch.Generator().manual_seed(Random(name).getrandbits(31))
        features = torch.randn(tokens, 4, generator=generator, dtype=torch.float64)
        targets = torch.randint(7, (tokens, 1), generator=generator)
        logp = policy(features).log_softmax(-1).gather(1, targets).squeeze(1)
        old = logp.detach() + 0.1 * torch.randn(tokens, generator=generator, dtype=torch.float64)
        loss = ratio_mask(logp, old, torch.full_like(old, advantage), RatioMaskLoss()).loss
        total = total + weight * loss.sum()
    total.backward()
    assert policy.weight.grad is not None
    return weights, float(total.detach()), policy.weight.grad


def sequence_of(item: BatchItem) -> tuple[str, str, int, float]:
    return item.trajectory_id, item.group_id, item.response_tokens, item.advantage


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("loses", ADVERSARIES)
def test_loss_and_gradient_are_those_of_the_survivors_alone(
    tmp_path: Path, loses: Loses, aggregation: Aggregation
) -> None:
    """M5.2: every denominator counts valid trajectories only, so a batch without the lost ones is the same batch."""
    mode = AdvantageMode.REDISTRIBUTE
    run = run_of(tmp_path, loses, mode)
    run.go()
    for batch in run.learner.batches:
        order = list(dict.fromkeys(item.group_id for item in batch))
        alone = [
            (f"{group_id}/{slot}.0", group_id, drawn(group_id, slot)[1], advantage)
            for group_id in order
            for slot, advantage in by_hand(
                group_id, survivors(group_id, loses), mode, run.config.algorithm.lambda_max
            ).items()
        ]
        weights, loss, gradient = objective([sequence_of(item) for item in batch], aggregation)
        weights_alone, loss_alone, gradient_alone = objective(alone, aggregation)
        assert weights == weights_alone
        assert loss == loss_alone
        assert torch.equal(gradient, gradient_alone)
        assert gradient.abs().max() > 0.0
        # And it is no equality that anything would pass: lost ones with a zero advantage would move the denominators.
        counted = [
            *alone,
            *((f"{g}/{slot}.0", g, drawn(g, slot)[1], 0.0) for g in order for slot in sorted(loses(g))),
        ]
        _, _, diluted = objective(counted, aggregation)
        assert not torch.allclose(diluted, gradient, rtol=1e-3, atol=0.0)


def test_what_is_lost_for_a_moment_is_drawn_afresh(tmp_path: Path) -> None:
    """30 % of all attempts are lost, the longest first; with retries enough every slot is filled by a later attempt."""

    def is_lost(trajectory_id: str) -> bool:
        rng = Random(f"attempt {trajectory_id}")
        return rng.random() < 0.15 + 0.3 * (length(trajectory_id) / 60.0)

    def length(trajectory_id: str) -> int:
        return Random(trajectory_id).randint(1, 60)

    def passes(trajectory_id: str) -> bool:
        return Random(f"pass {trajectory_id}").random() < 0.5

    attempts: dict[tuple[str, int], list[str]] = defaultdict(list)

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        attempts[group_id, slot_of(trajectory_id)].append(trajectory_id)
        if is_lost(trajectory_id):
            return trajectory(trajectory_id, task=task, status=Status.INFRA_SANDBOX)
        return trajectory(trajectory_id, task=task, passed=passes(trajectory_id), response_tokens=length(trajectory_id))

    algorithm = {"group_size": SIZE, "mode": "outcome"}
    config = run_config(algorithm=algorithm, rollout={"infra_retries": 12}, grader=None)
    run = Run(tmp_path, config, rollout=rollout)
    trained = [g for g in run.go() if g["outcome"] == "trained"]
    assert len(trained) == 9
    started = [name for names in attempts.values() for name in names]
    assert 0.2 < sum(map(is_lost, started)) / len(started) < 0.4
    assert len(started) == len(set(started)), "no attempt is sampled twice"
    for g in trained:
        assert all(t["valid"] for t in g["trajectories"])
        mean = math.fsum(passes(t["id"]) for t in g["trajectories"]) / SIZE
        for t in g["trajectories"]:
            names = attempts[g["group_id"], slot_of(t["id"])]
            assert t["id"] == names[-1] and not is_lost(t["id"])
            assert all(map(is_lost, names[:-1])), "the first attempt that was not lost counts"
            assert t["advantage"] == passes(t["id"]) - mean
    assert sum(run.retries.values()) > 0 and set(run.retries) == {"infra_sandbox"}


def test_no_failure_of_the_infrastructure_is_a_zero_reward(tmp_path: Path) -> None:
    """Every class, one slot each: masked, never failed."""
    classes = [status for status in Status if status.masked and status is not Status.INFRA_CANCELLED]

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        slot = slot_of(trajectory_id)
        if slot < len(classes):
            return trajectory(trajectory_id, task=task, status=classes[slot])
        return trajectory(trajectory_id, task=task, passed=slot % 2 == 0)

    algorithm = {"group_size": len(classes) + 6, "mode": "outcome"}
    scheduler = {"pause_masked_above": 0.8, "quarantine_after": None}
    config = run_config(steps=1, algorithm=algorithm, rollout={"infra_retries": 0}, grader=None, scheduler=scheduler)
    run = Run(tmp_path, config, rollout=rollout)
    for g in run.go():
        if g["outcome"] != "trained":
            continue
        masked = [t for t in g["trajectories"] if not t["valid"]]
        assert [t["status"] for t in masked] == [status.value for status in classes]
        assert all(t["reward"] is None and t["outcome_reward"] is None and t["passed"] is None for t in masked)
        assert sum(t["advantage"] for t in g["trajectories"] if t["valid"]) == 0.0
    assert all(slot_of(item.trajectory_id) >= len(classes) for item in run.learner.batches[0])
