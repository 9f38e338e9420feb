"""Decode steps that the device repeats as a whole: one launch in place of some hundred.

A graph is captured for certain numbers of requests, over the static memory of DeviceBuffers, and a step is padded to
the next of them. What a step brings is written into that memory before the replay. Nothing else of it differs: the
kernels find their work there (rows, contexts, slots), and are launched for the longest context.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from tqdm import tqdm

from engine.worker.device_buffers import DeviceBuffers
from engine.worker.model_input import ModelInput

_FINE, _COARSE = 8, 16
"""Distance of captured sizes, up to _FINE_UP_TO requests and beyond: bounds the padding, and the graphs that take time
and memory at the start."""
_FINE_UP_TO = 256

Work = Callable[[], None]


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests that graphs are captured for, ascending: 1, 2, 4, 8, 16, 24, …, and max_num_seqs itself."""
    sizes = [1, 2, 4, *range(_FINE, _FINE_UP_TO, _FINE), *range(_FINE_UP_TO, max_num_seqs, _COARSE)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class Capture(Protocol):
    """Makes work repeatable."""

    def __call__(self, work: Work) -> Work:
        """Does the work once or more, and returns what does it again.

        What the work reads and writes must stay where it is, and what it decides on the host is decided for good.
        """
        ...


class CudaCapture:
    """Captures CUDA graphs that share one memory pool.

    So only one of them may run at a time, and values inside of one are lost when another runs. They are kept and given
    up together, since torch may give up a stream's cuBLAS workspace with any graph that was captured on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        # Compiling kernels and choosing products' algorithms is not allowed inside of a capture. On the stream of the
        # capture, since that is what the workspaces of cuBLAS belong to.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # By default a capture fails when any other thread of the process allocates memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class CallAgain:
    """Stands in for graphs on a CPU: a replay calls the work again.

    A replay gives an eager step's logits only if all that a step brings lies in static buffers, since the work knows
    no other step than the dummy it was captured with. That is what it is there to prove.
    """

    def __call__(self, work: Work) -> Work:
        work()
        return work


class GraphRunner:
    """Captured decode steps of one model over one KV cache. Touched on the worker's thread alone."""

    def __init__(
        self,
        compute_logits: Callable[[ModelInput], torch.Tensor],
        buffers: DeviceBuffers,
        logits: torch.Tensor,
        capture: Capture,
    ) -> None:
        """
        Args:
            compute_logits: what an eager step does, for all of its tokens, kept or not: logits [tokens, vocab].
            logits: [max_num_seqs, vocab], where all graphs leave theirs: one of its own for each takes gigabytes.
        """
        self._compute_logits = compute_logits
        self._buffers = buffers
        self._logits = logits
        self._capture = capture
        self._sizes: list[int] = []
        self._replays: dict[int, Work] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures a graph for each size, the largest first, whose memory then serves the others."""
        for size in tqdm(sorted(sizes, reverse=True), desc="Capturing CUDA graphs", unit="graph"):
            self.capture_one(size)

    def capture_one(self, size: int) -> None:
        step = self._buffers.dummy_step(size, size)
        logits = self._logits[:size]

        @torch.inference_mode()
        def work() -> None:
            logits.copy_(self._compute_logits(step))

        self._replays[size] = self._capture(work)
        insort(self._sizes, size)

    def padded_size(self, num_requests: int) -> int | None:
        """The smallest captured size that holds so many requests; None where none does."""
        place = bisect_left(self._sizes, num_requests)
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, padded: int) -> torch.Tensor:
        """Logits of the step that the buffers were prepared for, in memory that the next replay overwrites.

        Returns:
            [padded, vocab]; those of the padding mean nothing.
        """
        self._replays[padded]()
        return self._logits[:padded]
