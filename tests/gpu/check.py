"""What every check is given."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.gpu.report import Row


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how large to check.

    Attributes:
        device: the GPU, or a CPU on which Triton interprets its kernels.
        tiny: the smallest sizes and fewest cases that run the same code, for a CPU.
        folder: for files; it outlives a process of the part, so that a restarted one finds them.
        seconds_left: of the part's budget.
    """

    device: torch.device
    tiny: bool
    folder: Path
    seconds_left: Callable[[], float]

    def generator(self, seed: int) -> torch.Generator:
        """Random numbers of this device."""
        return torch.Generator(self.device).manual_seed(seed)

    def release(self) -> None:
        """Gives the memory of what was dropped back to the device, where the next engine looks for it."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


Check = Callable[[Setup], Iterator[Row]]
