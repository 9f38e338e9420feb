"""Root-mean-square norms."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor

from engine.layers.recorder import Recorded
from engine.layers.weight import Placement, Weight, Weights
from engine.protocols import HeadNorm


class RMSNorm:
    """Norm of the hidden states, fused with the addition of the residual."""

    def __init__(self, size: int, eps: float, *, placement: Placement) -> None:
        self._eps = eps
        self._weight = placement.empty(size)
        self._operations = placement.operations

    def weights(self, name: str) -> Weights:
        return {name: Weight(tuple(self._weight.shape), self._weight.copy_)}

    @overload
    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, x: Recorded, residual: Recorded | None) -> tuple[Recorded, Recorded]: ...
    def __call__(self, x: Any, residual: Any) -> tuple[Any, Any]:
        """The norm of x + residual, and that sum, which is the next residual. None counts as zero."""
        if isinstance(x, Recorded):
            return x.recorder.rms_norm(x, residual, self._weight, self._eps)
        if residual is None:
            return self._operations.rms_norm(x, self._weight, self._eps), x
        return self._operations.add_rms_norm(x, residual, self._weight, self._eps)


class QueryKeyNorm:
    """The weights of a norm of each head of queries and keys; attention applies it."""

    def __init__(self, head_dim: int, eps: float, *, placement: Placement) -> None:
        self.of_heads = HeadNorm(placement.empty(head_dim), placement.empty(head_dim), eps)

    def weights(self, prefix: str) -> Weights:
        shape = tuple(self.of_heads.query.shape)
        return {
            f"{prefix}q_norm.weight": Weight(shape, self.of_heads.query.copy_),
            f"{prefix}k_norm.weight": Weight(shape, self.of_heads.key.copy_),
        }
