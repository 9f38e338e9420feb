"""The noise of sampling on a GPU, bit for bit that of engine/sampling/noise.py, which says how it is made.

Float64 is slow on many GPUs, and nearly every token loses by far: `approximate_wait` is float32, and the exact noise is
needed only for tokens that come within NOISE_ERROR of the best.
"""

from __future__ import annotations

import triton
import triton.language as tl

GUMBEL_MAX = tl.constexpr(16.635532)
"""Noise of the largest bits."""
NOISE_ERROR = tl.constexpr(1e-4)
"""Of a score: far above what approximate ones err by, far below what would let many tokens through."""


@triton.jit
def random_bits(seed, position, start, TOKENS: tl.constexpr):
    """The 23 random bits of tokens start, start + 1 and so on; int32 [TOKENS].

    Args:
        seed: int64. position: int32. start: int32, a multiple of 4.

    Source: Salmon et al. 2011 (Philox4x32-10), one evaluation for four tokens.
    """
    block = start // 4 + tl.arange(0, TOKENS // 4)
    zero = position * 0
    w0, w1, w2, w3 = tl.philox(seed, block, position, zero, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return (words >> 9).to(tl.int32)


@triton.jit
def random_bits_of(seed, position, token):
    """The same of any tokens, int32 in the shape of `token`."""
    zero = position * 0
    w0, w1, w2, w3 = tl.philox(seed, token // 4, position, zero, zero)
    lane = token % 4
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return (word >> 9).to(tl.int32)


@triton.jit
def gumbel(bits):
    """Float32 noise of 23 bits: float64, rounded once."""
    u = (bits.to(tl.float64) + 0.5) * 1.1920928955078125e-07
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def approximate_wait(bits):
    """exp(-noise), which is -log u, in float32: right to less than NOISE_ERROR / 10 of itself.

    Near 1 a float32 logarithm loses the digits that matter: there -log(1 - rest) is a series in `rest`, which is exact.
    """
    u = (2 * bits + 1).to(tl.float32) * 5.9604644775390625e-08
    rest = (16777215 - 2 * bits).to(tl.float32) * 5.9604644775390625e-08
    series = 1.0 / 9
    for divisor in tl.static_range(8, 0, -1):
        series = series * rest + 1.0 / divisor
    return tl.where(rest < 0.25, rest * series, -tl.log(u))
