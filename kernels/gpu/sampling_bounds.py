"""Below which level no token of a row can be drawn: see `sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.best_tokens import best_logit, best_token, put_token
from kernels.gpu.logits import load_logits, ordered, unordered
from kernels.gpu.noise import GUMBEL_MAX, NOISE_ERROR, gumbel, random_bits_of
from kernels.gpu.sampling_row import (
    FLOOR,
    POSITION,
    SEED,
    SOURCE,
    TABLE_ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WEIGHED,
    load_float,
    load_int,
)
from kernels.gpu.sampling_scale import DONE, DRAWN, GATHERED, INF, LEVELS, MARKS, NEGLIGIBLE, level_at, scale, weigh


@triton.jit(do_not_specialize=["vocab", "stride_units", "num_tiles"])
def weigh_levels(
    logits, adjusted, fields, tile_maxima, level_counts, level_weights, vocab, stride_units, num_tiles,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, place): how many of the chunk's tokens reach each level, and their weights."""
    chunk = tl.program_id(0)
    place = tl.program_id(1)
    fields += place * FIELDS
    if load_int(fields + WEIGHED) != 0:
        best = best_logit(tile_maxima + place * num_tiles, num_tiles, BLOCK)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits, adjusted, place, load_int(fields + SOURCE), token, vocab, stride_units, UNIT)
        scaled = scale(x, best, load_float(fields + TEMPERATURE))
        weight = weigh(scaled, load_float(fields + FLOOR))
        most = tl.max(scaled, axis=0)
        entry = (place * tl.num_programs(0) + chunk) * LEVELS
        for index in tl.static_range(LEVELS):
            level = level_at(tl.full([], index, tl.int32))
            count = 0
            sum = tl.full([], 0, tl.int64)
            if most >= level:
                count = tl.sum((scaled >= level).to(tl.int32), axis=0)
                sum = tl.sum(tl.where(scaled >= level, weight, 0), axis=0)
            tl.store(level_counts + entry + index, count)
            tl.store(level_weights + entry + index, sum)


@triton.jit
def _kth_maximum(tile_maxima, num_tiles, k, best, BLOCK: tl.constexpr):
    """The k-th best of the tile maxima, which k tokens reach at least; -inf where there are fewer."""
    low = tl.full([], -2139095041, tl.int64)  # the key of -inf
    high = ordered(best).to(tl.int64) + 1
    count = num_tiles
    while (high - low > 1) & (count != k) & (k <= num_tiles):
        middle = (low + high) // 2
        count = 0
        for first in range(0, num_tiles, BLOCK):
            index = first + tl.arange(0, BLOCK)
            maxima = tl.load(tile_maxima + index, mask=index < num_tiles, other=float("-inf"))
            count += tl.sum((ordered(maxima).to(tl.int64) >= middle).to(tl.int32), axis=0)
        if count >= k:
            low = middle
        else:
            high = middle
    return unordered(low.to(tl.int32))


@triton.jit
def _level_sums(counts, weights, chunks):
    """The levels' counts and weights of a whole row."""
    level = tl.arange(0, LEVELS)
    count = tl.zeros([LEVELS], tl.int32)
    weight = tl.zeros([LEVELS], tl.int64)
    for first in range(0, chunks, 32):
        chunk = first + tl.arange(0, 32)
        entry = chunk[:, None] * LEVELS + level[None, :]
        inside = (chunk < chunks)[:, None]
        count += tl.sum(tl.load(counts + entry, mask=inside, other=0), axis=0)
        weight += tl.sum(tl.load(weights + entry, mask=inside, other=0), axis=0)
    return count, weight


@triton.jit(
    do_not_specialize=["vocab", "stride_units", "num_tiles"],
    do_not_specialize_on_alignment=["token_ids", "broken"],
)
def set_bounds(
    logits, adjusted, fields, tile_maxima, level_counts, level_weights, levels, marks, totals,
    token_ids, broken, counts, vocab, stride_units, num_tiles,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program place."""
    place = tl.program_id(0)
    fields += place * FIELDS
    tile_maxima += place * num_tiles
    source = load_int(fields + SOURCE)
    best, token = best_token(
        logits, adjusted, tile_maxima, place, source, vocab, stride_units, num_tiles, UNIT, TILE, BLOCK
    )
    temperature = load_float(fields + TEMPERATURE)
    way = DONE
    if (temperature > 0) & (best > float("-inf")):
        top_k = load_int(fields + TOP_K)
        top_p = tl.load(fields + TOP_P).to(tl.float64, bitcast=True)
        weighed = load_int(fields + WEIGHED) != 0
        score = gumbel(random_bits_of(tl.load(fields + SEED), load_int(fields + POSITION), token))
        low = tl.maximum(load_float(fields + FLOOR), NEGLIGIBLE)
        certain = -INF
        reach = score - (GUMBEL_MAX + NOISE_ERROR)
        way = DRAWN
        if weighed:
            chunks = num_tiles // (CHUNK // TILE)
            entry = place * chunks * LEVELS
            count, weight = _level_sums(level_counts + entry, level_weights + entry, chunks)
            index = tl.arange(0, LEVELS)
            total = tl.max(weight, axis=0)
            enough = count >= top_k
            if top_k >= vocab:
                enough = weight.to(tl.float64) >= top_p * total.to(tl.float64)
            last = tl.min(tl.where(enough, index, LEVELS - 1), axis=0)
            low = tl.maximum(low, level_at(last))
            certain = tl.where((last > 0) & ((top_k >= vocab) | (top_p == 1)), level_at(last - 1), INF)
            tl.store(totals + place, total)
            if tl.sum(tl.where(index == last, count, 0), axis=0) <= LISTED:
                way = GATHERED
        elif (top_k < vocab) | (top_p < 1):
            bound = _kth_maximum(tile_maxima, num_tiles, top_k, best, BLOCK)
            low = tl.maximum(low, scale(bound, best, temperature))
            way = GATHERED
        if (top_p == 1) | (weighed & (top_k >= vocab)):  # The weight of what is out of reach is known, or of no use.
            low = tl.maximum(low, reach)
        tl.store(levels + place * MARKS + 1, low)
        tl.store(levels + place * MARKS + 2, certain)
        tl.store(levels + place * MARKS + 3, score)
    else:
        count_row = load_int(fields + TABLE_ROW)
        put_token(token, best > float("-inf"), place, count_row, token_ids, broken, counts, vocab, UNIT)
    tl.store(levels + place * MARKS, best)
    tl.store(marks + place * MARKS, way)
    tl.store(marks + place * MARKS + 1, token)
    tl.store(marks + place * MARKS + 2, 0)
