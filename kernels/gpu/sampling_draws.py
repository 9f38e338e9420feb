"""Draws among the tokens that a row's filters leave: see `sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.best_tokens import put_token
from kernels.gpu.logits import load_logits, logit_of_key, token_key, token_of_key
from kernels.gpu.noise import NOISE_ERROR, approximate_wait, gumbel, random_bits, random_bits_of
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
from kernels.gpu.sampling_scale import DONE, DRAWN, GATHERED, INF, MARKS, NO_TOKEN, scale, weigh

NO_KEY, LAST_KEY = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)


@triton.jit
def best_draw(scaled, token, bits, allowed, score, winner):
    """The best of (score, winner) and of the tokens that are allowed, by exact scores.

    Which tokens may be that good is seen in exp(-score), where one logarithm is less: the waits of an exponential race.
    """
    waits = tl.where(allowed, approximate_wait(bits) * tl.exp(-scaled), INF)
    wait = tl.min(waits, axis=0)
    while wait <= tl.exp(-score + NOISE_ERROR):
        rival = tl.min(tl.where(waits == wait, token, NO_TOKEN), axis=0)
        chosen = token == rival
        rival_bits = tl.sum(tl.where(chosen, bits, 0), axis=0)
        rival_score = tl.sum(tl.where(chosen, scaled, 0.0), axis=0) + gumbel(rival_bits)
        wins = (rival_score > score) | ((rival_score == score) & (rival < winner))
        score = tl.where(wins, rival_score, score)
        winner = tl.where(wins, rival, winner)
        waits = tl.where(chosen, INF, waits)
        wait = tl.min(waits, axis=0)
    return score, winner


@triton.jit(do_not_specialize=["vocab", "stride_units", "num_tiles"])
def draw_chunks(
    logits, adjusted, fields, tile_maxima, levels, marks, gathered, scores, winners, vocab, stride_units, num_tiles,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Program (chunk, place): gathers the chunk's tokens that may be drawn, or draws the best of them."""
    chunk = tl.program_id(0)
    place = tl.program_id(1)
    fields += place * FIELDS
    marks += place * MARKS
    levels += place * MARKS
    way = tl.load(marks)
    if way != DONE:
        TILES: tl.constexpr = CHUNK // TILE
        best = tl.load(levels)
        low = tl.load(levels + 1)
        score = tl.load(levels + 3)
        winner = tl.load(marks + 1)
        temperature = load_float(fields + TEMPERATURE)
        most = tl.max(tl.load(tile_maxima + place * num_tiles + chunk * TILES + tl.arange(0, TILES)), axis=0)
        if scale(most, best, temperature) >= low:
            source = load_int(fields + SOURCE)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(logits, adjusted, place, source, token, vocab, stride_units, UNIT)
            scaled = scale(x, best, temperature)
            inside = scaled >= low
            if way == GATHERED:
                taken = inside.to(tl.int32)
                first = tl.atomic_add(marks + 2, tl.sum(taken, axis=0))
                index = first + tl.cumsum(taken, axis=0) - 1
                tl.store(gathered + place * LISTED + index, token_key(x, token), mask=inside & (index < LISTED))
            else:
                bits = random_bits(tl.load(fields + SEED), load_int(fields + POSITION), chunk * CHUNK, CHUNK)
                score, winner = best_draw(scaled, token, bits, inside, score, winner)
        tl.store(scores + place * tl.num_programs(0) + chunk, score)
        tl.store(winners + place * tl.num_programs(0) + chunk, winner)


@triton.jit
def _cut(keys, inside, amounts, target):
    """The key with which the amounts, added up from the largest key on, reach a target; the least key if none does."""
    low = tl.min(tl.where(inside, keys, LAST_KEY), axis=0)
    high = tl.max(tl.where(inside, keys, NO_KEY), axis=0) + 1
    left = tl.sum(inside.to(tl.int32), axis=0)
    before = 0
    while left - before > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = inside & (keys >= middle)
        count = tl.sum(reached.to(tl.int32), axis=0)
        enough = tl.sum(tl.where(reached, amounts, 0), axis=0).to(tl.float64) >= target
        low = tl.where(enough, middle, low)
        left = tl.where(enough, count, left)
        high = tl.where(enough, high, middle)
        before = tl.where(enough, before, count)
    return low


@triton.jit
def _draw_gathered(gathered, count, total, of_gathered, best, temperature, top_k, top_p, seed, position, score, winner,
                   LISTED: tl.constexpr):  # fmt: skip
    """Filters gathered tokens and draws.

    Args:
        total: the weight of all tokens. of_gathered: it is that of the top_k best of the gathered ones instead.
    """
    index = tl.arange(0, LISTED)
    inside = index < count
    keys = tl.load(gathered + index, mask=inside, other=NO_KEY)
    if count > top_k:
        inside = inside & (keys >= _cut(keys, inside, tl.full([LISTED], 1, tl.int64), top_k.to(tl.float64)))
    scaled = scale(tl.where(inside, logit_of_key(keys), float("-inf")), best, temperature)
    if top_p < 1:
        weight = weigh(scaled, -INF)
        if of_gathered:
            total = tl.sum(weight, axis=0)
        target = top_p * total.to(tl.float64)
        if tl.sum(weight, axis=0).to(tl.float64) >= target:
            inside = inside & (keys >= _cut(keys, inside, weight, target))
    token = token_of_key(keys)
    return best_draw(scaled, token, random_bits_of(seed, position, token), inside, score, winner)


@triton.jit
def _before(logits, adjusted, place, source, vocab, stride_units, limit, best, temperature, floor,
            UNIT: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """How many tokens come before a key in the order of tokens, and what they weigh."""
    count = 0
    weight = tl.full([], 0, tl.int64)
    for first in range(0, vocab, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = load_logits(logits, adjusted, place, source, token, vocab, stride_units, UNIT)
        scaled = scale(x, best, temperature)
        inside = (token_key(x, token) > limit) & (scaled >= floor) & (token < vocab)
        count += tl.sum(inside.to(tl.int32), axis=0)
        weight += tl.sum(tl.where(inside, weigh(scaled, floor), 0), axis=0)
    return count, weight


@triton.jit
def _best_weight(logits, adjusted, place, source, vocab, stride_units, top_k, high, best, temperature, floor,
                 UNIT: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The weight of the top_k best tokens: a search for the key that so many come before. `high` is the best one's."""
    low = tl.full([], NO_KEY, tl.int64)
    count, weight = _before(
        logits, adjusted, place, source, vocab, stride_units, low, best, temperature, floor, UNIT, CHUNK
    )
    if count > top_k:
        while count != top_k:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            count, weight = _before(
                logits, adjusted, place, source, vocab, stride_units, middle, best, temperature, floor, UNIT, CHUNK
            )
            if count > top_k:
                low = middle
            else:
                high = middle
    return weight


@triton.jit
def _draw_before(logits, adjusted, place, source, vocab, stride_units, limit, best, temperature, low, seed, position,
                 score, winner, UNIT: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The best draw among the tokens that come before a key and reach a level."""
    for first in range(0, vocab, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = load_logits(logits, adjusted, place, source, token, vocab, stride_units, UNIT)
        scaled = scale(x, best, temperature)
        inside = (token_key(x, token) > limit) & (scaled >= low)
        if tl.max(inside.to(tl.int32), axis=0) != 0:
            bits = random_bits(seed, position, first, CHUNK)
            score, winner = best_draw(scaled, token, bits, inside, score, winner)
    return score, winner


@triton.jit(
    do_not_specialize=["vocab", "stride_units", "chunks"],
    do_not_specialize_on_alignment=["token_ids", "broken"],
)
def finish_draws(
    logits, adjusted, fields, levels, marks, totals, gathered, scores, winners, token_ids, broken, counts,
    vocab, stride_units, chunks,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program place."""
    place = tl.program_id(0)
    fields += place * FIELDS
    marks += place * MARKS
    levels += place * MARKS
    way = tl.load(marks)
    if way != DONE:
        source = load_int(fields + SOURCE)
        seed = tl.load(fields + SEED)
        position = load_int(fields + POSITION)
        temperature = load_float(fields + TEMPERATURE)
        floor = load_float(fields + FLOOR)
        top_k = load_int(fields + TOP_K)
        top_p = tl.load(fields + TOP_P).to(tl.float64, bitcast=True)
        weighed = load_int(fields + WEIGHED) != 0
        best = tl.load(levels)
        low = tl.load(levels + 1)
        first_score = tl.load(levels + 3)
        first = tl.load(marks + 1)
        total = tl.load(totals + place, mask=weighed, other=0)
        weighed = weighed & (top_k >= vocab)
        score = first_score
        winner = first
        gathered_count = tl.load(marks + 2)
        if (way == GATHERED) & (gathered_count <= LISTED):
            score, winner = _draw_gathered(
                gathered + place * LISTED, gathered_count, total, ~weighed, best, temperature, top_k, top_p,
                seed, position, score, winner, LISTED,
            )  # fmt: skip
        else:
            certain = tl.load(levels + 2)
            if way == DRAWN:
                for start in range(0, chunks, BLOCK):
                    index = start + tl.arange(0, BLOCK)
                    rivals = tl.load(scores + place * chunks + index, mask=index < chunks, other=-INF)
                    tokens = tl.load(winners + place * chunks + index, mask=index < chunks, other=NO_TOKEN)
                    rival = tl.max(rivals, axis=0)
                    token = tl.min(tl.where(rivals == rival, tokens, NO_TOKEN), axis=0)
                    winner = tl.where((rival > score) | ((rival == score) & (token < winner)), token, winner)
                    score = tl.maximum(score, rival)
            else:
                certain = INF
                score, winner = _draw_before(
                    logits, adjusted, place, source, vocab, stride_units, tl.full([], NO_KEY, tl.int64),
                    best, temperature, low, seed, position, score, winner, UNIT, CHUNK,
                )  # fmt: skip
            x = load_logits(logits, adjusted, place, source, winner, vocab, stride_units, UNIT)
            if (winner != first) & (scale(x, best, temperature) < certain):
                if (top_p < 1) & (top_k < vocab):
                    total = _best_weight(
                        logits, adjusted, place, source, vocab, stride_units, top_k, token_key(best, first),
                        best, temperature, floor, UNIT, CHUNK,
                    )  # fmt: skip
                kept = winner == first
                while ~kept:
                    x = load_logits(logits, adjusted, place, source, winner, vocab, stride_units, UNIT)
                    limit = token_key(x, winner)
                    count, weight = _before(
                        logits, adjusted, place, source, vocab, stride_units, limit, best, temperature, floor,
                        UNIT, CHUNK,
                    )  # fmt: skip
                    kept = (count < top_k) & ((top_p == 1) | (weight.to(tl.float64) < top_p * total.to(tl.float64)))
                    if ~kept:
                        score, winner = _draw_before(
                            logits, adjusted, place, source, vocab, stride_units, limit, best, temperature, low,
                            seed, position, first_score, first, UNIT, CHUNK,
                        )  # fmt: skip
                        kept = winner == first
        count_row = load_int(fields + TABLE_ROW)
        put_token(winner, best > float("-inf"), place, count_row, token_ids, broken, counts, vocab, UNIT)
