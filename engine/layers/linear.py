"""Dense projections, fused where they share their input, with weights packed for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.recorder import Recorded
from engine.layers.weight import Packing, Placement, Weight, Weights
from kernels.cpu.library import PANEL, QUAD, Format, interleave, pack_int8, pack_panels

PACK_ROWS = 32
"""The number of rows that packed weights are laid out for; in bfloat16 and float32 the layout suits all others."""

FORMATS: Mapping[Packing, Format] = {
    "panels": Format.PANELS,
    "panels_int8": Format.INT8,
    "panels_int8_w8a8": Format.INT8_ACTIVATIONS,
}


class Linear:
    """x @ weight.T + bias, of one projection or of several that are stored one below the other.

    Once its last part is loaded, the weight is packed as the placement says, and the plain one is dropped. A result of
    packed weights does not depend on how many rows are computed with it.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement, gated: bool = False
    ) -> None:
        """
        Args:
            parts: the projections' names in the checkpoint and their numbers of outputs, in order.
            bias: whether each has a bias.
            gated: there are two parts, gate and up, and silu_and_mul follows.
        """
        self._in_features = in_features
        self._parts = dict(parts)
        self._placement = placement
        self._gated = gated
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

    @property
    def packed_weight(self) -> Tensor:
        return self._weight

    @overload
    def __call__(self, x: Tensor) -> Tensor: ...
    @overload
    def __call__(self, x: Recorded) -> Recorded: ...
    def __call__(self, x: Tensor | Recorded) -> Tensor | Recorded:
        """[rows, in_features] to [rows, all outputs]."""
        if isinstance(x, Recorded):
            outputs = sum(self._parts.values())
            return x.recorder.linear(
                x, self._weight, self._panel_bias(), self._in_features, outputs, FORMATS[self._placement.packing]
            )
        if self._placement.packing == "onednn":
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
            if self._missing == 0:
                self._pack()

        return load

    def _pack(self) -> None:
        if self._placement.packing == "onednn":
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), PACK_ROWS)
        elif self._placement.packing in FORMATS:
            weight = interleave(*self._halves(self._weight)) if self._gated else self._weight
            match FORMATS[self._placement.packing]:
                case Format.PANELS:
                    self._weight = pack_panels(weight)
                case Format.INT8:
                    self._weight = pack_int8(weight, step=2 if self._placement.dtype == torch.bfloat16 else 1)
                case Format.INT8_ACTIVATIONS:
                    self._weight = pack_int8(weight, step=QUAD)

    def _panel_bias(self) -> Tensor | None:
        """The bias in float32, in the order of the panels' columns and as long as they are."""
        if self._bias is None:
            return None
        bias = self._bias.float()
        if self._gated:
            bias = interleave(*self._halves(bias))
        return F.pad(bias, (0, -len(bias) % PANEL))

    def _halves(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = tensor.split(list(self._parts.values()))
        return gate, up


def packing_for(dtype: torch.dtype, device: torch.device) -> Packing:
    """oneDNN's, where it multiplies packed weights of this type on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return "plain"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "plain"
    if dtype == torch.bfloat16:
        return "onednn" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "plain"
    return "onednn" if dtype == torch.float32 else "plain"
