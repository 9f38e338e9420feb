"""Which models and devices the Triton kernels are taken for, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from engine.config import EngineConfig, GpuKernels, ModelConfig
from engine.sampling_params import InvalidParameter
from engine.worker.gpu_kernels import use_gpu_kernels
from engine.worker.worker import Worker

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = ModelConfig(
    name="m",
    path=Path(),
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=64,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPU there is said to be."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def used(
    choice: GpuKernels, device: torch.device, model: ModelConfig = MODEL, *, block_size: int = 16, fp8: bool = False
) -> bool:
    dtype = "fp8" if fp8 else "auto"
    return use_gpu_kernels(choice, model, block_size=block_size, kv_cache_dtype=dtype, device=device)


def test_they_are_chosen_on_a_gpu_and_for_tests_on_a_cpu() -> None:
    assert used("auto", GPU)
    assert used("triton", GPU)
    assert not used("torch", GPU)
    assert not used("auto", CPU)
    assert used("triton", CPU)


def test_a_cpu_without_the_interpreter_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(InvalidParameter, match="gpu_kernels='triton': the Triton kernels need a GPU"):
        used("triton", CPU)


@pytest.mark.parametrize(
    ("model", "block_size", "reason"),
    [
        (MODEL, 8, "KV blocks of 16 or 32 tokens, not of 8"),
        (replace(MODEL, head_dim=10), 16, "multiple of 8 up to 256 dimensions, not of 10"),
        (replace(MODEL, num_heads=66), 16, "at most 32 query heads"),
        (replace(MODEL, hidden_size=60), 16, "hidden_size=60"),
        (replace(MODEL, intermediate_size=77), 16, "intermediate_size=77"),
    ],
)
def test_models_that_they_do_not_suit(
    model: ModelConfig, block_size: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        used("triton", GPU, model, block_size=block_size)
    with caplog.at_level(logging.WARNING):
        assert not used("auto", GPU, model, block_size=block_size)
    assert reason in caplog.text


def test_triton_s_early_products_for_capability_10_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert not used("auto", GPU)
    monkeypatch.setattr(triton, "__version__", "3.8.1")
    assert used("auto", GPU)


def test_gpus_before_compute_capability_8_do_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    reason = "the Triton kernels need a GPU of compute capability 8.0 or newer; T4 has 7.5"
    with pytest.raises(InvalidParameter, match=f"gpu_kernels='triton': {reason}"):
        used("triton", GPU)
    with caplog.at_level(logging.WARNING):
        assert not used("auto", GPU)
    assert reason in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert used("triton", GPU)


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_needs_compute_capability_8_9(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    if fits:
        assert used("auto", GPU, fp8=True)
        return
    have = r"8\.0" if capability == (8, 0) else r"8\.6"
    with pytest.raises(
        InvalidParameter,
        match=rf"kv_cache_dtype='fp8': needs a GPU of compute capability 8\.9 or newer; A100 has {have}",
    ):
        used("auto", GPU, fp8=True)


def test_fp8_is_refused_where_other_kernels_run(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="kv_cache_dtype='fp8': needs the Triton kernels of a GPU"):
        used("torch", GPU, fp8=True)
    with pytest.raises(InvalidParameter, match=r"kv_cache_dtype='fp8': needs .* but .*not of 10"):
        used("auto", GPU, replace(MODEL, head_dim=10), fp8=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(model=str(tiny_folder), load_format="dummy", kv_cache_dtype="fp8")
    with pytest.raises(InvalidParameter, match="kv_cache_dtype"):
        Worker(config, replace(MODEL, kv_cache_dtype="fp8"))


def test_blocks_of_fp8_take_little_more_than_half() -> None:
    wide = replace(MODEL, head_dim=128)
    plain, fp8 = wide.kv_block_bytes(16), replace(wide, kv_cache_dtype="fp8").kv_block_bytes(16)
    assert fp8 / plain == (128 + 4) / 256
