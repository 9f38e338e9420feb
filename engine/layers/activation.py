"""Gated activations."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from engine.layers.operations import Operations
from engine.layers.recorder import Recorded


class SiluAndMul:
    """silu(gate) * up of [rows, gate | up]."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    @overload
    def __call__(self, x: Tensor) -> Tensor: ...
    @overload
    def __call__(self, x: Recorded) -> Recorded: ...
    def __call__(self, x: Tensor | Recorded) -> Tensor | Recorded:
        return x.recorder.silu_and_mul(x) if isinstance(x, Recorded) else self._operations.silu_and_mul(x)
