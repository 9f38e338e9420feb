"""Where a GPU's memory goes, and what is left of it for KV blocks.

What is left is not computed but measured, since the largest step decides: weights are loaded, a step of that size runs
once over no requests, some graphs are captured. The rest, up to gpu_memory_utilization, is for keys and values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from engine.config import GIB
from engine.sampling_params import InvalidParameter

logger = logging.getLogger(__name__)

CONTEXT_BYTES = GIB
"""More than a CUDA context takes, which counts as used before anything is loaded."""

SAMPLED_GRAPHS = 3
"""Graphs beside the largest that are captured to estimate all: the driver takes memory for them in lumps."""

Stage = Literal["load", "profile", "graphs", "kv_cache"]

_REMEDIES: dict[Stage, tuple[str, str, str]] = {
    "load": (
        "model",
        "loading the model",
        "Use a smaller model, a dtype of two bytes, a lower max_model_len or max_num_seqs, or a larger GPU.",
    ),
    "profile": (
        "max_num_batched_tokens",
        "running the largest step",
        "Lower max_num_batched_tokens or max_num_seqs, or use a smaller model or a larger GPU.",
    ),
    "graphs": (
        "gpu_memory_utilization",
        "capturing CUDA graphs",
        "Lower gpu_memory_utilization or max_num_seqs, or set enforce_eager=True, which does without graphs.",
    ),
    "kv_cache": (
        "gpu_memory_utilization",
        "reserving KV blocks",
        "Lower gpu_memory_utilization, or kv_cache_memory_bytes or num_kv_blocks where one of them is set.",
    ),
}
"""For each stage: the parameter to blame, what was being done, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What an engine takes of a GPU beside its KV blocks; all in bytes.

    Attributes:
        total: the GPU's memory.
        weights: what stays: weights, and the tables of running requests.
        activations: what the largest step takes beyond that.
        graphs: estimate for all CUDA graphs.
        other: what is not torch's: the CUDA context, loaded kernels, other processes.
    """

    total: int
    weights: int
    activations: int
    graphs: int
    other: int

    def kv_bytes(self, gpu_memory_utilization: float) -> int:
        """What is left for KV blocks.

        Raises:
            InvalidParameter: nothing is.
        """
        left = int(self.total * gpu_memory_utilization) - self.weights - self.activations - self.graphs - self.other
        if left <= 0:
            rule = (
                f"leaves no memory for KV blocks of {_gib(self.total)}: weights take {_gib(self.weights)}, activations "
                f"{_gib(self.activations)}, CUDA graphs {_gib(self.graphs)}, all else {_gib(self.other)}. Raise it, "
                "lower max_num_batched_tokens or max_num_seqs, or use a smaller model or a larger GPU"
            )
            raise InvalidParameter.of("gpu_memory_utilization", gpu_memory_utilization, rule)
        logger.info(
            "gpu_memory total=%s utilization=%g weights=%s activations=%s graphs=%s other=%s kv=%s",
            _gib(self.total),
            gpu_memory_utilization,
            *(_gib(size) for size in (self.weights, self.activations, self.graphs, self.other, left)),
        )
        return left


def check_room(device: torch.device, gpu_memory_utilization: float) -> None:
    """Called before anything is loaded.

    Raises:
        InvalidParameter: other processes use what gpu_memory_utilization asks for.
    """
    free, total = free_bytes(device), torch.cuda.mem_get_info(device)[1]
    if free + CONTEXT_BYTES < total * gpu_memory_utilization:
        rule = (
            f"asks for {_gib(int(total * gpu_memory_utilization))} of the GPU's {_gib(total)}, but only {_gib(free)} "
            "are free: other processes use the rest. End them, use another GPU, or set it to "
            f"{int(100 * free / total) / 100:g} or less"
        )
        raise InvalidParameter.of("gpu_memory_utilization", gpu_memory_utilization, rule)


def profile_memory(
    device: torch.device, largest_step: Callable[[], object], estimate_graphs: Callable[[], int]
) -> MemoryProfile:
    """Measures an engine that is loaded but has no KV blocks yet.

    Args:
        largest_step: runs one, from the flat batch to the sampled tokens.
        estimate_graphs: gives estimate_graph_bytes; 0 where there are no graphs.
    """
    free_bytes(device)
    weights = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with out_of_memory_explained("profile", device):
        largest_step()
        torch.cuda.synchronize(device)
    # What the allocator had to hold, and not what the tensors filled: its rounding comes back with every step.
    activations = torch.cuda.max_memory_reserved(device) - weights
    free, total = free_bytes(device), torch.cuda.mem_get_info(device)[1]
    # The step leaves some of torch's memory behind: workspaces of cuBLAS, which the peak has counted.
    other = total - free - torch.cuda.memory_reserved(device)
    with out_of_memory_explained("graphs", device):
        graphs = estimate_graphs()
    free_bytes(device)  # those graphs are gone, and what they leave is for the blocks
    return MemoryProfile(total=total, weights=weights, activations=activations, graphs=graphs, other=other)


def estimate_graph_bytes(device: torch.device, sizes: Sequence[int], capture: Callable[[int], object]) -> int:
    """Memory that graphs of all these sizes will take, from capturing a few of them.

    Args:
        sizes: ascending; the others find their memory in the pool of the largest.
        capture: captures a graph of one size, beside those before.
    """
    count = min(SAMPLED_GRAPHS, len(sizes) - 1)
    others = [sizes[place * (len(sizes) - 1) // count] for place in range(count)] if count else []
    before = free_bytes(device)
    capture(sizes[-1])
    largest = free_bytes(device)
    for size in others:
        capture(size)
    more = (largest - free_bytes(device)) / max(count, 1)
    return before - largest + int((len(sizes) - 1) * max(more, 0))


def free_bytes(device: torch.device) -> int:
    """What the driver could give, once torch has returned all that no tensor holds."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def out_of_memory_explained(stage: Stage, device: torch.device) -> Iterator[None]:
    """
    Raises:
        InvalidParameter: the GPU's memory did not suffice; what for, how much was free, and what to change.
    """
    try:
        yield
    except RuntimeError as error:
        cause = _memory_error(error)
        if cause is None:
            raise
        parameter, doing, remedy = _REMEDIES[stage]
        free, total = torch.cuda.mem_get_info(device)
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", cause)
        asked = f" {wanted[1]} more were needed." if wanted else ""
        message = f"out of GPU memory while {doing}: {_gib(free)} of {_gib(total)} are free.{asked} {remedy}"
        raise InvalidParameter(parameter, message) from error


def _memory_error(error: BaseException) -> str | None:
    """What says that memory ran out, if that is why.

    Beside torch.OutOfMemoryError it may be an error of the driver, as from making a graph ready to launch; and the end
    of a capture that failed raises one of its own over either.
    """
    link: BaseException | None = error
    while link is not None:
        if "out of memory" in str(link):
            return str(link)
        link = link.__context__
    return None


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}GiB"
