"""Rows: who goes where, and that packing changes no log-probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MistralConfig

from learner.attention import PACKED, implementation, register
from learner.packing import Sample, balance, build_row, pack, plan
from rollout.trajectory import Payload

VOCAB = 50


def payload(rng: np.random.Generator, length: int) -> Payload:
    mask = rng.random(length) < 0.6
    mask[0] = False
    return Payload(
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
    )


def test_balance_gives_the_longest_to_the_least_loaded() -> None:
    # 9 -> A, 7 -> B, 6 -> B (7 < 9), 4 -> A (9 < 13), 2 -> A or B: both 13, the first.
    assert balance([4, 9, 2, 7, 6], 2) == [[1, 0, 2], [3, 4]]


def test_pack_is_first_fit_decreasing() -> None:
    # 9 opens a row, 7 the next, 3 fits beside 7, 1 beside 9.
    assert pack([3, 9, 1, 7], 10) == [[1, 2], [3, 0]]


@given(
    st.lists(st.integers(1, 40), max_size=30),
    st.integers(1, 4),
    st.integers(40, 90),
)
def test_a_plan_places_each_sequence_once_and_keeps_ranks_in_step(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    layout = plan(lengths, ranks, max_tokens)
    assert len(layout) == ranks
    assert len({len(rows) for rows in layout}) == 1
    assert len(layout[0]) >= 1
    assert sorted(i for rows in layout for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= max_tokens for rows in layout for row in rows)
    loads = [sum(lengths[i] for row in rows for i in row) for rows in layout]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        plan([3, 11], 1, 10)


def test_row_by_hand() -> None:
    first = Payload(
        token_ids=np.array([5, 6, 7], np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0.0, -0.1, -0.2], np.float32),
        versions=np.array([-1, 4, 5], np.int32),
    )
    second = Payload(
        token_ids=np.array([8, 9], np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0.0, -0.3], np.float32),
        versions=np.array([-1, 5], np.int32),
    )
    row = build_row(
        [Sample(payload=first, advantage=1.0, weight=0.5), Sample(payload=second, advantage=-2.0, weight=0.25)]
    )
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert row.boundaries == (0, 3, 5)
    assert row.predictors.tolist() == [0, 1, 3]
    assert row.targets.tolist() == [6, 7, 9]
    assert row.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert row.advantages.tolist() == [1.0, 1.0, -2.0]
    assert row.weights.tolist() == [0.5, 0.5, 0.25]
    assert row.versions.tolist() == [4, 5, 5]


def test_an_empty_row_can_be_run_and_bears_no_loss() -> None:
    row = build_row([])
    assert row.token_ids.shape == row.position_ids.shape == (1,)
    assert row.targets.shape == row.weights.shape == (0,)


def test_loss_on_the_first_token_is_refused() -> None:
    bad = Payload(
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.array([True, True]),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )
    with pytest.raises(ValueError, match="first token"):
        build_row([Sample(payload=bad, advantage=1.0, weight=1.0)])


def target_logprobs_of(logits: torch.Tensor, targets: np.ndarray) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(targets)[:, None])[:, 0]


@torch.no_grad()
def logprobs(model: LlamaForCausalLM, samples: list[Sample]) -> torch.Tensor:
    row = build_row(samples)
    logits = model(
        input_ids=torch.from_numpy(row.token_ids)[None],
        position_ids=torch.from_numpy(row.position_ids)[None],
        use_cache=False,
        logits_to_keep=torch.from_numpy(row.predictors),
        cu_seq_lens_q=row.boundaries,
    ).logits[0]
    return target_logprobs_of(logits, row.targets)


@pytest.mark.parametrize("attention", [PACKED, "sdpa", "eager"])
def test_packed_logprobs_equal_unpacked_ones(attention: str) -> None:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,  # attention far from uniform, so that a leak between sequences would show
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    samples = [Sample(payload=payload(rng, n), advantage=1.0, weight=1.0) for n in (17, 1, 2, 40, 9)]
    alone = torch.cat([logprobs(model, [sample]) for sample in samples])
    packed = logprobs(model, samples)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    model.set_attn_implementation("eager")  # and they are those of another implementation
    torch.testing.assert_close(packed, logprobs(model, samples), rtol=0, atol=1e-5)
    # Without the restarts the sequences see each other: the equality above is the mask's work.
    row = build_row(samples)
    leaking = model(
        input_ids=torch.from_numpy(row.token_ids)[None],
        position_ids=torch.arange(len(row.token_ids))[None],
        use_cache=False,
        logits_to_keep=torch.from_numpy(row.predictors),
    ).logits[0]
    mixed = target_logprobs_of(leaking.detach(), row.targets)
    assert (mixed - alone).abs().max() > 0.1


def test_the_implementation_suits_model_and_device() -> None:
    plain = LlamaConfig()
    assert implementation(plain, flash=True) == "flash_attention_2"
    assert implementation(plain, flash=False) == PACKED
    assert implementation(MistralConfig(sliding_window=64), flash=False) == "sdpa"
    assert implementation(GPT2Config(), flash=False) == "sdpa"


def test_contexts_of_a_trajectory_are_sequences_of_their_own_with_its_advantage_and_weight() -> None:
    rng = np.random.default_rng(1)
    first, second, other = payload(rng, 5), payload(rng, 4), payload(rng, 3)
    joined = Payload(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        loss_mask=np.concatenate([first.loss_mask, second.loss_mask]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        versions=np.concatenate([first.versions, second.versions]),
        contexts=(0, 5),
    )
    row = build_row(
        [Sample(payload=other, advantage=-2.0, weight=0.5), Sample(payload=joined, advantage=3.0, weight=0.25)]
    )
    assert row.boundaries == (0, 3, 8, 12)
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    apart = build_row(
        [
            Sample(payload=other, advantage=-2.0, weight=0.5),
            Sample(payload=first, advantage=3.0, weight=0.25),
            Sample(payload=second, advantage=3.0, weight=0.25),
        ]
    )
    for name in ("token_ids", "predictors", "targets", "logprobs", "advantages", "weights", "versions"):
        np.testing.assert_array_equal(getattr(row, name), getattr(apart, name))


def test_loss_on_the_first_token_of_a_later_context_is_refused() -> None:
    bad = Payload(
        token_ids=np.zeros(4, np.int32),
        loss_mask=np.array([False, True, True, False]),
        logprobs=np.zeros(4, np.float32),
        versions=np.zeros(4, np.int32),
        contexts=(0, 2),
    )
    with pytest.raises(ValueError, match="first token"):
        build_row([Sample(payload=bad, advantage=1.0, weight=1.0)])
