"""What tests of every folder share."""

from __future__ import annotations

import os
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
    """A two-layer model beside the demo's tokenizer: see write_tiny_model."""
    from tests.tiny_model import write_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(demo_folder, folder)
    return folder
