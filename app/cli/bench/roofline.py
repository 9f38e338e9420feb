"""What this machine can do, what a model's steps ask of it, and how near they come.

A step cannot be faster than its bytes through the memory, nor than its arithmetic through the cores: the later of the
two is its roofline (Williams et al. 2009). Decoding few requests is bound by the first, prefill by the second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.config import DTYPE_BYTES, EngineConfig, ModelConfig, available_threads
from kernels.cpu.library import GROUP

if TYPE_CHECKING:
    from engine import StepRecord

READ_BYTES = 512 << 20
"""Far more than any cache holds."""

GEMM_SIZE = 2048
REPEATS = 8


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured, at best.

    Attributes:
        gb_per_s: reading memory.
        gflop_per_s: of a large matrix product in dtype, also for engines that multiply in int8.
        load_average: of the last minute; other processes make a run slower than its share of the cores would.
    """

    device: str
    threads: int
    dtype: str
    gb_per_s: float
    gflop_per_s: float
    load_average: float

    def or_better(self, again: Machine) -> Machine:
        """The better of two measurements, with the load before the first."""
        return replace(
            self,
            gb_per_s=max(self.gb_per_s, again.gb_per_s),
            gflop_per_s=max(self.gflop_per_s, again.gflop_per_s),
        )


def measure_machine(config: EngineConfig, dtype: str) -> Machine:
    """Takes about a second, 512 MiB, and all threads that the engine would use.

    Args:
        dtype: that the model computes in.
    """
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    load_average = os.getloadavg()[0]
    threads, before = config.num_threads or available_threads(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(READ_BYTES // 4, device=device)
        read = _best_seconds(data.sum, wait)
        del data
        a = torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(getattr(torch, dtype))
        product = _best_seconds(lambda: a @ a, wait)
    finally:
        torch.set_num_threads(before)
    return Machine(device.type, threads, dtype, READ_BYTES / read / 1e9, 2 * GEMM_SIZE**3 / product / 1e9, load_average)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step asks of memory and cores at least: every weight and every key read once, nothing written."""

    num_bytes: float
    flops: float

    def seconds(self, machine: Machine) -> float:
        """On the roofline."""
        return max(self.num_bytes / machine.gb_per_s, self.flops / machine.gflop_per_s) / 1e9


def step_cost(model: ModelConfig, step: StepRecord) -> Cost:
    """Of one step of a dense decoder, whose last layer does what follows its attention for sampled tokens alone."""
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    queries = model.num_heads * model.head_dim
    layer = model.hidden_size * (width + queries + 3 * model.intermediate_size)
    tail = model.hidden_size * (queries + 3 * model.intermediate_size)  # the last layer's output projection and MLP
    of_all = model.num_layers * layer - tail
    of_sampled = tail + model.vocab_size * model.hidden_size
    weights = of_all + (of_sampled if step.num_sampled else 0)
    # In int8, a group of weights has a float32 scale.
    weight_bytes = 1 + 4 / GROUP if model.quantization else DTYPE_BYTES[model.dtype]
    return Cost(
        num_bytes=weights * weight_bytes + step.num_keys * model.kv_block_bytes(1),
        flops=2 * (of_all * step.num_tokens + of_sampled * step.num_sampled)
        + 4 * model.num_layers * queries * step.num_pairs,  # query · key, and weight · value
    )


def efficiency(model: ModelConfig, machine: Machine, steps: Iterable[StepRecord]) -> dict[str, Any]:
    """How near a run comes to the machine.

    Returns:
        `reached` for `decode` (steps in which each request computes one token) and `prefill` (the others), where there
        are such steps.
    """
    kinds: dict[str, list[StepRecord]] = {"decode": [], "prefill": []}
    for step in steps:
        kinds["decode" if step.is_decode else "prefill"].append(step)
    return {
        kind: reached(model, machine, chosen, sum(step.seconds for step in chosen))
        for kind, chosen in kinds.items()
        if chosen
    }


def reached(model: ModelConfig, machine: Machine, steps: Sequence[StepRecord], seconds: float) -> dict[str, float]:
    """What steps that took so many seconds came to.

    Returns:
        Their number and seconds, the GB/s and GFLOP/s reached and their percentage of what the machine can do, and the
        percentage of the roofline.
    """
    costs = [step_cost(model, step) for step in steps]
    rate = sum(cost.num_bytes for cost in costs) / seconds / 1e9
    speed = sum(cost.flops for cost in costs) / seconds / 1e9
    return {
        "steps": len(steps),
        "seconds": seconds,
        "gb_per_s": rate,
        "gb_per_s_percent": 100 * rate / machine.gb_per_s,
        "gflop_per_s": speed,
        "gflop_per_s_percent": 100 * speed / machine.gflop_per_s,
        "roofline_percent": 100 * sum(cost.seconds(machine) for cost in costs) / seconds,
    }


def _best_seconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - started)
    return best
