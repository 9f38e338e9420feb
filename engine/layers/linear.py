"""Dense projections, fused where they share their input, with weights packed for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.weight import Placement, Weight, Weights

PACK_ROWS = 32
"""The number of rows that packed weights are laid out for; in bfloat16 and float32 the layout suits all others."""


class Linear:
    """x @ weight.T + bias, of one projection or of several that are stored one below the other.

    Once its last part is loaded, the weight is packed into oneDNN's own layout where that has fast products of its
    type, and the plain one is dropped. A result then does not depend on how many rows are computed with it.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement) -> None:
        """
        Args:
            parts: the projections' names in the checkpoint and their numbers of outputs, in order.
            bias: whether each has a bias.
        """
        self._in_features = in_features
        self._parts = dict(parts)
        self._placement = placement
        self._packed = False
        self._missing = len(parts)
        self._weight = placement.empty(0)
        self._bias = placement.empty(sum(parts.values())) if bias else None

    def weights(self, prefix: str) -> Weights:
        """What it is loaded from; names start with prefix."""
        weights: Weights = {}
        start = 0
        for name, size in self._parts.items():
            rows = slice(start, start + size)
            weights[f"{prefix}{name}.weight"] = Weight((size, self._in_features), self._weight_loader(rows))
            if self._bias is not None:
                weights[f"{prefix}{name}.bias"] = Weight((size,), self._bias[rows].copy_)
            start += size
        return weights

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, all outputs]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)

    def _weight_loader(self, rows: slice) -> Callable[[Tensor], None]:
        def load(tensor: Tensor) -> None:
            if len(self._parts) == 1:
                self._weight = tensor
            else:
                if self._missing == len(self._parts):
                    self._weight = self._placement.empty(sum(self._parts.values()), self._in_features)
                self._weight[rows].copy_(tensor)
            self._missing -= 1
            if self._missing == 0 and _packs(self._placement):
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), PACK_ROWS)
                self._packed = True

        return load


def _packs(placement: Placement) -> bool:
    """Whether oneDNN multiplies packed weights of this type on this machine."""
    if placement.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if placement.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return placement.dtype == torch.float32
