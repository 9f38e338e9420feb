"""What tests of every folder share."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

# Before anything imports ray or torch.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton's kernels run in its interpreter, which has to be known before they are imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

# Where the tests run in the background of a shell, Ctrl-C is ignored, and whatever they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model as a Hugging Face folder, fetched where it is absent."""
    from engine.hub import fetch_demo

    return fetch_demo()


@pytest.fixture(scope="session")
def tiny_folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model's config beside the demo's tokenizer; load it with `load_format="dummy"`."""
    folder = tmp_path_factory.mktemp("tiny")
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
    (folder / "config.json").write_text(json.dumps(config))
    return folder
