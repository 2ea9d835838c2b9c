"""A GGUF file (llama.cpp's format) as a Hugging Face folder: weights unpacked to fp32, tokenizer, chat template.

Transformers reads the file. What it would pass over in silence is refused here instead: tensors that its model has no
place for, scaled rotary embeddings, and text that is split in a way it does not know, which would give other tokens
than the model was trained on.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import ConfigError, StorageError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""llama.cpp's names; Mistral and SmolLM call themselves llama. All have attention that `learner.attention` packs."""

_TENSORS = re.compile(
    r"(token_embd|output|output_norm)\.weight"
    r"|blk\.\d+\.(attn_(norm|q|k|v|output|q_norm|k_norm)|ffn_(norm|gate|up|down))\.(weight|bias)"
)
_SINGLE_DIGITS = ("smollm",)
"""Ways to split text that are GPT-2's with each digit on its own; Transformers does not know them."""
_AS_GPT2 = ("gpt-2",)
_TOKEN_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written."""

    parameters: int
    vocabulary: int
    """Tokens."""
    chat_template: bool
    """Whether the file had one; a policy needs it (`rollout.chat`)."""


def convert_gguf(source: Path, out: Path) -> Converted:
    """Writes `source` as the folder `out`, which appears under its name only when all of it is there.

    Raises:
        ConfigError: `source` is no GGUF file, or holds something that cannot be converted; `out` is there already; the
            package gguf is missing.
        StorageError: `out` cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: is there already; give another folder, or remove it")
    metadata = _metadata(source)
    part = out.absolute().with_name(f".{out.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        vocabulary, chat_template = _write_tokenizer(source, metadata, part)
        parameters = _write_model(source, metadata, vocabulary, part)
        part.rename(out)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error}); free space or give another folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Converted(parameters=parameters, vocabulary=vocabulary, chat_template=chat_template)


def _metadata(source: Path) -> Mapping[str, Any]:
    """The file's keys, once nothing in them or in the list of its tensors speaks against it. Arrays of strings are
    their length."""
    try:
        import gguf  # noqa: F401  (Transformers unpacks tensors with it)
    except ImportError:
        raise ConfigError("GGUF files are read with the package gguf, which is missing; pip install gguf") from None
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, tensors = read_gguf_metadata(str(source))
    except (OSError, ValueError, struct.error) as error:
        raise _unreadable(source, error) from error
    _check(source, metadata, tensors)
    found: Mapping[str, Any] = metadata
    return found


def _unreadable(source: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{source}: cannot be read as a GGUF file ({error}); give a whole .gguf file")


def _cannot(source: Path, why: str) -> ConfigError:
    return ConfigError(f"{source}: {why}; take the model's own Hugging Face folder")


def _check(source: Path, metadata: Mapping[str, Any], tensors: Sequence[str]) -> None:
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise _cannot(source, f"general.architecture={architecture} is not converted, only {', '.join(ARCHITECTURES)}")
    if metadata.get("split.count", 1) > 1:
        raise ConfigError(
            f"{source}: split.count={metadata['split.count']}, it is one of several files; join them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        has = "tensor rope_freqs.weight" if scaling == "none" else f"rope.scaling.type={scaling}"
        raise _cannot(source, f"its rotary embeddings are scaled ({has}), which is not converted")
    unknown = [name for name in tensors if not _TENSORS.fullmatch(name)]
    if unknown:
        raise _cannot(source, f"{len(unknown)} tensors have no place in a plain {architecture}, e.g. {unknown[0]}")


def _write_tokenizer(source: Path, metadata: Mapping[str, Any], folder: Path) -> tuple[int, bool]:
    """Tokenizer and chat template; returns the number of tokens, and whether there was a template."""
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise _cannot(source, f"tokenizer.ggml.model={kind} is not converted, only gpt2 (byte-level BPE)")
    known = {*_SINGLE_DIGITS, *_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}
    if split not in known:
        raise _cannot(
            source,
            f"tokenizer.ggml.pre={split}: how it splits text is not known, and other words would be other tokens "
            f"(known are {', '.join(sorted(known))})",
        )
    architecture, described, _ = get_gguf_tokenizer(str(source))
    tokens: list[str] = described["tokens"]
    backend, _ = convert_gguf_tokenizer(architecture, described)
    size = backend.get_vocab_size(with_added_tokens=True)
    if size != len(tokens):
        raise _cannot(
            source, f"its {len(tokens)} tokens make a tokenizer of {size} (twice the same, or no <|endoftext|>)"
        )
    if split in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    named = {
        name: tokens[number]
        for name, key in _TOKEN_IDS.items()
        if (number := metadata.get(f"tokenizer.ggml.{key}")) is not None
    }
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    template = metadata.get("tokenizer.chat_template")
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template,
        model_max_length=metadata[f"{architecture}.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    ).save_pretrained(folder)
    return len(tokens), template is not None


def _write_model(source: Path, metadata: Mapping[str, Any], vocabulary: int, folder: Path) -> int:
    """Weights, config and generation config; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    except ValueError as error:  # tensors cut off
        raise _unreadable(source, error) from error
    if vocabulary > config.vocab_size:
        raise _cannot(source, f"it has {vocabulary} tokens and embeddings for {config.vocab_size}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    weights: dict[str, torch.Tensor] = read["tensors"]
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}  # tied ones once
    found = {name: tensor.shape for name, tensor in weights.items()}
    if found != wanted:
        name = min(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        shapes = (tuple(shape) if shape is not None else "nothing" for shape in (found.get(name), wanted.get(name)))
        raise _cannot(source, "the file has {} for {name}, its configuration {}".format(*shapes, name=name))
    ids = {
        f"{name}_id": metadata.get(f"tokenizer.ggml.{key}") for name, key in _TOKEN_IDS.items() if name != "unk_token"
    }
    config.update({**ids, "architectures": [type(model).__name__], "dtype": "float32"})
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)
    return sum(tensor.numel() for tensor in weights.values())
