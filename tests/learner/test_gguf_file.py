"""GGUF files written here from known models: the folder holds the same weights, tokens and template, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from infra.errors import ConfigError
from learner.gguf_file import convert_gguf
from rollout.chat import ChatFormat

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "1 2"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CODE = 'def f(x):\n\tif x == 12345:\n        return "naïve 🎉"  # ok\n'


def vocabulary() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def make_model(family: str) -> Any:
    """A random model of two layers, every parameter of its own."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": family != "untied",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    }
    model = Qwen2ForCausalLM(Qwen2Config(**shape)) if family == "qwen2" else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def gguf_name(module: str) -> str:
    """llama.cpp's name of a module."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    if module in parts:
        return parts[module]
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{parts[part]}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order: 2 i is row i of a head, 2 i + 1 is row i of its second half."""
    half = len(weight) // heads // 2
    order = [head * 2 * half + i + part * half for head in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def write_gguf(path: Path, model: Any, architecture: str, **changes: Any) -> Path:
    """What llama.cpp's converter writes of such a model. `changes`: see the tests."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    tokens = [*vocabulary(), *changes.get("tokens", ())]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in changes.get("keys", {}).items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(key, value)
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        short = gguf_name(stem)
        array = parameter.detach().numpy()
        if architecture == "llama" and short.endswith("attn_q"):
            array = interleaved(array, config.num_attention_heads)
        elif architecture == "llama" and short.endswith("attn_k"):
            array = interleaved(array, config.num_key_value_heads)
        if short not in changes.get("without", ()):
            writer.add_tensor(f"{short}.{leaf}", array)
    for name in changes.get("extra", ()):
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["tied", "untied", "qwen2"])
def test_the_folder_is_the_model(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    architecture = "qwen2" if family == "qwen2" else "llama"
    source = write_gguf(tmp_path / "model.gguf", model, architecture)
    done = convert_gguf(source, tmp_path / "out")
    assert (done.vocabulary, done.chat_template) == (len(vocabulary()), True)
    assert done.parameters == sum(parameter.numel() for parameter in model.parameters())

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(model) and loaded.dtype == torch.float32
    wanted = dict(model.named_parameters())
    assert dict(loaded.named_parameters()).keys() == wanted.keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():  # the configuration is the model's too: rotation, norms, heads
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (loaded.generation_config.eos_token_id, loaded.config.eos_token_id) == (2, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [("smollm", ["ĠĠĠĠ", "1", "2"]), ("gpt-2", ["ĠĠ", "Ġ", "Ġ", "12"]), ("qwen2", ["ĠĠ", "Ġ", "Ġ", "1", "2"])],
)
def test_text_is_split_as_the_file_says(pre: str, words: list[str], tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "model.gguf", make_model("tied"), "llama", pre=pre), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("    12") == words
    for text in (CODE, "<|im_end|>", "  \n\n  x"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_chats_are_what_the_template_says(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "model.gguf", make_model("tied"), "llama"), tmp_path / "out")
    chat = ChatFormat.load(str(tmp_path / "out"))
    assert (chat.end_id, chat.stop_ids) == (2, (2,))
    prompt = chat.initial("Be brief.", CODE)
    text = AutoTokenizer.from_pretrained(tmp_path / "out").decode(prompt)
    assert text == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{CODE}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [token for token in prompt if token < len(SPECIAL)] == [1, 2, 1, 2, 1]
    assert 2 not in chat.encode("a<|im_end|>b")


def test_a_leading_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    keys = {"tokenizer.ggml.add_bos_token": True}
    convert_gguf(write_gguf(source, make_model("tied"), "llama", keys=keys), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("1") == [1, vocabulary().index("1")]
    assert tokenizer.encode("1", add_special_tokens=False) == [vocabulary().index("1")]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("mamba", {}, r"general\.architecture=mamba is not converted, only llama, qwen2, qwen3"),
        ("llama", {"keys": {"llama.rope.scaling.type": "linear"}}, r"are scaled \(rope\.scaling\.type=linear\)"),
        ("llama", {"extra": ["rope_freqs.weight"]}, r"are scaled \(tensor rope_freqs\.weight\)"),
        ("llama", {"extra": ["blk.0.ffn_gate_inp.weight"]}, r"1 tensors have no place .* blk\.0\.ffn_gate_inp\.weight"),
        (
            "llama",
            {"without": ["blk.1.ffn_up"]},
            r"has nothing for model\.layers\.1\.mlp\.up_proj\.weight, .* \(96, 64\)",
        ),
        ("llama", {"tokenizer": "llama"}, r"tokenizer\.ggml\.model=llama is not converted, only gpt2"),
        ("llama", {"pre": "olmo"}, r"tokenizer\.ggml\.pre=olmo: how it splits text is not known.*smollm"),
        ("llama", {"tokens": ["ab", "cd"]}, r"it has 264 tokens and embeddings for 262"),
    ],
)
def test_what_would_come_out_wrong_is_refused(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "model.gguf", make_model("tied"), architecture, **changes)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "model.gguf", make_model("tied"), "llama").read_bytes()
    for content in (b"", b"GGUF", b"no such thing", whole[:900], whole[:-1000]):
        source = tmp_path / "bad.gguf"
        source.write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.gguf: cannot be read as a GGUF file .*give a whole \.gguf file"):
            convert_gguf(source, tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")
    with pytest.raises(ConfigError, match="is there already"):
        convert_gguf(tmp_path / "model.gguf", tmp_path)
