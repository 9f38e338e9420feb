"""Kernels that compile, and some that must not pass, for the tests of `python -m kernels.compile`.

Run as a module it is that command with these kernels instead of the engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.compile import main
from kernels.gpu.variants import FP8_CAPABILITY, Variant


@triton.jit
def scaled(x, size, scale, SQUARE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size).to(tl.float32) * scale
    if SQUARE:
        value *= value
    tl.store(x + at, value.to(x.dtype.element_ty), mask=at < size)


@triton.jit
def normed(x, bias, BLOCK: tl.constexpr):
    """Holds a whole row in registers, however long it is."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    value /= tl.sum(value)
    if bias is not None:
        value += tl.load(bias + at)
    tl.store(x + at, value)


@triton.jit
def product(x, y, out, size, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A loop whose pipeline has num_stages tiles of x and y in shared memory."""
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, size, K):
        left = tl.load(x + rows[:, None] * 4096 + (start + inner)[None, :])
        right = tl.load(y + (start + inner)[:, None] * 4096 + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * 4096 + columns[None, :], total)


@triton.jit
def mistaken(x):
    tl.store(x, no_such_name)  # noqa: F821


@triton.constexpr_function
def crash():
    exec("import os; os.abort()")  # Written so that Triton does not look into it.


@triton.jit
def crashing(x):
    tl.store(x, crash())


def variants() -> Iterator[Variant]:
    plain = {"constants": {"SQUARE": True, "BLOCK": 256}, "num_warps": 4, "num_stages": 1}
    x = {"size": "i32", "scale": "fp32"}
    yield Variant(name="bf16", kernel=scaled, signature={"x": "*bf16", **x}, **plain)
    fp8 = {"x": "*fp8e4nv", **x}
    yield Variant(name="fp8", kernel=scaled, signature=fp8, min_capability=FP8_CAPABILITY, **plain)
    for name, block, spill_bytes in (("fits", 1024, 0), ("spills", 32768, 0), ("spills as declared", 32768, 1 << 20)):
        yield Variant(
            name=name,
            kernel=normed,
            signature={"x": "*fp32"},
            constants={"bias": None, "BLOCK": block},
            num_warps=4,
            num_stages=1,
            spill_bytes=spill_bytes,
            min_capability=90,
        )
    yield Variant(
        name="7 stages",
        kernel=product,
        signature={"x": "*fp16", "y": "*fp16", "out": "*fp32", "size": "i32"},
        constants={"M": 128, "N": 128, "K": 64},
        num_warps=4,
        num_stages=7,
    )
    for kernel in (mistaken, crashing):
        one = {"signature": {"x": "*fp32"}, "constants": {}, "num_warps": 1, "num_stages": 1, "min_capability": 100}
        yield Variant(name="one", kernel=kernel, **one)


if __name__ == "__main__":
    sys.exit(main(variants=variants()))
