"""The DeepSpeed ranks: one gradient whatever the layout, exact resume, and steps that are refused.

The reference gradient is M5.2 written out over single, unpacked sequences with autograd alone. The batch below has
trajectories that infrastructure took (M1.3): they are dropped before the learner, and the reference never sees them.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_llama import VOCAB, save_small_llama

from configs.schema import (
    Aggregation,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    PpoClipLoss,
    SupervisionConfig,
)
from infra.errors import ConfigError, LearnerError, StorageError
from learner.group import BatchItem, LearnerGroup, PayloadsLost, StepStats
from learner.loss import token_weights
from learner.packing import Sample, plan
from learner.rank import RankCore, check_learner
from rollout.spool import write_rollout
from rollout.trajectory import Payload, Status, Trajectory, Transcript

pytestmark = pytest.mark.e2e

TEMPERATURE = 0.8
ONE_ROW, FOUR_ROWS = 300, 64
CHUNK = 11
LENGTHS = (40, 25, 33, 18, 50, 21, 30, 12)
GROUPS = ("a", "a", "b", "b", "b", "c", "c", "c")
STATUS = (Status.SUBMITTED, Status.TURN_LIMIT, Status.INFRA_SANDBOX) + (Status.SUBMITTED,) * 4 + (Status.INFRA_ENGINE,)
ADVANTAGES = (0.6, -0.4, 9.0, 1.0, -1.5, 0.3, -0.3, 9.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """One finished trajectory of the test's batch."""

    status: Status
    group: str
    advantage: float
    payload: Payload


@pytest.fixture(scope="module")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random 2-layer Llama with tied embeddings, as an HF folder with a stand-in tokenizer file."""
    folder = tmp_path_factory.mktemp("model")
    save_small_llama(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return str(folder)


@pytest.fixture(scope="module")
def rolled(start_model: str) -> list[Rolled]:
    """Trajectories whose recorded probabilities are near the model's own, with some far off (masked by ratio)."""
    rng = np.random.default_rng(1)
    model = load(start_model)
    result = []
    for length, group, status, advantage in zip(LENGTHS, GROUPS, STATUS, ADVANTAGES, strict=True):
        ids = rng.integers(0, VOCAB, length)
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        own = next_logprobs(model, torch.from_numpy(ids)).detach().numpy()
        noise = rng.normal(0.0, 1.2, length)
        logprobs = np.where(mask, np.concatenate([[0.0], own]) + noise, 0.0)
        payload = Payload(
            token_ids=ids.astype(np.int32),
            loss_mask=mask,
            logprobs=logprobs.astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        result.append(Rolled(status=status, group=group, advantage=advantage, payload=payload))
    return result


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def next_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[T-1] log-probability of each next token at the sampling temperature."""
    logits = model(input_ids=ids[None].long(), use_cache=False).logits[0, :-1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[1:, None].long()).squeeze(-1)


def reference_gradient(folder: str, rolled: Sequence[Rolled], aggregation: Aggregation) -> dict[str, torch.Tensor]:
    model = load(folder)
    losses: dict[str, list[torch.Tensor]] = {}
    for one in rolled:
        if one.status.masked:
            continue
        mask = torch.from_numpy(one.payload.loss_mask[1:])
        logp = next_logprobs(model, torch.from_numpy(one.payload.token_ids))[mask]
        ratio = (logp - torch.from_numpy(one.payload.logprobs[1:])[mask]).exp()
        kept = ((ratio >= 0.2) & (ratio <= 5.0)).float()
        losses.setdefault(one.group, []).append(-one.advantage * ratio * kept)
    sequences = [loss for group in losses.values() for loss in group]
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            total = torch.cat(sequences).mean()
        case Aggregation.SEQUENCE_MEAN:
            total = torch.stack([loss.mean() for loss in sequences]).mean()
        case Aggregation.PROMPT_MEAN:
            total = torch.stack([torch.cat(group).mean() for group in losses.values()]).mean()
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def items_of(rolled: Sequence[Rolled]) -> list[BatchItem]:
    return [
        BatchItem(
            trajectory_id=f"{one.group}/{index}.0",
            group_id=one.group,
            advantage=one.advantage,
            response_tokens=int(one.payload.loss_mask.sum()),
            total_tokens=len(one.payload.token_ids),
            payload=one.payload,
        )
        for index, one in enumerate(rolled)
        if not one.status.masked
    ]


def rows_of(
    items: Sequence[BatchItem], aggregation: Aggregation, ranks: int, max_tokens: int
) -> list[list[list[Sample]]]:
    """[rank][row] -> samples."""
    weights = token_weights(aggregation, [i.response_tokens for i in items], [i.group_id for i in items])
    samples = [
        Sample(payload=item.payload, advantage=item.advantage, weight=weight)
        for item, weight in zip(items, weights, strict=True)
    ]
    layout = plan([item.total_tokens for item in items], ranks, max_tokens)
    return [[[samples[i] for i in row] for row in rows] for rows in layout]


def configured(
    model: str, *, zero_stage: int = 0, max_tokens: int = ONE_ROW, ranks: int = 1, **more: Any
) -> LearnerConfig:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5, warmup_steps=3)
    return LearnerConfig(
        model=model,
        zero_stage=zero_stage,
        world_size=ranks,
        max_tokens_per_microbatch=max_tokens,
        logprob_chunk_tokens=CHUNK,
        threads=1,
        optimizer=optimizer,
        **more,
    )


def lone_core(model: str, aggregation: Aggregation = Aggregation.PROMPT_MEAN, **more: Any) -> RankCore:
    return RankCore(configured(model, **more), LossConfig(aggregation=aggregation), TEMPERATURE)


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    squares = [((got[name] - want[name]).square().sum(), want[name].square().sum()) for name in want]
    return math.sqrt(float(sum(s[0] for s in squares)) / float(sum(s[1] for s in squares)))


def parameters(core: RankCore) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in core.named_full_parameters()}


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_gradient_is_the_definitions_in_one_row_and_in_four(
    start_model: str, rolled: list[Rolled], aggregation: Aggregation, zero_stage: int
) -> None:
    want = reference_gradient(start_model, rolled, aggregation)
    items = items_of(rolled)
    for max_tokens, rows_wanted in ((ONE_ROW, 1), (FOUR_ROWS, 4)):
        rows = rows_of(items, aggregation, 1, max_tokens)[0]
        assert len(rows) == rows_wanted
        core = lone_core(start_model, aggregation, zero_stage=zero_stage, max_tokens=max_tokens)
        sums = core.accumulate(rows, version=0)
        assert 0 < sums.masked < sums.tokens
        assert relative_error(core.gradients(), want) <= 1e-5


def test_masked_trajectories_would_change_the_gradient(start_model: str, rolled: list[Rolled]) -> None:
    """So that the equality above says something: with them the reference is another one."""
    with_masked = [replace(one, status=Status.SUBMITTED) for one in rolled]
    for aggregation in Aggregation:
        want = reference_gradient(start_model, rolled, aggregation)
        assert relative_error(reference_gradient(start_model, with_masked, aggregation), want) > 0.1


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_is_skipped(start_model: str, rolled: list[Rolled], zero_stage: int) -> None:
    core = lone_core(start_model, zero_stage=zero_stage)
    before = parameters(core)
    good = rows_of(items_of(rolled), Aggregation.PROMPT_MEAN, 1, ONE_ROW)[0]
    bad = [[replace(good[0][0], advantage=math.nan), *good[0][1:]]]
    _, applied = core.step(bad, version=0)
    assert applied.skipped
    assert not math.isfinite(applied.grad_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in core.named_full_parameters())
    # The next good step is what it would have been without the bad one.
    _, applied = core.step(good, version=0)
    assert not applied.skipped
    fresh = lone_core(start_model, zero_stage=zero_stage)
    fresh.step(good, version=0)
    assert all(torch.equal(tensor, parameters(fresh)[name]) for name, tensor in core.named_full_parameters())


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_resume_is_exact(start_model: str, rolled: list[Rolled], zero_stage: int, tmp_path: Path) -> None:
    rows = rows_of(items_of(rolled), Aggregation.TOKEN_MEAN, 1, FOUR_ROWS)[0]
    core = lone_core(start_model, zero_stage=zero_stage)
    core.step(rows, version=0)
    core.save(str(tmp_path), 7)
    _, applied = core.step(rows, version=0)
    want = parameters(core)
    again = lone_core(start_model, zero_stage=zero_stage)
    assert again.load(str(tmp_path)) == 7
    _, resumed = again.step(rows, version=0)
    assert resumed == applied
    assert resumed.lr == pytest.approx(1e-2 * 2 / 4)  # second of three warm-up steps
    assert all(torch.equal(tensor, want[name]) for name, tensor in again.named_full_parameters())


def test_a_resume_draws_the_same_random_numbers(start_model: str, tmp_path: Path) -> None:
    """A model with dropout needs them for an exact resume."""
    core = lone_core(start_model)
    core.save(str(tmp_path))
    drawn = torch.rand(4)
    torch.manual_seed(99)
    core.load(str(tmp_path))
    assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize("what", ["save", "export_hf"])
def test_a_full_disk_is_no_fault_of_the_rank(start_model: str, what: str, tmp_path: Path) -> None:
    """Files of this process may not grow beyond 64 KiB for a while, as torch's and safetensors' writers see it."""
    core = lone_core(start_model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(StorageError, match=r"part: cannot be written .*free space"):
            getattr(core, what)(str(tmp_path / "part"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    getattr(core, what)(str(tmp_path / "part"))
    with pytest.raises(LearnerError, match="holds no learner state"):
        core.load(str(tmp_path / "none"))


def test_resume_refuses_what_is_not_there_or_from_other_ranks(start_model: str, tmp_path: Path) -> None:
    core = lone_core(start_model)
    with pytest.raises(LearnerError, match="holds no learner state"):
        core.load(str(tmp_path))
    core.save(str(tmp_path))
    with pytest.raises(LearnerError, match=r"zero_stage=0, this run has 2; resume with 0"):
        lone_core(start_model, zero_stage=2).load(str(tmp_path))


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_export_is_a_folder_that_transformers_loads(
    start_model: str, rolled: list[Rolled], zero_stage: int, tmp_path: Path
) -> None:
    core = lone_core(start_model, zero_stage=zero_stage)
    core.step(rows_of(items_of(rolled), Aggregation.TOKEN_MEAN, 1, ONE_ROW)[0], version=0)
    core.export_hf(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    loaded = dict(load(str(tmp_path)).named_parameters())
    want = parameters(core)
    assert loaded.keys() == want.keys()
    assert "lm_head.weight" not in want  # tied embeddings are published once
    assert all(torch.equal(loaded[name], want[name]) for name in want)
    moved = dict(load(start_model).named_parameters())
    assert any(not torch.equal(moved[name], want[name]) for name in want)


def test_bfloat16_keeps_fp32_masters_and_refuses_stage_0(start_model: str, rolled: list[Rolled]) -> None:
    with pytest.raises(ConfigError, match=r"zero_stage to 1 or more"):
        check_learner(configured(start_model, dtype="bfloat16"))
    core = lone_core(start_model, dtype="bfloat16", zero_stage=1, gradient_checkpointing=True)
    core.accumulate(rows_of(items_of(rolled), Aggregation.PROMPT_MEAN, 1, FOUR_ROWS)[0], version=0)
    want = reference_gradient(start_model, rolled, Aggregation.PROMPT_MEAN)
    assert relative_error(core.gradients(), want) < 0.05
    assert not core.apply().skipped


def test_statistics_of_a_step(start_model: str, rolled: list[Rolled]) -> None:
    core = lone_core(start_model)
    items = items_of(rolled)
    stale = [replace(item, payload=replace(item.payload, versions=item.payload.versions - 1)) for item in items[1:]]
    rows = rows_of([items[0], *stale], Aggregation.TOKEN_MEAN, 1, FOUR_ROWS)[0]
    sums = core.accumulate(rows, version=0)
    payload = items[0].payload
    own = next_logprobs(load(start_model), torch.from_numpy(payload.token_ids)).detach().numpy()
    gaps = np.abs(own - payload.logprobs[1:])[payload.loss_mask[1:]]
    assert sums.tokens == sum(item.response_tokens for item in items)
    assert sums.fresh == items[0].response_tokens
    assert sums.gap == pytest.approx(gaps.sum(), rel=1e-4)
    assert sums.gap_max == pytest.approx(gaps.max(), rel=1e-4)
    assert 0.0 < sums.entropy / sums.tokens < math.log(VOCAB)


def test_ppo_and_nll_train_too(start_model: str, rolled: list[Rolled]) -> None:
    rows = rows_of(items_of(rolled), Aggregation.TOKEN_MEAN, 1, ONE_ROW)[0]
    ppo = RankCore(configured(start_model), LossConfig(objective=PpoClipLoss(name="ppo_clip")), TEMPERATURE)
    sums, applied = ppo.step(rows, version=0)
    assert 0 < sums.masked < sums.tokens
    assert not applied.skipped
    supervised = RankCore(configured(start_model), "nll", 1.0)
    losses = [supervised.step(rows, version=0)[0].loss for _ in range(6)]
    assert losses[0] == pytest.approx(math.log(VOCAB), rel=0.2)
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def two_ranks(ray_session: None, start_model: str) -> Iterator[LearnerGroup]:
    group = LearnerGroup(
        configured(start_model, zero_stage=2, max_tokens=FOUR_ROWS, ranks=2), LossConfig(), TEMPERATURE
    )
    group.start()
    asyncio.run(group.ready())
    yield group
    group.shutdown()


def test_two_ranks_have_the_same_gradient(two_ranks: LearnerGroup, start_model: str, rolled: list[Rolled]) -> None:
    def gradients(
        core: RankCore, cases: Sequence[tuple[LearnerConfig, LossConfig, list[list[list[Sample]]]]]
    ) -> list[dict[str, torch.Tensor]]:
        found = []
        for config, loss, rows in cases:
            other = RankCore(config, loss, core.temperature, rank=core.rank, world_size=core.world_size)
            other.accumulate(rows[core.rank], version=0)
            found.append(other.gradients())
        return found

    cases = []
    for zero_stage in (0, 1, 2, 3):
        for aggregation in Aggregation:
            rows = rows_of(items_of(rolled), aggregation, 2, FOUR_ROWS)
            config = configured(start_model, zero_stage=zero_stage, ranks=2)
            cases.append((config, LossConfig(aggregation=aggregation), rows))
    wanted = {aggregation: reference_gradient(start_model, rolled, aggregation) for aggregation in Aggregation}
    for of_rank in asyncio.run(two_ranks.on_ranks(gradients, cases)):
        for (config, loss, _), got in zip(cases, of_rank, strict=True):
            assert relative_error(got, wanted[loss.aggregation]) <= 1e-5, (config.zero_stage, loss.aggregation)


def test_a_step_of_two_ranks_is_the_step_of_one(
    two_ranks: LearnerGroup, start_model: str, rolled: list[Rolled], tmp_path: Path
) -> None:
    import ray

    items = items_of(rolled)
    by_reference = [replace(item, payload=ray.put(item.payload)) for item in items]
    alone = lone_core(start_model, max_tokens=FOUR_ROWS)
    rows = rows_of(items, Aggregation.PROMPT_MEAN, 1, FOUR_ROWS)[0]

    async def scenario() -> tuple[StepStats, StepStats]:
        await two_ranks.save(tmp_path / "start")
        first = await two_ranks.train_step(by_reference)
        await two_ranks.save(tmp_path / "after")
        await two_ranks.train_step(by_reference)
        await two_ranks.export_hf(tmp_path / "second")
        await two_ranks.load(tmp_path / "after")
        again = await two_ranks.train_step(by_reference, lr_scale=1.0)
        await two_ranks.export_hf(tmp_path / "resumed")
        await two_ranks.load(tmp_path / "start")
        return first, again

    first, again = asyncio.run(scenario())
    sums, applied = alone.step(rows, version=0)
    assert first.loss == pytest.approx(sums.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(applied.grad_norm, rel=1e-5)
    assert (first.lr, first.skipped) == (applied.lr, False)
    assert first.entropy == pytest.approx(sums.entropy / sums.tokens, rel=1e-5)
    assert (first.tokens, first.sequences) == (sum(i.total_tokens for i in items), len(items))
    assert first.response_tokens == sums.tokens
    assert first.logprob_gap_max == pytest.approx(sums.gap_max, rel=1e-4)
    parts = (first.pack_s, first.forward_s, first.backward_s, first.optimizer_s)
    assert all(parts) and max(p or 0.0 for p in parts) <= first.step_s
    alone.step(rows, version=0)
    second, resumed = (dict(load(str(tmp_path / name)).named_parameters()) for name in ("second", "resumed"))
    for name, tensor in alone.named_full_parameters():
        torch.testing.assert_close(second[name].data, tensor, rtol=0, atol=1e-5)
        torch.testing.assert_close(resumed[name].data, second[name].data, rtol=0, atol=1e-6)
    assert again.lr > first.lr


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_adapters_on_two_ranks_take_the_steps_of_one(
    two_ranks: LearnerGroup, start_model: str, rolled: list[Rolled], zero_stage: int
) -> None:
    def stepped(
        core: RankCore, config: LearnerConfig, rows: list[list[list[Sample]]]
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        other = RankCore(config, LossConfig(), core.temperature, rank=core.rank, world_size=core.world_size)
        norms = [other.step(rows[core.rank], version=0)[1].grad_norm for _ in range(3)]
        return norms, {name: tensor.clone() for name, tensor in other.named_full_parameters()}

    lora = LoraConfig(rank=3, alpha=12.0)
    items = items_of(rolled)
    alone = lone_core(start_model, max_tokens=FOUR_ROWS, lora=lora)
    start = parameters(alone)
    rows = rows_of(items, Aggregation.PROMPT_MEAN, 1, FOUR_ROWS)[0]
    norms = [alone.step(rows, version=0)[1].grad_norm for _ in range(3)]
    wanted = parameters(alone)
    changed = {name for name in wanted if not torch.equal(wanted[name], start[name])}
    assert len(changed) == 2 * 7  # the linear layers of both blocks, and nothing else

    config = configured(start_model, zero_stage=zero_stage, max_tokens=FOUR_ROWS, ranks=2, lora=lora)
    both = rows_of(items, Aggregation.PROMPT_MEAN, 2, FOUR_ROWS)
    for got_norms, got in asyncio.run(two_ranks.on_ranks(stepped, config, both)):
        assert got_norms == pytest.approx(norms, rel=1e-4)
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5 if name in changed else 0)


def test_publish_hands_whole_parameters_to_the_engines(
    two_ranks: LearnerGroup, rolled: list[Rolled], tmp_path: Path
) -> None:
    """The engines' real side is proved with vLLM elsewhere; here one records what it is told."""
    import ray

    from rollout.engine_pool import TransferTarget

    class Recorder:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def start_weight_update(self) -> None:
            self.calls.append("start")

        def update_weights(self, request: Any) -> None:
            for chunk in request.update_info["chunks"]:
                arrays = ray.get(chunk["ref"])
                self.calls.append(dict(zip(chunk["names"], [bytes(array) for array in arrays], strict=True)))

        def finish_weight_update(self, version: int) -> None:
            self.calls.append(version)

        def recorded(self) -> list[Any]:
            return self.calls

    @dataclass(frozen=True)
    class Pool:
        handles: tuple[Any, ...]

        def transfer_target(self) -> TransferTarget:
            return TransferTarget(backend="ray_object", handles=self.handles, workers_per_replica=1)

        def remember(self, version: int, update_info: Any) -> None:
            assert [set(chunk) for chunk in update_info["chunks"]] == [{"names", "dtypes", "shapes", "ref"}]

    engine = ray.remote(Recorder).remote()
    items = items_of(rolled)

    async def scenario() -> list[float]:
        seconds = [await two_ranks.publish(Pool((engine,)), 5)]  # type: ignore[arg-type]
        assert two_ranks.version == 5
        await two_ranks.train_step(items)
        seconds.append(await two_ranks.publish(Pool((engine,)), 6))  # type: ignore[arg-type]
        await two_ranks.export_hf(tmp_path)
        return seconds

    assert min(asyncio.run(scenario())) > 0.0
    first_start, first, five, second_start, second, six = ray.get(engine.recorded.remote())
    assert (first_start, five, second_start, six) == ("start", 5, "start", 6)
    assert first != second
    want = {name: tensor.detach().numpy().tobytes() for name, tensor in load(str(tmp_path)).named_parameters()}
    assert second == want


def test_errors_name_rank_and_remedy(two_ranks: LearnerGroup, rolled: list[Rolled], tmp_path: Path) -> None:
    items = items_of(rolled)
    wrong = replace(items[0], response_tokens=items[0].response_tokens + 1)
    too_long = replace(items[0], total_tokens=FOUR_ROWS + 1)

    async def scenario() -> None:
        with pytest.raises(LearnerError, match=r"learner\.max_tokens_per_microbatch"):
            await two_ranks.train_step([too_long])
        with pytest.raises(LearnerError, match="batch is empty"):
            await two_ranks.train_step([])
        with pytest.raises(LearnerError, match=r"learner rank [01] of 2: .* holds no learner state"):
            await two_ranks.load(tmp_path)
        with pytest.raises(LearnerError, match=rf"learner rank [01] of 2: trajectory {wrong.trajectory_id} has"):
            await two_ranks.train_step([wrong, wrong])

    asyncio.run(scenario())


def _is_lost(reference: Any) -> bool:
    import ray
    from ray.exceptions import OwnerDiedError

    try:
        ray.get(reference)
    except OwnerDiedError:
        return True
    return False


def _until_lost(references: list[Any]) -> None:
    """An owner's death is known a moment after it."""
    deadline = time.monotonic() + 60
    while not all(_is_lost(reference) for reference in references):
        assert time.monotonic() < deadline, "Ray still has what a dead process owned"
        time.sleep(0.05)


def test_a_payload_lost_with_its_owner_is_told_before_the_step_or_read_from_its_file(
    two_ranks: LearnerGroup, rolled: list[Rolled], tmp_path: Path
) -> None:
    """One payload of each rank's share goes, and with it the process that owned it."""
    import ray

    class Owner:
        def put(self, payloads: list[Payload]) -> list[Any]:
            return [ray.put(payload) for payload in payloads]

    items = items_of(rolled)
    owner = ray.remote(num_cpus=0)(Owner).remote()
    gone = ray.get(owner.put.remote([items[0].payload, items[-1].payload]))
    ray.kill(owner)
    _until_lost(gone)
    by_reference = [replace(item, payload=ray.put(item.payload)) for item in items]
    by_reference[0] = replace(items[0], payload=gone[0])
    by_reference[-1] = replace(items[-1], payload=gone[1])
    lost = {items[0].trajectory_id, items[-1].trajectory_id}

    def kept(item: BatchItem) -> Path:
        found = trajectory_of(item)
        return write_rollout(
            tmp_path, found, item.payload, Transcript(trajectory_id=item.trajectory_id, turns=(), patch="", test_log="")
        )

    async def scenario() -> None:
        await two_ranks.save(tmp_path / "state")
        with pytest.raises(PayloadsLost) as e:
            await two_ranks.train_step(by_reference)
        assert set(e.value.reasons) == lost
        assert all("OwnerDiedError" in why and "no rollouts are kept" in why for why in e.value.reasons.values())
        half = [replace(by_reference[0], file=kept(items[0])), *by_reference[1:]]
        with pytest.raises(PayloadsLost) as e:
            await two_ranks.train_step(half)
        assert set(e.value.reasons) == {items[-1].trajectory_id}
        restored = await two_ranks.train_step([*half[:-1], replace(half[-1], file=kept(items[-1]))])
        await two_ranks.load(tmp_path / "state")
        whole = await two_ranks.train_step(items)
        assert (restored.loss, restored.grad_norm, restored.tokens) == (whole.loss, whole.grad_norm, whole.tokens)
        others = await two_ranks.train_step([item for item in by_reference if item.trajectory_id not in lost])
        assert others.sequences == len(items) - 2 and not others.skipped
        await two_ranks.load(tmp_path / "state")

    asyncio.run(scenario())


def trajectory_of(item: BatchItem) -> Trajectory:
    return Trajectory(
        trajectory_id=item.trajectory_id,
        group_id=item.group_id,
        task_id="task",
        source="code",
        status=Status.SUBMITTED,
        reward=1.0,
        passed=True,
        turns=1,
        prompt_tokens=0,
        response_tokens=item.response_tokens,
        total_tokens=item.total_tokens,
        policy_versions=(0,),
        payload_sha256=item.payload.sha256(),
        engine_s=0.0,
        sandbox_s=0.0,
        verify_s=0.0,
        wall_s=0.0,
    )


def test_a_dead_rank_is_a_learner_error(ray_session: None, start_model: str) -> None:
    def die(core: RankCore) -> None:
        import os

        os._exit(1)

    group = LearnerGroup(configured(start_model), LossConfig(), TEMPERATURE)
    with pytest.raises(LearnerError, match="not started"):
        asyncio.run(group.on_ranks(die))
    group.start()
    asyncio.run(group.ready())
    assert group.start_s is not None
    with pytest.raises(LearnerError, match=r"learner rank 0 of 1 died in die; look for a kill for memory"):
        asyncio.run(group.on_ranks(die))
    group.shutdown()
    group.shutdown()


@pytest.mark.parametrize(
    ("fault", "limits", "message"),
    [
        (signal.SIGSTOP, {"silent_after_s": 1.0}, r"learner rank 0 of 1 gave no sign of life for 1 s in hang"),
        (None, {"learner_timeout_s": 3.0}, r"hang took longer than supervision\.learner_timeout_s = 3 s"),
    ],
    ids=["stopped", "waiting"],
)
def test_a_rank_that_hangs_is_a_learner_error(
    ray_session: None,
    start_model: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: signal.Signals | None,
    limits: dict[str, float],
    message: str,
) -> None:
    def pid(core: RankCore) -> int:
        import os

        return os.getpid()

    def hang(core: RankCore, fault: int | None) -> None:
        import os
        import time

        if fault is not None:
            os.kill(os.getpid(), fault)
        time.sleep(600)

    monkeypatch.setattr("learner.group._PING_S", 0.2)
    group = LearnerGroup(configured(start_model), LossConfig(), TEMPERATURE, SupervisionConfig(**limits))
    group.start()
    asyncio.run(group.ready())
    (process,) = asyncio.run(group.on_ranks(pid))
    with pytest.raises(LearnerError, match=message):
        asyncio.run(asyncio.wait_for(group.on_ranks(hang, fault), 30))
    group.shutdown()
    deadline_s = time.monotonic() + 30
    while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{process}")
