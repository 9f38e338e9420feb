"""RMS norms, alone and with the residual's addition."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variants import Variant

_UNIT = 8
"""Sizes are given to the kernel in this unit, from which Triton sees that rows allow 16-byte accesses."""
_SHAPES = ((1024, 2), (4096, 8), (8192, 16), (16384, 16))
"""Largest size and warps. Rows stay in registers: of each 16-bit tensor at most four 16-byte accesses a thread."""
_MAX_SIZE = _SHAPES[-1][0]


@triton.jit(do_not_specialize=["units"])
def _rms_norm(x, residual, weight, normed, total, eps, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row, which it holds in registers: each byte is read and written once."""
    size = units * UNIT
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = x.dtype.element_ty
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row + column, value.to(dtype), mask=inside)
        value = value.to(dtype).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    rounded = (value * inverse).to(dtype).to(tl.float32)
    tl.store(normed + row + column, (rounded * scale).to(dtype), mask=inside)


def _tile(size: int) -> dict[str, int]:
    """Constants and warps for rows of a size."""
    block, num_warps = next(shape for shape in _SHAPES if size <= shape[0])
    return {"UNIT": _UNIT, "BLOCK": block, "num_warps": num_warps}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times weight.

    Args:
        x: [..., size], contiguous; size is a multiple of 8, at most 16,384.
        weight: [size], of x's type.

    Returns:
        As x. The mean is float32; what is normalised is rounded to x's type before the weight.

    Raises:
        ValueError: such a size is not supported, or x is not contiguous.

    Source: Zhang and Sennrich 2019.
    """
    normed = x.new_empty(x.shape)
    _launch(x, None, weight, normed, None, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm of x + residual, and that sum: the residual that the next norm is given."""
    normed, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, normed, total, eps)
    return normed, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, total: Tensor | None, eps: float
) -> None:
    size = x.shape[-1]
    if size % _UNIT or size > _MAX_SIZE:
        raise ValueError(f"size={size}: must be a multiple of {_UNIT} and at most {_MAX_SIZE:,}")
    if not x.is_contiguous() or not (residual is None or residual.is_contiguous()):
        raise ValueError("x and residual must be contiguous")
    if x.numel():
        _rms_norm[(x.numel() // size,)](
            x, residual, weight, normed, total, eps, size // _UNIT, **_tile(size), num_stages=1, enable_fp_fusion=True
        )


def variants() -> Iterator[Variant]:
    for size, _ in _SHAPES:
        tile = _tile(size)
        num_warps = tile.pop("num_warps")
        for dtype in ("bf16", "fp16", "fp32"):
            for added in (False, True):
                pointers = ["x", "weight", "normed", *(["residual", "total"] if added else [])]
                yield Variant(
                    name=f"{dtype} up to {size}" + (" add" if added else ""),
                    kernel=_rms_norm,
                    signature=dict.fromkeys(pointers, f"*{dtype}") | {"eps": "fp32", "units": "i32"},
                    constants=tile | ({} if added else {"residual": None, "total": None}),
                    num_warps=num_warps,
                    num_stages=1,
                )
