"""A real engine in its actor, with a random tiny Llama: log-probabilities, weight updates in flight, structured output.

One engine serves the whole file, so the order of the tests matters: the weight update comes late, the loss last.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from configs.schema import EngineConfig
from infra.errors import EngineError
from learner.publish import Publisher
from rollout.engine import EngineClient, Generation
from rollout.engine_pool import EnginePool

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
END = 3
PROMPTS = [[1, *(4 + (7 * i + 13 * j) % 240 for j in range(70 + i)), 3, 2] for i in range(24)]
"""Longer than two blocks of the prefix cache."""


def make_model(folder: Path) -> Any:
    """A random Llama with tied embeddings and a byte-level tokenizer, saved in HF format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", additional_special_tokens=SPECIAL[1:3]
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,  # 32 per head: the least that the CPU kernels know
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def reference(model: Any, prompt: Sequence[int], generation: Generation, temperature: float) -> torch.Tensor:
    """[T] log-probabilities that transformers gives the generated tokens."""
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    logps = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logps.gather(1, ids[0, len(prompt) :, None])[:, 0]


def largest_gap(
    model: Any,
    prompts: list[list[int]],
    generations: list[Generation],
    temperature: float = 1.0,
    version: int | None = None,
) -> float:
    """Over all tokens, or over those that one version sampled."""
    gaps = []
    for p, g in zip(prompts, generations, strict=True):
        gap = (torch.tensor(g.logprobs) - reference(model, p, g, temperature)).abs()
        kept = gap if version is None else gap[torch.tensor(g.versions) == version]
        gaps += kept.tolist()
    return max(gaps)


class Served:
    """The pool, its client, and the model whose weights the engine holds."""

    def __init__(self, pool: EnginePool, model: Any) -> None:
        self.pool = pool
        self.model = model
        self.client: EngineClient = pool.client()
        self.ids = itertools.count()

    async def generate(
        self, prompts: list[list[int]], *, max_tokens: int, temperature: float = 1.0, stop_ids: Sequence[int] = ()
    ) -> list[Generation]:
        calls = [
            self.client.generate(
                request_id=f"group-{next(self.ids)}/0.0",
                prompt_ids=prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                stop_ids=stop_ids,
            )
            for prompt in prompts
        ]
        return list(await asyncio.gather(*calls))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("policy")
    model = make_model(folder)
    pool = EnginePool(EngineConfig(model=str(folder), max_model_len=1024, max_num_seqs=32, kv_cache_gib=0.1))
    pool.start()
    await pool.ready(180)
    yield Served(pool, model)
    await pool.shutdown()


async def test_logprobs_are_those_of_the_sampling_distribution(served: Served) -> None:
    for temperature in (1.0, 0.6):
        generations = await served.generate(PROMPTS[:8], max_tokens=40, temperature=temperature)
        assert largest_gap(served.model, PROMPTS[:8], generations, temperature) < 1e-3
        assert all(g.versions == (0,) * 40 and g.finish_reason == "length" for g in generations)
        assert len({g.token_ids for g in generations}) == 8


async def test_greedy_tokens_are_the_models_best(served: Served) -> None:
    (generation,) = await served.generate(PROMPTS[:1], max_tokens=20, temperature=0.0)
    ids = torch.tensor([[*PROMPTS[0], *generation.token_ids]])
    with torch.no_grad():
        best = served.model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].argmax(-1)
    assert generation.token_ids == tuple(best.tolist())


async def test_stop_token_ends_the_generation_and_is_kept(served: Served) -> None:
    (free,) = await served.generate(PROMPTS[:1], max_tokens=20, temperature=0.0)
    stop = free.token_ids[7]
    (stopped,) = await served.generate(PROMPTS[:1], max_tokens=20, temperature=0.0, stop_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.token_ids)


async def test_prefix_cache_serves_siblings(served: Served) -> None:
    await served.generate(PROMPTS[8:9], max_tokens=1)
    before = await served.pool.stats()
    await served.generate(PROMPTS[8:9] * 3, max_tokens=1)
    after = await served.pool.stats()
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 3 * 64
    assert 0.0 < after.prefix_hit_rate < 1.0


async def test_structured_output_is_compact_json_of_the_schema(served: Served) -> None:
    from tokenizers import Tokenizer

    schema = {
        "type": "object",
        "properties": {"tier": {"enum": ["T1", "T2", "T3"]}, "scores": {"type": "array", "items": {"enum": [1, 2, 3]}}},
        "required": ["tier", "scores"],
        "additionalProperties": False,
    }
    schema["properties"]["scores"] |= {"minItems": 2, "maxItems": 2}  # type: ignore[index]
    generation = await served.client.generate(
        request_id="json/0",
        prompt_ids=PROMPTS[0],
        max_tokens=60,
        temperature=1.0,
        stop_ids=[END],
        json_schema=json.dumps(schema),
    )
    assert generation.finish_reason == "stop"
    text = Tokenizer.from_file(f"{served.pool.config.model}/tokenizer.json").decode(list(generation.token_ids[:-1]))
    value = json.loads(text)
    assert set(value) == {"tier", "scores"}
    assert value["tier"] in {"T1", "T2", "T3"}
    assert len(value["scores"]) == 2
    assert not any(c.isspace() for c in text)


async def test_refused_request_says_why_and_harms_nobody(served: Served) -> None:
    with pytest.raises(EngineError, match=r"refused.*1024"):
        await served.generate([[5] * 2000], max_tokens=5)
    (generation,) = await served.generate(PROMPTS[:1], max_tokens=3)
    assert len(generation.token_ids) == 3


async def test_cancelled_request_leaves_the_engine(served: Served) -> None:
    call = asyncio.create_task(served.generate(PROMPTS[:1], max_tokens=900))
    await running(served, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await running(served, 0)


async def test_weights_change_while_requests_are_in_flight(served: Served) -> None:
    model = served.model
    publisher = Publisher(
        served.pool.transfer_target(), rank=0, parameters=model.named_parameters(), full=model.named_parameters
    )
    old = await served.generate(PROMPTS, max_tokens=8, temperature=1.0)
    flight = asyncio.create_task(served.generate(PROMPTS, max_tokens=700))
    await running(served, len(PROMPTS))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert largest_gap(model, PROMPTS, old) > 0.1, "the new weights must tell the tokens' probabilities apart"
    for version in (1, 2):  # the second update finds layers that were reloaded before
        await asyncio.to_thread(publisher.publish, version)
        served.pool.remember(version, publisher.sent)

    mixed = await flight
    assert all(len(g.token_ids) == 700 for g in mixed)
    for generation in mixed:
        assert list(generation.versions) == sorted(generation.versions)
        assert generation.versions[0] == 0
        assert generation.versions[-1] == 2
    # Also inside a request that was in flight: its context was read again by the weights that went on with it.
    assert largest_gap(model, PROMPTS, mixed, version=2) < 1e-3

    # Same prompts as under the old weights: nothing of their blocks may be served.
    new = await served.generate(PROMPTS, max_tokens=40)
    assert largest_gap(model, PROMPTS, new) < 1e-3
    assert all(g.versions == (2,) * 40 for g in new)
    assert (await served.pool.stats()).version == 2


@pytest.mark.parametrize("steps", [1, 2])
async def test_an_update_that_its_learner_did_not_finish_is_begun_anew_by_the_next(served: Served, steps: int) -> None:
    """The learner's rank died after the pause, or after loading."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    model = served.model
    engine = served.pool.handles[0]
    flight = asyncio.create_task(served.generate(PROMPTS[:4], max_tokens=300))
    await running(served, 4)
    await engine.start_weight_update.remote()
    if steps == 2:
        publisher = Publisher(
            served.pool.transfer_target(), rank=0, parameters=model.named_parameters(), full=model.named_parameters
        )
        publisher.publish(7)
        await engine.start_weight_update.remote()
        await engine.update_weights.remote(WeightTransferUpdateRequest(update_info=publisher.sent))
    torch.manual_seed(steps)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    again = Publisher(
        served.pool.transfer_target(), rank=0, parameters=model.named_parameters(), full=model.named_parameters
    )
    await asyncio.wait_for(asyncio.to_thread(again.publish, 2), 60)
    served.pool.remember(2, again.sent)
    await flight
    assert largest_gap(model, PROMPTS, await served.generate(PROMPTS, max_tokens=40)) < 1e-3


async def test_what_is_sampled_follows_from_weights_prompt_and_id_alone(served: Served) -> None:
    """Not from what else is in the batch, nor from an update (here to the same weights) on the way."""

    async def sample(at_once: int) -> list[tuple[int, ...]]:
        gate = asyncio.Semaphore(at_once)

        async def one(i: int) -> tuple[int, ...]:
            async with gate:
                generation = await served.client.generate(
                    request_id=f"same-{i}/0.0/0", prompt_ids=PROMPTS[0], max_tokens=200, temperature=1.0, stop_ids=()
                )
            return generation.token_ids

        return list(await asyncio.gather(*(one(i) for i in range(24))))

    publisher = Publisher(
        served.pool.transfer_target(),
        rank=0,
        parameters=served.model.named_parameters(),
        full=served.model.named_parameters,
    )
    few, many = await sample(3), await sample(24)
    flight = asyncio.create_task(sample(24))
    await running(served, 24)
    await asyncio.to_thread(publisher.publish, 2)
    served.pool.remember(2, publisher.sent)
    assert few == many == await flight
    assert len(set(few)) == 24


async def test_restarted_engine_serves_the_published_weights(served: Served) -> None:
    import ray

    flight = asyncio.create_task(served.generate(PROMPTS[:4], max_tokens=700))
    await running(served, 4)
    ray.kill(served.pool.handles[0], no_restart=False)
    generations = await flight  # begun anew
    assert largest_gap(served.model, PROMPTS[:4], generations) < 1e-3
    assert all(g.versions == (2,) * 700 for g in generations)
    assert served.pool.restarts == 1


async def test_an_engine_that_hangs_is_ended_and_serves_the_published_weights_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = served.pool
    said: list[str] = []
    monkeypatch.setattr(pool, "say", said.append)
    monkeypatch.setattr(pool, "silent_after_s", 3.0)
    pid = await pool.handles[0].pid.remote()
    flight = asyncio.create_task(served.generate(PROMPTS[:4], max_tokens=300))
    await running(served, 4)
    os.kill(pid, signal.SIGSTOP)
    generations = await asyncio.wait_for(flight, 180)
    assert largest_gap(served.model, PROMPTS[:4], generations) < 1e-3
    assert all(g.versions == (2,) * 300 for g in generations)
    assert pool.restarts == 2
    assert "no sign of life for 3 s" in said[0]
    assert not os.path.exists(f"/proc/{pid}")


async def test_a_new_engine_has_the_published_weights_before_its_first_request(served: Served) -> None:
    pool = served.pool
    pool.resize(2)
    assert (pool.state().starting, len(pool.handles)) == (1, 1), "it is neither asked nor told of updates yet"
    async with asyncio.timeout(180):
        while not pool.state().settled:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    new = EngineClient("policy", pool.handles[1:])
    generations = await asyncio.gather(
        *(
            new.generate(request_id=f"new/{i}", prompt_ids=p, max_tokens=40, temperature=1.0, stop_ids=())
            for i, p in enumerate(PROMPTS[:4])
        )
    )
    assert largest_gap(served.model, PROMPTS[:4], generations) < 1e-3
    assert all(g.versions == (2,) * 40 for g in generations)


async def test_a_drained_engine_finishes_or_hands_over_and_nothing_is_lost(served: Served) -> None:
    pool = served.pool
    assert len(pool.replicas()) == 2
    flight = asyncio.create_task(served.generate(PROMPTS, max_tokens=700))
    await running(served, len(PROMPTS))
    pool.resize(1, drain_s=0.5)
    generations = await flight
    assert [len(g.token_ids) for g in generations] == [700] * len(PROMPTS)
    async with asyncio.timeout(60):
        while not pool.state().settled:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert len(await served.generate(PROMPTS[:4], max_tokens=3)) == 4


async def running(served: Served, count: int) -> None:
    async with asyncio.timeout(60):
        while (await served.pool.stats()).running != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
