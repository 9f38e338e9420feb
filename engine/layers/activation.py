"""Gated activations."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from engine.layers.recorder import Recorded
from kernels import reference


@overload
def silu_and_mul(x: Tensor) -> Tensor: ...
@overload
def silu_and_mul(x: Recorded) -> Recorded: ...
def silu_and_mul(x: Tensor | Recorded) -> Tensor | Recorded:
    """silu(gate) * up of [rows, gate | up]."""
    return x.recorder.silu_and_mul(x) if isinstance(x, Recorded) else reference.silu_and_mul(x)
