"""Checkpoint folders that are complete for every check but hold no useful weights."""

from __future__ import annotations

import json
from pathlib import Path


def write_model(folder: Path, *, positions: int = 2048, heads: int = 4, shape: tuple[int, int] = (3, 5)) -> Path:
    """A folder with everything that is looked at before a run: real headers, no useful weights."""
    folder.mkdir(parents=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": positions,
        "num_attention_heads": heads,
    }
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text("{}")
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    return folder
