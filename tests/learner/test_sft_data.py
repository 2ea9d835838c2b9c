"""Supervised examples: the tokens of a rollout, and loss on exactly what the model has to write."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import configs
from configs.sft_schema import GraderData, GraderShares, PolicyData, SftSource
from envs.replay import replay
from envs.task import ExpertTrace, Split
from infra.errors import ConfigError
from learner.sft_data import Conversation, PolicyExamples, choose, conversation_of, render
from learner.sft_grader import GraderExamples
from learner.sft_grader import render as render_grading
from learner.tokenizer_training import END, save_tokenizer, train_tokenizer
from rollout.chat import ChatFormat

DATA = PolicyData(
    type="policy",
    sources={
        "minirepo": SftSource(type="minirepo", share=2, seed=3, strategies={"clean": 3, "no_edit": 1}),
        "arith": SftSource(type="arith", share=1, seed=4, strategies={"answer": 1}),
    },
)


@pytest.fixture(scope="module")
def policy() -> PolicyExamples:
    return PolicyExamples(DATA)


@pytest.fixture(scope="module")
def folder(policy: PolicyExamples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    texts = [text for index in range(60) for text in policy.texts(index)]
    save_tokenizer(train_tokenizer(texts, vocab_size=400, max_piece_chars=8, model_max_length=512), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(str(folder))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return ChatFormat.load(str(folder))


@pytest.mark.parametrize(
    "text",
    [
        "sed -i '12s/quux_frobnicator/Zyxwv2/' never/seen.py",
        '    return übermäßig["ключ"]  # 漢字\n\n\tend',
        "12:    if a <= b:\r\n",
        "",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, chat: ChatFormat, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert chat.decode(chat.encode(text)) == text


def test_a_name_has_the_same_tokens_wherever_it_stands(chat: ChatFormat) -> None:
    name = chat.encode("zorvak")
    for text in ("def zorvak(x)", "'zorvak'", "a.zorvak", "12:zorvak"):
        ids = chat.encode(text)
        assert any(ids[i : i + len(name)] == name for i in range(len(ids)))


def test_numbers_are_spelled_digit_by_digit(chat: ChatFormat) -> None:
    assert len(chat.encode("1234")) == 4


def test_an_example_is_what_the_checkpoints_own_template_renders(
    policy: PolicyExamples, tokenizer: PreTrainedTokenizerFast, chat: ChatFormat
) -> None:
    for index in range(20):
        conversation = policy.conversation(index)
        messages = [{"role": "user", "content": conversation.statement}]
        for action, observation in conversation.turns:
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        text = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
        assert render(chat, None, conversation).token_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_an_example_is_built_as_the_agent_loop_builds_it(policy: PolicyExamples, chat: ChatFormat) -> None:
    conversation = next(c for c in map(policy.conversation, range(50)) if len(c.turns) > 2)
    ids = chat.initial(None, conversation.statement)
    for action, observation in conversation.turns:
        ids += chat.reply(action)
        if action != "submit":
            ids += chat.extend(observation, ended=True)
    assert render(chat, None, conversation).token_ids.tolist() == ids


def test_loss_covers_exactly_the_assistants_tokens(
    policy: PolicyExamples, tokenizer: PreTrainedTokenizerFast, chat: ChatFormat
) -> None:
    for index in range(20):
        conversation = policy.conversation(index)
        example = render(chat, None, conversation)
        written = tokenizer.decode(example.token_ids[example.loss_mask].tolist())
        assert written == "".join(action + END for action, _ in conversation.turns)
        shown = [conversation.statement, *(observation for _, observation in conversation.turns[:-1])]
        read = tokenizer.decode(example.token_ids[~example.loss_mask].tolist())
        assert read == "".join(f"<|user|>{text}{END}<|assistant|>" for text in shown)


def test_a_system_prompt_is_read_and_not_learned(tokenizer: PreTrainedTokenizerFast, chat: ChatFormat) -> None:
    example = render(chat, "be brief", Conversation(statement="2 + 2?", turns=(("4", ""),)))
    assert tokenizer.decode(example.token_ids.tolist()) == (
        f"<|system|>be brief{END}<|user|>2 + 2?{END}<|assistant|>4{END}"
    )
    assert int(example.loss_mask.sum()) == 2


def test_observations_are_those_of_the_replayed_commands(policy: PolicyExamples) -> None:
    source = policy.source("minirepo")
    trace = next(t for t in source.experts(source.task(Split.TRAIN, 5)) if t.strategy == "no_edit")
    (output, _), *_ = replay(trace.task, trace.actions)
    conversation = conversation_of(trace, observation_chars=10_000)
    assert conversation.turns[0] == (trace.actions[0], output.rstrip("\n"))
    assert conversation.turns[-1] == ("submit", "")
    cut = conversation_of(trace, observation_chars=20)
    assert "characters cut]" in cut.turns[0][1]


def test_example_number_i_depends_on_i_alone(policy: PolicyExamples) -> None:
    again = PolicyExamples(DATA)
    assert [again.conversation(i) for i in (9, 3)] == [policy.conversation(9), policy.conversation(3)]


def test_long_examples_are_passed_over(policy: PolicyExamples, chat: ChatFormat) -> None:
    stream = policy.examples(chat, max_tokens=100)
    assert max(len(next(stream).token_ids) for _ in range(10)) <= 100


def test_strategies_follow_their_shares() -> None:
    import random

    source = PolicyExamples(DATA).source("minirepo")
    traces: list[ExpertTrace] = list(source.experts(source.task(Split.TRAIN, 0)))
    rng = random.Random(0)
    drawn = [choose(traces, {"clean": 3.0, "no_edit": 1.0, "unheard_of": 9.0}, rng).strategy for _ in range(2000)]
    assert set(drawn) == {"clean", "no_edit"}
    assert np.mean([name == "clean" for name in drawn]) == pytest.approx(0.75, abs=0.04)


def test_a_strategy_without_expert_is_refused_by_name() -> None:
    sources = {"code": SftSource(type="minirepo", share=1, strategies={"cleen": 1})}
    with pytest.raises(ConfigError, match=r"data\.sources\.code\.strategies.*'cleen'.*choose from.*clean"):
        PolicyExamples(PolicyData(type="policy", sources=sources))


def test_grader_conversations_are_of_every_kind_and_repeat() -> None:
    data = GraderData(type="grader", seed=1, group_sizes=(4, 4), shares=GraderShares(agent=1, candidate=1, single=1))
    made = GraderExamples(data)
    openings = [made.conversation(index)[0][1] for index in range(30)]
    summaries = Counter(text.partition("## candidates\n")[2].count(" turns: ") for text in openings)
    assert set(summaries) == {0, 1, 4}  # single shows patches instead; candidate one; agent the whole group
    assert [GraderExamples(data).conversation(index)[0][1] for index in range(5)] == openings[:5]


def test_only_what_the_grader_writes_carries_loss() -> None:
    chat = ChatFormat.load(str(Path(configs.__file__).parent / "checkpoints" / "grader"))
    made = GraderExamples(GraderData(type="grader", seed=1, group_sizes=(4, 4)))
    conversation = made.conversation(2)
    example = render_grading(chat, conversation)
    written = [int(token) for token in example.token_ids[example.loss_mask]]
    assert written == [token for role, text in conversation if role == "assistant" for token in chat.reply(text)]
    assert example.token_ids[: len(chat.initial(None, conversation[0][1]))].tolist() == chat.initial(
        None, conversation[0][1]
    )
