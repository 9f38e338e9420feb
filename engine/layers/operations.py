"""Which kernels the layers compute with: torch's own operations, or Triton's."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from kernels import reference

Kernels = Literal["torch", "triton"]


class Operations(Protocol):
    """What layers do beside products and attention; as the functions of kernels.reference."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor: ...


TORCH: Operations = reference
"""Torch's own, on any device."""


def operations_of(kernels: Kernels) -> Operations:
    """Triton is imported only where it is chosen."""
    if kernels == "torch":
        return TORCH
    from kernels.gpu import operations

    return operations
