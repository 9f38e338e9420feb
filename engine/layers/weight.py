"""Where one tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.layers.operations import TORCH, Operations


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that a layer expects.

    Attributes:
        shape: as the checkpoint must have it.
        load: takes the tensor, of that shape and of the layer's type and device, and may keep it.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], object]


Weights = dict[str, Weight]
"""Tensor names of a checkpoint, and what is done with each."""


Packing = Literal["plain", "onednn", "panels", "panels_int8", "panels_int8_w8a8"]
"""How weights of dense projections lie in memory: as checkpoints have them, in oneDNN's layout, or as the CPU kernels
read them, quantised for activations as they are or for int8 ones. Panels are for step plans alone."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Type and device of a model's weights, and what its layers compute with."""

    dtype: torch.dtype
    device: torch.device
    packing: Packing = "plain"
    operations: Operations = TORCH

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
