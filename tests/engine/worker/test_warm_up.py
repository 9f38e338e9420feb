"""After the warm-up no request has to wait for a kernel's compilation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from triton.runtime import interpreter

from engine.config import EngineConfig
from engine.hub import load_model_config
from engine.worker.worker import Worker
from kernels.compile import VARIANTS
from tests.engine.models.tiny import save_tiny


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that were launched."""
    names: set[str] = set()
    launch = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        names.add(self.fn.__name__)
        launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    return names


def warm_up(worker: Worker, num_blocks: int) -> None:
    assert worker._setup is not None
    worker._warm_up(worker._setup, num_blocks)


def test_warm_up_launches_every_kernel_and_leaves_nothing_behind(tmp_path: Path, launched: set[str]) -> None:
    # Beyond 2,048 tokens a filter may need the weights of all; with a long context keys are split and joined.
    save_tiny(tmp_path, "LlamaForCausalLM", num_hidden_layers=1, vocab_size=2200, max_position_embeddings=1024)
    config = EngineConfig(model=str(tmp_path), gpu_kernels="triton", device="cpu", max_num_seqs=1, enforce_eager=True)
    worker = Worker(config, load_model_config(config))
    worker.allocate_kv_cache(64)
    launched.clear()
    warm_up(worker, 64)
    assert {variant.kernel.fn.__name__ for variants in VARIANTS for variant in variants()} <= launched
    assert len(worker._runner._buffers) == 0  # type: ignore[arg-type]


def test_warm_up_fits_the_smallest_engine(tmp_path: Path) -> None:
    save_tiny(tmp_path, "LlamaForCausalLM", num_hidden_layers=1, max_position_embeddings=8)
    config = EngineConfig(
        model=str(tmp_path), gpu_kernels="triton", device="cpu", max_num_seqs=1, max_num_batched_tokens=2
    )
    worker = Worker(replace(config, num_kv_blocks=1), load_model_config(config))
    worker.allocate_kv_cache(1)
    warm_up(worker, 1)
    assert len(worker._runner._buffers) == 0  # type: ignore[arg-type]
