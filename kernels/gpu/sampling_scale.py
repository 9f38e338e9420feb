"""What the kernels of sampling agree on: scales, levels, and how they tell each other about a row.

What is found between kernels lies in three arrays of MARKS entries or one a row: levels (float32: the best logit, the
lowest scaled logit to draw, the lowest that is certainly kept, the best token's score), marks (int32: the way in which
its token is found, the best token, how many tokens were gathered), and the weight of all tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

DONE, DRAWN, GATHERED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The ways: it is the best token; the chunks' draws compete; few tokens are left and were gathered."""
MARKS = tl.constexpr(4)
LEVELS = tl.constexpr(16)
INF = tl.constexpr(float("inf"))
NEGLIGIBLE = tl.constexpr(-32.0)
"""What is scaled to less weighs nothing."""
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def scale(x, best, temperature):
    """As the CPU computes it; -inf stays, also beside a best logit of -inf."""
    return tl.where(x == float("-inf"), x, tl.div_rn(x - best, temperature + tl.zeros_like(x)))


@triton.jit
def weigh(scaled, floor):
    """int64, in 2^-44: sums of 2^18 of them fit, in any order."""
    return tl.where(scaled >= floor, tl.exp(scaled) * 17592186044416.0, 0.0).to(tl.int64)


@triton.jit
def level_at(index):
    """Scaled logits are told apart at these levels, the last of which is below all; denser near the best."""
    step = index + 1
    return tl.where(step == LEVELS, -INF, (step * step + 7 * step).to(tl.float32) / -16.0)
