"""The noise of sampling: a pure function of (seed, position, token id).

The best of logits + Gumbel noise is a draw from their softmax (the Gumbel-max trick). Since a token's noise depends on
nothing else, a token is drawn the same alone, in any batch, on any device and after any failover. Every implementation
(this one, C++, Triton) computes the same bits:

1. Philox4x32-10 with key (seed mod 2^32, seed div 2^32) and counter (token id div 4, position, 0, 0). Its four 32-bit
   outputs belong to four neighbouring tokens: token t takes output t mod 4.
2. The upper 23 bits m give u = (2m + 1) / 2^24, exact in float32 and never 0 or 1.
3. The noise is -log(-log u), computed in float64 and rounded once to float32. Libraries differ in the last bit of a
   float32 logarithm, which would now and then change a token; in float64 that bit is far below the rounding. numpy,
   torch and the C library agree on all 2^23 values.

The noise lies in [GUMBEL_MIN, GUMBEL_MAX], 19.4 apart: a token much less probable than 2^-24 is practically never
drawn.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox); Maddison et al. 2014, "A* sampling"
(the trick).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Words = Any
"""A uint64 array, or a numpy scalar of that type, holding 32-bit values; they broadcast."""

TOKENS_PER_BLOCK = 4
"""Tokens that one evaluation of Philox serves."""

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-24)))
GUMBEL_MIN = -math.log(24 * math.log(2.0))

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10 of four counter words and two key words; gives four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # 32 x 32 bits fit 64. What is still a scalar in the first rounds costs nothing.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HIGH) ^ (c1 ^ k0), p1 & _LOW, (p0 >> _HIGH) ^ (c3 ^ k1), p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def random_blocks(seed: int | np.ndarray, position: int | np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """The 23 random bits m of whole blocks of tokens.

    Args:
        seed: 64 bits, unsigned. position: of the token to sample, below 2^32. Numbers, or arrays that broadcast
            against blocks.
        blocks: token ids div 4.

    Returns:
        Four uint64 arrays like blocks: of the tokens 4 * block + 0, 1, 2 and 3.
    """
    seeds, positions = np.asarray(seed, np.uint64)[()], np.asarray(position, np.uint64)[()]
    counter = blocks.astype(np.uint64), positions, np.uint64(0), np.uint64(0)
    words = philox4x32(counter, (seeds & _LOW, seeds >> _HIGH))
    return tuple(word >> np.uint64(9) for word in words)


def gumbel(seed: int | np.ndarray, position: int | np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Gumbel noise of tokens, float32 in the shape of token_ids.

    Args:
        seed: 64 bits, unsigned. position: of the token to sample, below 2^32. Numbers, or arrays that broadcast
            against token_ids.
        token_ids: integers below 2^34.
    """
    token_ids = np.asarray(token_ids)
    blocks = random_blocks(seed, position, token_ids // TOKENS_PER_BLOCK)
    return gumbel_of_bits(np.choose(token_ids % TOKENS_PER_BLOCK, blocks))


def gumbel_of_bits(bits: np.ndarray) -> np.ndarray:
    """Float32 Gumbel noise of 23 random bits."""
    u = (bits + 0.5) * 2.0**-23
    return (-np.log(-np.log(u))).astype(np.float32)
