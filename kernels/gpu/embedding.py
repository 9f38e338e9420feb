"""Token embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variants import Variant

_UNIT = 8
"""Sizes are given to the kernel in this unit, from which Triton sees that rows allow 16-byte accesses."""
_BLOCK = 2048
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["units"])
def _embedding(token_ids, table, output, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, part): BLOCK of the token's row."""
    size = units * UNIT
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(table + row * size + column, mask=inside)
    tl.store(output + token * size + column, value, mask=inside)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """The table's rows of int32 [tokens]: [vocab, size] to [tokens, size].

    Raises:
        ValueError: size is not a multiple of 8, or the table is not contiguous.
    """
    size = table.shape[1]
    if size % _UNIT:
        raise ValueError(f"size={size}: must be a multiple of {_UNIT}")
    if not table.is_contiguous():
        raise ValueError(f"table with strides {table.stride()}: must be contiguous")
    output = table.new_empty(len(token_ids), size)
    if output.numel():
        _embedding[(len(token_ids), triton.cdiv(size, _BLOCK))](
            token_ids,
            table,
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
            kernel=_embedding,
            signature={"token_ids": "*i32", "table": f"*{dtype}", "output": f"*{dtype}", "units": "i32"},
            constants={"UNIT": _UNIT, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=1,
        )
