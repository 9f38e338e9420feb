"""How long something takes on a device, and what the device can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

GIB = 1 << 30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_time(fn: Callable[[], object], device: torch.device, *, repeats: int = 10, warmup: int = 3) -> float:
    """Median seconds of a call, by CUDA events on a GPU and by the clock on a CPU.

    Launches are not waited for in between: of a call shorter than its launch this is the time of the launch. What it
    reads may lie in the cache; give it more than the cache holds.
    """
    for _ in range(warmup):
        fn()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            fn()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        fn()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(first.elapsed_time(second) / 1000 for first, second in pairwise(events))


def graph_time(fn: Callable[[], object], device: torch.device, *, calls: int = 20) -> float:
    """Seconds of one of several calls in a row that are captured as one CUDA graph: without the host's launches.

    Small inputs lie in the cache. On a CPU this is median_time.
    """
    if device.type != "cuda":
        return median_time(fn, device, repeats=2, warmup=0)
    for _ in range(2):
        fn()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return median_time(graph.replay, device, repeats=5, warmup=1) / calls


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best that the machine does, measured.

    Attributes:
        bytes_per_second: of a large copy, read and written bytes counted.
        flops_per_second: of a large bfloat16 product of random matrices.
    """

    bytes_per_second: float
    flops_per_second: float


@cache
def ceiling(device: torch.device, tiny: bool) -> Ceiling:
    """Measured once in a process."""
    size, side = (1 << 20, 128) if tiny else (4 * GIB, 8192)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = median_time(lambda: target.copy_(source), device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    multiplied = median_time(lambda: a @ b, device, repeats=20, warmup=5)
    return Ceiling(2 * size / copied, 2 * side**3 / multiplied)
