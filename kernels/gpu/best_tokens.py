"""The best token of a row, by the maxima of its tiles; and how a token is given out."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.logits import load_logits
from kernels.gpu.sampling_row import SOURCE, TABLE_ROW, load_int
from kernels.gpu.sampling_scale import NO_TOKEN


@triton.jit
def best_logit(tile_maxima, num_tiles, BLOCK: tl.constexpr):
    """The best logit of a row."""
    best = float("-inf")
    for first in range(0, num_tiles, BLOCK):
        index = first + tl.arange(0, BLOCK)
        maxima = tl.load(tile_maxima + index, mask=index < num_tiles, other=float("-inf"))
        best = tl.maximum(best, tl.max(maxima, axis=0))
    return best


@triton.jit
def best_token(logits, adjusted, tile_maxima, place, source, vocab, stride_units, num_tiles,
                UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The best logit of a row and the lowest token that has it."""
    best = best_logit(tile_maxima, num_tiles, BLOCK)
    tile = num_tiles - 1
    for first in range(0, num_tiles, BLOCK):
        index = first + tl.arange(0, BLOCK)
        maxima = tl.load(tile_maxima + index, mask=index < num_tiles, other=float("-inf"))
        tile = tl.minimum(tile, tl.min(tl.where(maxima == best, index, num_tiles), axis=0))
    token = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits, adjusted, place, source, token, vocab, stride_units, UNIT)
    return best, tl.min(tl.where(x == best, token, NO_TOKEN), axis=0)


@triton.jit
def put_token(token, usable, place, count_row, token_ids, broken, counts, vocab, UNIT: tl.constexpr):
    """Gives out a row's token, and counts it."""
    token = tl.where(usable, token, 0)
    tl.store(token_ids + place, token)
    tl.store(broken + place, (~usable).to(tl.int32))
    if counts is not None:
        seen = counts + count_row.to(tl.int64) * (tl.cdiv(vocab, UNIT) * UNIT) + token
        tl.atomic_add(seen, 2, mask=usable & (count_row >= 0))


@triton.jit(do_not_specialize=["vocab", "stride_units", "num_tiles"])
def find_maxima(
    logits, adjusted, fields, tile_maxima, vocab, stride_units, num_tiles,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (chunk, place)."""
    chunk = tl.program_id(0)
    place = tl.program_id(1)
    source = -1
    if fields is not None:
        source = load_int(fields + place * FIELDS + SOURCE)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits, adjusted, place, source, token, vocab, stride_units, UNIT)
    TILES: tl.constexpr = CHUNK // TILE
    maxima = tl.max(tl.reshape(x, [TILES, TILE]), axis=1)
    tl.store(tile_maxima + place * num_tiles + chunk * TILES + tl.arange(0, TILES), maxima)


@triton.jit(
    do_not_specialize=["vocab", "stride_units", "num_tiles"],
    do_not_specialize_on_alignment=["token_ids", "broken"],
)
def pick_best_tokens(
    logits, adjusted, fields, tile_maxima, token_ids, broken, counts, vocab, stride_units, num_tiles,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program place."""
    place = tl.program_id(0)
    source = -1
    count_row = -1
    if fields is not None:
        source = load_int(fields + place * FIELDS + SOURCE)
        count_row = load_int(fields + place * FIELDS + TABLE_ROW)
    best, token = best_token(
        logits, adjusted, tile_maxima + place * num_tiles, place, source, vocab, stride_units, num_tiles,
        UNIT, TILE, BLOCK,
    )  # fmt: skip
    put_token(token, best > float("-inf"), place, count_row, token_ids, broken, counts, vocab, UNIT)
