"""A row's sampling parameters as the kernels read them: int64 [FIELDS], with floats as their bits."""

from __future__ import annotations

import triton
import triton.language as tl

TABLE_ROW = tl.constexpr(0)
"""The request's row in the table of counts; -1 where nothing is counted."""
POSITION = tl.constexpr(1)
"""Of the token to sample: the sequence's length."""
SEED = tl.constexpr(2)
TEMPERATURE = tl.constexpr(3)
"""float32; 0 takes the best token."""
TOP_K = tl.constexpr(4)
"""The vocabulary's size where it is off."""
TOP_P = tl.constexpr(5)
"""float64; 1 where it is off."""
FLOOR = tl.constexpr(6)
"""float32, the least (logit - best) / temperature that min_p leaves."""
WEIGHED = tl.constexpr(7)
"""Whether the filters need the whole row's probabilities, and not only its best tokens: see `sampling`."""
SOURCE = tl.constexpr(8)
"""The row among the adjusted logits; -1 where the raw ones are used."""
MASK = tl.constexpr(9)
"""The row among the bitmasks of allowed tokens; -1 where all are."""
REPETITION, PRESENCE, FREQUENCY = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
"""float32, penalties; 1, 0 and 0 where they are off."""
MIN_LENGTH = tl.constexpr(13)
"""A shorter sequence cannot stop."""
ENTRIES = tl.constexpr(14)
"""Address of int32 [3, NUM_ENTRIES]: distinct token ids, biases as float32 bits, whether the token stops."""
NUM_ENTRIES = tl.constexpr(15)
FIELDS = tl.constexpr(16)


@triton.jit
def load_float(field):
    """A float32 field."""
    return tl.load(field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_int(field):
    """A field that fits int32."""
    return tl.load(field).to(tl.int32)
