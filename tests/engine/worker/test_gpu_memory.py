"""What is left of a GPU's memory, and what is said when there is none, on a made-up GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from engine.config import GIB
from engine.sampling_params import InvalidParameter
from engine.worker.gpu_memory import (
    MemoryProfile,
    Stage,
    check_room,
    estimate_graph_bytes,
    out_of_memory_explained,
    profile_memory,
)

DEVICE = torch.device("cpu")
MIB = 1 << 20
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB"


class Gpu:
    """8 GiB, as torch.cuda reports them: `reserved` holds `tensors` and what they left, `driver` is beside torch."""

    total = 8 * GIB

    def __init__(self) -> None:
        self.reserved = self.peak = self.tensors = self.driver = 0

    def allocate(self, size: int) -> None:
        self.tensors += size
        self.reserved = max(self.reserved, self.tensors)
        self.peak = max(self.peak, self.reserved)

    def free(self, size: int) -> None:
        self.tensors -= size

    def empty_cache(self) -> None:
        self.reserved = self.tensors

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.reserved


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    replacements: dict[str, Callable[..., object]] = {
        "mem_get_info": lambda device: (gpu.total - gpu.reserved - gpu.driver, gpu.total),
        "memory_reserved": lambda device: gpu.reserved,
        "max_memory_reserved": lambda device: gpu.peak,
        "reset_peak_memory_stats": gpu.reset_peak,
        "empty_cache": gpu.empty_cache,
        "synchronize": lambda device: None,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return gpu


PROFILE = MemoryProfile(total=80 * GIB, weights=16 * GIB, activations=2 * GIB, graphs=GIB, other=GIB // 2)


def test_blocks_get_what_the_rest_leaves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert PROFILE.kv_bytes(0.9) == int(80 * GIB * 0.9) - int(19.5 * GIB)
    assert caplog.messages == [
        "gpu_memory total=80.00GiB utilization=0.9 weights=16.00GiB activations=2.00GiB graphs=1.00GiB "
        "other=0.50GiB kv=52.50GiB"
    ]


def test_an_error_says_what_leaves_nothing_for_blocks() -> None:
    with pytest.raises(InvalidParameter) as error:
        PROFILE.kv_bytes(0.2)
    assert error.value.param == "gpu_memory_utilization"
    for part in (
        "gpu_memory_utilization=0.2",
        "80.00GiB",
        "weights take 16.00GiB",
        "2.00GiB",
        "max_num_batched_tokens",
    ):
        assert part in str(error.value)


def test_a_profile_counts_each_byte_once(gpu: Gpu) -> None:
    gpu.driver = 300 * MIB
    gpu.allocate(2 * GIB)  # weights
    gpu.allocate(GIB)  # what loading them left behind
    gpu.free(GIB)

    def largest_step() -> None:
        gpu.allocate(700 * MIB)
        gpu.free(690 * MIB)  # ten stay: workspaces
        gpu.driver += 50 * MIB  # kernels

    profile = profile_memory(DEVICE, largest_step, lambda: 40 * MIB)
    assert profile == MemoryProfile(
        total=8 * GIB, weights=2 * GIB, activations=700 * MIB, graphs=40 * MIB, other=350 * MIB
    )


def test_graphs_are_estimated_from_a_few(gpu: Gpu) -> None:
    captured: list[int] = []

    def capture(size: int) -> None:
        gpu.allocate(100 * MIB if not captured else 0)  # the pool, which the largest fills
        gpu.driver += {128: 9, 1: 6, 32: 0, 96: 6}[size] * MIB  # the driver's lumps
        gpu.allocate(64 * MIB)  # freed before the next one is measured
        gpu.free(64 * MIB)
        captured.append(size)

    sizes = [1, *range(8, 129, 8)]
    assert estimate_graph_bytes(DEVICE, sizes[:1], lambda size: gpu.allocate(MIB)) == MIB
    assert estimate_graph_bytes(DEVICE, [1, 16, 32, 64, 96, 112, 128], capture) == (109 + 6 * 4) * MIB
    assert captured == [128, 1, 32, 96]


def test_memory_in_use_by_others_is_told_before_anything_is_loaded(gpu: Gpu) -> None:
    gpu.driver = 500 * MIB  # the context alone
    check_room(DEVICE, 1.0)
    gpu.driver = 5 * GIB
    check_room(DEVICE, 0.3)
    with pytest.raises(
        InvalidParameter, match=r"gpu_memory_utilization=0\.9: .*7\.20GiB.*only 3\.00GiB.*0\.37 or less"
    ):
        check_room(DEVICE, 0.9)


@pytest.mark.parametrize(
    ("stage", "parameter", "remedies"),
    [
        ("load", "model", ("loading the model", "smaller model")),
        ("profile", "max_num_batched_tokens", ("largest step", "Lower max_num_batched_tokens or max_num_seqs")),
        ("graphs", "gpu_memory_utilization", ("CUDA graphs", "enforce_eager=True")),
        ("kv_cache", "gpu_memory_utilization", ("KV blocks", "kv_cache_memory_bytes")),
    ],
)
def test_out_of_memory_says_where_and_what_to_change(
    gpu: Gpu, stage: Stage, parameter: str, remedies: tuple[str, ...]
) -> None:
    gpu.allocate(7 * GIB)
    with pytest.raises(InvalidParameter) as error, out_of_memory_explained(stage, DEVICE):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)
    assert error.value.param == parameter
    for part in ("1.00GiB of 8.00GiB are free", "2.50 GiB more were needed", *remedies):
        assert part in str(error.value)


def test_the_drivers_own_error_counts_and_others_pass(gpu: Gpu) -> None:
    with pytest.raises(InvalidParameter, match="capturing"), out_of_memory_explained("graphs", DEVICE):
        raise RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="illegal"), out_of_memory_explained("graphs", DEVICE):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_failed_captures_own_error_does_not_hide_the_reason(gpu: Gpu) -> None:
    def capture() -> None:
        try:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    with pytest.raises(InvalidParameter, match=r"2\.50 GiB more"), out_of_memory_explained("graphs", DEVICE):
        capture()


def test_the_largest_step_runs_out_of_memory_by_name(gpu: Gpu) -> None:
    def largest_step() -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    with pytest.raises(InvalidParameter, match="running the largest step"):
        profile_memory(DEVICE, largest_step, lambda: 0)
