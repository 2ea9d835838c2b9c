"""What a checkpoint folder in Hugging Face format holds, read from its small files and headers only (no torch)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = ("config.json", "tokenizer.json")
WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about one checkpoint."""

    architecture: str
    parameters: int
    """Stored parameters: tied weights count once."""
    weight_bytes: int
    max_positions: int | None
    """Longest context in tokens, where config.json says so."""
    attention_heads: int | None
    kv_values_per_token: int | None = None
    """Numbers that the KV cache holds for one token; None where attention is not of the plain kind."""


def missing_files(folder: Path) -> list[str]:
    """Names of what a usable checkpoint folder must hold and this one lacks."""
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    return missing if any(folder.glob(WEIGHTS)) else [*missing, WEIGHTS]


def read_facts(folder: Path) -> ModelFacts:
    """Facts of a folder that lacks nothing.

    Raises:
        ValueError: config.json or a weight file's header is not what its name says.
        OSError: a file cannot be read.
    """
    described = _object(folder / "config.json")
    _object(folder / "tokenizer.json")
    parameters = weight_bytes = 0
    for file in sorted(folder.glob(WEIGHTS)):
        header = _header(file)
        try:
            parameters += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
        except (KeyError, TypeError):
            raise ValueError(f"{file.name} is not a safetensors file") from None
        weight_bytes += file.stat().st_size
    named = described.get("architectures")
    positions, heads = described.get("max_position_embeddings"), described.get("num_attention_heads")
    return ModelFacts(
        architecture=str(named[0] if isinstance(named, list) and named else described.get("model_type", "unknown")),
        parameters=parameters,
        weight_bytes=weight_bytes,
        max_positions=positions if isinstance(positions, int) else None,
        attention_heads=heads if isinstance(heads, int) else None,
        kv_values_per_token=_kv_values(described),
    )


def _kv_values(described: dict[str, Any]) -> int | None:
    layers, heads, size = (described.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    kinds = described.get("layer_types") or ["full_attention"]
    plain = (
        not described.get("sliding_window") and not described.get("kv_lora_rank") and set(kinds) == {"full_attention"}
    )
    if not plain or not all(isinstance(count, int) and count > 0 for count in (layers, heads, size)):
        return None
    assert isinstance(layers, int) and isinstance(heads, int) and isinstance(size, int)
    kv_heads, head_size = described.get("num_key_value_heads") or heads, described.get("head_dim") or size // heads
    if not isinstance(kv_heads, int) or not isinstance(head_size, int):
        return None
    return 2 * layers * kv_heads * head_size


def _object(file: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} does not hold an object")
    return value


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: its length in the first eight bytes, little endian, then the text."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(file.stat().st_size, 100_000_000):
            raise ValueError(f"{file.name} is not a safetensors file")
        header: Any = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} is not a safetensors file")
    return header
