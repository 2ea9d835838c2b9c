"""Adapters: gradients by the chain rule from those of whole weights, merged weights for the engines, exact resume.

Two ranks with adapters are in test_group.py, where two ranks run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_llama import LAYERS, VOCAB, save_small_llama
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from configs.schema import EngineConfig, LearnerConfig, LoraConfig, LossConfig, OptimizerConfig
from infra.errors import LearnerError
from learner.packing import Sample, build_row
from learner.publish import Publisher
from learner.rank import RankCore
from rollout.context import Context, join
from rollout.engine_pool import EnginePool
from rollout.trajectory import Payload

pytestmark = pytest.mark.e2e

LORA = LoraConfig(rank=3, alpha=12.0, target_modules=("q_proj", "o_proj", "down_proj"))
SCALE = 12.0 / 3


@pytest.fixture(scope="module")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_small_llama(folder)
    return str(folder)


def samples() -> list[Sample]:
    rng = np.random.default_rng(3)
    found = []
    for length, advantage in ((30, 1.0), (21, -0.5), (12, 0.3)):
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        payload = Payload(
            token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -3.5, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        found.append(Sample(payload=payload, advantage=advantage, weight=1.0 / int(mask.sum())))
    return found


def core_of(model: str, *, zero_stage: int, lora: LoraConfig | None = LORA) -> RankCore:
    config = LearnerConfig(
        model=model,
        zero_stage=zero_stage,
        threads=1,
        lora=lora,
        logprob_chunk_tokens=16,
        optimizer=OptimizerConfig(lr=3e-2, weight_decay=0.0, warmup_steps=0),
    )
    return RankCore(config, LossConfig(), 1.0)


def whole(core: RankCore) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in core.named_full_parameters()}


def adapters(core: RankCore) -> dict[str, torch.Tensor]:
    import deepspeed

    found = {}
    for name, parameter in core.engine.module.named_parameters():
        if ".lora_" in name:
            with deepspeed.zero.GatheredParameters([parameter], enabled=core.config.zero_stage == 3):
                found[name] = parameter.data.clone()
    return found


def reference(folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of every whole weight of the exported policy, by plain autograd over single sequences (M5.1)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = torch.zeros(())
    for sample in samples():
        ids, mask = torch.from_numpy(sample.payload.token_ids).long(), torch.from_numpy(sample.payload.loss_mask[1:])
        log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        logp = log_probs.gather(-1, ids[1:, None])[:, 0][mask]
        ratio = (logp - torch.from_numpy(sample.payload.logprobs[1:])[mask]).exp()
        kept = (ratio >= 0.2) & (ratio <= 5.0)
        total = total - (sample.advantage * sample.weight * ratio * kept).sum()
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_adapters_train_and_everybody_else_gets_whole_weights(
    start_model: str, zero_stage: int, tmp_path: Path
) -> None:
    core = core_of(start_model, zero_stage=zero_stage)
    start = whole(core)
    stored = dict(AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).named_parameters())
    assert [name for name, _ in core.policy_parameters()] == list(start)
    assert start.keys() == stored.keys()
    assert all(torch.equal(start[name], stored[name]) for name in start)  # B is 0: the policy is the start model

    core.step([samples()], version=0)
    now = whole(core)
    changed = {name for name in now if not torch.equal(now[name], start[name])}
    assert changed == {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(LAYERS)
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    parts = adapters(core)
    for name in changed:
        stem = name.removesuffix("weight")
        delta = SCALE * parts[f"{stem}lora_B.default.weight"] @ parts[f"{stem}lora_A.default.weight"]
        torch.testing.assert_close(now[name] - start[name], delta, rtol=0, atol=1e-6)

    # The exported folder is the policy: its gradients and probabilities are the learner's.
    core.export_hf(str(tmp_path / "policy"))
    exported = reference(tmp_path / "policy")
    assert exported.keys() == start.keys()
    sums = core.accumulate([samples()], version=0)
    got = core.gradients()
    assert got.keys() == parts.keys()
    for name in changed:
        stem = name.removesuffix("weight")
        a, b = parts[f"{stem}lora_A.default.weight"], parts[f"{stem}lora_B.default.weight"]
        for part, want in (("lora_A", SCALE * b.T @ exported[name]), ("lora_B", SCALE * exported[name] @ a.T)):
            error = (got[f"{stem}{part}.default.weight"] - want).norm() / want.norm()
            assert float(error) < 1e-5, (name, part)
    assert sums.gap == pytest.approx(gap(tmp_path / "policy"), rel=1e-4)


@torch.no_grad()
def gap(folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for sample in samples():
        row = build_row([sample])
        logits = model(input_ids=torch.from_numpy(row.token_ids)[None], use_cache=False).logits[0]
        logp = logits[torch.from_numpy(row.predictors)].log_softmax(-1)
        found = logp.gather(-1, torch.from_numpy(row.targets)[:, None])[:, 0]
        total += float((found - torch.from_numpy(row.logprobs)).abs().sum())
    return total


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_resume_is_exact_and_holds_no_frozen_weights(start_model: str, zero_stage: int, tmp_path: Path) -> None:
    core = core_of(start_model, zero_stage=zero_stage)
    core.step([samples()], version=0)
    core.save(str(tmp_path), 4)
    core.step([samples()], version=0)
    again = core_of(start_model, zero_stage=zero_stage)
    assert again.load(str(tmp_path)) == 4
    again.step([samples()], version=0)
    want = whole(core)
    assert all(torch.equal(tensor, want[name]) for name, tensor in whole(again).items())
    if zero_stage == 0:
        kept = torch.load(next(tmp_path.rglob("*model_states.pt")), weights_only=False)["module"]
        assert kept.keys() == adapters(core).keys()
        with pytest.raises(LearnerError, match=r"learner\.lora=\{'rank': 3.*, this run has None; resume with"):
            core_of(start_model, zero_stage=0, lora=None).load(str(tmp_path))


async def test_an_engine_that_got_adapters_gives_the_learners_probabilities(ray_session: None, tmp_path: Path) -> None:
    """Real transfer into a real engine: what it samples has the probabilities of adapters beside frozen weights."""
    folder = str(tmp_path)
    wide = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,  # 32 per head: the least that the CPU kernels know
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(wide).save_pretrained(folder)
    pool = EnginePool(EngineConfig(model=folder, max_model_len=128, max_num_seqs=8, kv_cache_gib=0.1))
    pool.start()  # while the learner loads
    core = core_of(folder, zero_stage=0, lora=LoraConfig(rank=3, alpha=12.0))
    for _ in range(3):
        core.step([samples()], version=0)
    await pool.ready(180)
    try:
        before = core.accumulate([await sampled(pool, "before")], version=0)
        publisher = Publisher(
            pool.transfer_target(), rank=0, parameters=core.policy_parameters(), full=core.named_full_parameters
        )
        await asyncio.to_thread(publisher.publish, 3)
        after = core.accumulate([await sampled(pool, "after")], version=3)
    finally:
        await pool.shutdown()
    assert before.fresh == after.fresh == 6 * 20
    assert before.gap_max > 0.05  # the adapters have changed the policy
    assert after.gap_max < 1e-3


async def sampled(pool: EnginePool, name: str) -> list[Sample]:
    """Six sequences of twenty tokens from the engine, as the learner gets them."""
    client = pool.client()

    async def one(index: int) -> Sample:
        prompt = [(5 * index + j) % VOCAB for j in range(4 + index)]
        generation = await client.generate(
            request_id=f"{name}-{index}/0", prompt_ids=prompt, max_tokens=20, temperature=1.0, stop_ids=()
        )
        context = Context()
        context.show(prompt)
        context.take(generation)
        return Sample(payload=join([context]), advantage=0.0, weight=1.0)

    return list(await asyncio.gather(*(one(index) for index in range(6))))


@pytest.mark.parametrize("bad", ["embed_tokens", "lm_head", "no_such_layer"])
def test_what_cannot_be_adapted_is_refused(start_model: str, bad: str) -> None:
    with pytest.raises(LearnerError, match=rf"learner\.lora\.target_modules=q_proj, {bad}.*name linear layers"):
        core_of(start_model, zero_stage=0, lora=LoraConfig(target_modules=("q_proj", bad)))


def any_dtype(core: Any) -> set[torch.dtype]:
    return {parameter.dtype for parameter in core.engine.module.parameters()}


def test_bfloat16_adapters_step(start_model: str) -> None:
    config = LearnerConfig(
        model=start_model, zero_stage=1, threads=1, dtype="bfloat16", gradient_checkpointing=True, lora=LORA
    )
    core = RankCore(config, LossConfig(), 1.0)
    assert any_dtype(core) == {torch.bfloat16}
    _, applied = core.step([samples()], version=0)
    assert not applied.skipped and applied.grad_norm > 0.0
