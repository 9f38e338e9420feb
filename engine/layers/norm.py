"""Root-mean-square norms."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor

from engine.layers.recorder import Recorded
from engine.layers.weight import Placement, Weight, Weights
from kernels.reference import add_rms_norm, rms_norm


class RMSNorm:
    """Norm of the hidden states, fused with the addition of the residual."""

    def __init__(self, size: int, eps: float, *, placement: Placement) -> None:
        self._eps = eps
        self._weight = placement.empty(size)

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
            return rms_norm(x, self._weight, self._eps), x
        return add_rms_norm(x, residual, self._weight, self._eps)


class QueryKeyNorm:
    """Norm of each head of queries and keys, which stand in one tensor: [tokens, heads + kv_heads, head_dim]."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, placement: Placement) -> None:
        self._eps = eps
        self._weight = placement.empty(num_heads + num_kv_heads, head_dim)
        self._num_heads = num_heads

    def weights(self, prefix: str) -> Weights:
        shape = (self._weight.shape[1],)
        queries, keys = self._weight[: self._num_heads], self._weight[self._num_heads :]
        return {
            f"{prefix}q_norm.weight": Weight(shape, queries.copy_),
            f"{prefix}k_norm.weight": Weight(shape, keys.copy_),
        }

    @property
    def recorded(self) -> tuple[Tensor, Tensor, float]:
        """Weights of queries and of keys, [head_dim] each, and epsilon: what a step plan needs."""
        return self._weight[0], self._weight[self._num_heads], self._eps

    def __call__(self, query_key: Tensor) -> Tensor:
        return rms_norm(query_key, self._weight, self._eps)
