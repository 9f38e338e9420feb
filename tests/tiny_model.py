"""A model small enough for services of several replicas on one CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def write_tiny_model(demo_folder: Path, folder: Path, **sizes: int) -> None:
    """A two-layer model's config beside the demo's tokenizer; load it with `load_format="dummy"`.

    Args:
        sizes: entries of the config in place of those here.
    """
    for path in demo_folder.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder)
    config = json.loads((demo_folder / "config.json").read_text())
    config.update(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    config.update(sizes)
    (folder / "config.json").write_text(json.dumps(config))
