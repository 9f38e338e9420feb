"""The gated activation between a layer's two MLP products."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variants import Variant

_UNIT = 8
"""Sizes are given to the kernel in this unit, from which Triton sees that rows allow 16-byte accesses."""
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["units"])
def _silu_and_mul(gate_up, output, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part): BLOCK of the row's outputs."""
    size = units * UNIT
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype = output.dtype.element_ty
    gate = tl.load(gate_up + 2 * row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + size + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded where two operations would.
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + row + column, (activated * up).to(dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: [..., 2 * size] to [..., size].

    Raises:
        ValueError: size is not a multiple of 8, or gate_up is not contiguous.

    Source: Shazeer 2020.
    """
    size = gate_up.shape[-1] // 2
    if gate_up.shape[-1] % (2 * _UNIT):
        raise ValueError(f"gate_up[..., {gate_up.shape[-1]}]: must be twice a multiple of {_UNIT}")
    if not gate_up.is_contiguous():
        raise ValueError(f"gate_up with strides {gate_up.stride()}: must be contiguous")
    output = gate_up.new_empty(*gate_up.shape[:-1], size)
    if output.numel():
        _silu_and_mul[(output.numel() // size, triton.cdiv(size, _BLOCK))](
            gate_up,
            output,
            size // _UNIT,
            UNIT=_UNIT,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return output


def variants() -> Iterator[Variant]:
    for dtype in ("bf16", "fp16", "fp32"):
        yield Variant(
            name=dtype,
            kernel=_silu_and_mul,
            signature={"gate_up": f"*{dtype}", "output": f"*{dtype}", "units": "i32"},
            constants={"UNIT": _UNIT, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=1,
        )
