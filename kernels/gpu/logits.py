"""Rows of logits: how they are read and ordered, and what changes them before a token is chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sampling_row import (
    ENTRIES,
    FIELDS,
    FREQUENCY,
    MASK,
    MIN_LENGTH,
    NUM_ENTRIES,
    POSITION,
    PRESENCE,
    REPETITION,
    SOURCE,
    TABLE_ROW,
    load_float,
    load_int,
)
from kernels.gpu.variants import Variant

UNIT = 8
"""Rows are as many units long, so that Triton sees that they allow 16-byte accesses."""
CHUNK = 4096
"""Tokens of a program. Sums over a row are sums over its chunks, whatever else is in the batch."""
NUM_WARPS = 8
LOGITS_TYPES = ("bf16", "fp16", "fp32")

_ENTRIES_BLOCK = 256
_TOKENS_BLOCK = 1024


def aligned(logits: Tensor) -> Tensor:
    """Rows of logits that start at multiples of UNIT: themselves, or a copy."""
    if logits.stride(1) == 1 and logits.stride(0) % UNIT == 0 and logits.data_ptr() % 16 == 0:
        return logits
    n, vocab = logits.shape
    copy = logits.new_empty(n, row_units(vocab) * UNIT)[:, :vocab]
    copy.copy_(logits)
    return copy


def row_units(vocab: int) -> int:
    return triton.cdiv(vocab, UNIT)


@triton.jit
def load_logits(logits, adjusted, place, source, token, vocab, stride_units, UNIT: tl.constexpr):
    """float32 logits of tokens of a row.

    NaN and what is beyond the vocabulary are -inf, +inf is the largest number, and -0 is 0, of which it is an equal.

    Args:
        source: the row of `adjusted` to read in place of row `place` of `logits`, or -1.
        adjusted: float32 [rows, whole units]; None where no row is.
    """
    end = tl.cdiv(vocab, UNIT) * UNIT
    raw = logits + place.to(tl.int64) * stride_units * UNIT + token
    if adjusted is None:
        x = tl.load(raw, mask=token < end, other=0.0).to(tl.float32)
    else:
        x = tl.load(raw, mask=token < tl.where(source < 0, end, 0), other=0.0).to(tl.float32)
        own = adjusted + source.to(tl.int64) * end + token
        own = tl.load(own, mask=token < tl.where(source < 0, 0, end), other=0.0)
        x = tl.where(source < 0, x, own)
    x = tl.where((x == x) & (token < vocab), tl.minimum(x, 3.4028234663852886e38), float("-inf"))
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def ordered(x):
    """int32 with the order of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The number of an ordered key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_key(x, token):
    """int64 keys of tokens with logits x: the better has the larger, and no two are equal."""
    return (ordered(x).to(tl.int64) << 32) + (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of_key(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def logit_of_key(key):
    return unordered((key >> 32).to(tl.int32))


@triton.jit
def _changed(x, token, inside, fields, counts, allowed, vocab, UNIT: tl.constexpr):
    """x after the penalties on what the request has seen, and without tokens that its mask leaves out."""
    row = load_int(fields + TABLE_ROW)
    width = tl.cdiv(vocab, UNIT) * UNIT
    seen = tl.load(
        counts + row.to(tl.int64) * width + token, mask=inside & (tl.full(token.shape, row, tl.int32) >= 0), other=0
    )
    repetition = load_float(fields + REPETITION)
    penalised = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    number = (seen >> 1).to(tl.float32)
    losing = penalised - load_float(fields + FREQUENCY) * number
    losing -= tl.where(number > 0, load_float(fields + PRESENCE), 0.0)
    x = tl.where(seen > 0, losing, x)
    mask_row = load_int(fields + MASK)
    words = allowed + mask_row.to(tl.int64) * tl.cdiv(vocab, 32) + token // 32
    word = tl.load(words, mask=inside & (tl.full(token.shape, mask_row, tl.int32) >= 0), other=-1)
    return tl.where((word >> (token % 32)) & 1 == 1, x, float("-inf"))


@triton.jit(do_not_specialize=["vocab", "stride_units"])
def _adjust(
    logits, adjusted, fields, counts, allowed, vocab, stride_units,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, place): penalties and mask."""
    place = tl.program_id(1)
    fields += place * FIELDS
    source = load_int(fields + SOURCE)
    if source >= 0:
        token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        width = tl.cdiv(vocab, UNIT) * UNIT
        inside = token < width
        x = tl.load(logits + place.to(tl.int64) * stride_units * UNIT + token, mask=inside, other=0.0).to(tl.float32)
        x = _changed(x, token, inside, fields, counts, allowed, vocab, UNIT)
        tl.store(adjusted + source.to(tl.int64) * width + token, x, mask=inside)


@triton.jit(do_not_specialize=["vocab", "stride_units"])
def _adjust_entries(
    logits, adjusted, fields, counts, allowed, vocab, stride_units,
    FIELDS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program place: the tokens with a bias and those that stop, once more and with that."""
    place = tl.program_id(0)
    fields += place * FIELDS
    source = load_int(fields + SOURCE)
    count = load_int(fields + NUM_ENTRIES)
    if (source >= 0) & (count > 0):
        short = tl.load(fields + POSITION) < tl.load(fields + MIN_LENGTH)
        entries = tl.load(fields + ENTRIES).to(tl.pointer_type(tl.int32))
        width = tl.cdiv(vocab, UNIT) * UNIT
        for first in range(0, count, BLOCK):
            index = first + tl.arange(0, BLOCK)
            inside = index < count
            token = tl.load(entries + index, mask=inside, other=0)
            bias = tl.load(entries + count + index, mask=inside, other=0).to(tl.float32, bitcast=True)
            stops = tl.load(entries + 2 * count + index, mask=inside, other=0) != 0
            x = tl.load(logits + place.to(tl.int64) * stride_units * UNIT + token, mask=inside, other=0.0)
            x = tl.where(stops & short, float("-inf"), x.to(tl.float32)) + bias
            x = _changed(x, token, inside, fields, counts, allowed, vocab, UNIT)
            tl.store(adjusted + source.to(tl.int64) * width + token, x, mask=inside)


def adjust_logits(logits: Tensor, params: Tensor, counts: Tensor, allowed: Tensor, num_adjusted: int) -> Tensor:
    """The rows that have a SOURCE, after min_tokens, logit_bias, penalties and the mask; in two launches.

    Args:
        logits: [n, vocab], aligned.
        params: int64 [n, FIELDS], see `sampling_row`.
        counts: int32 [rows, whole units of the vocabulary], (times in the output << 1) | in the prompt.
        allowed: int32 [masks, ceil(vocab / 32)]; bit t % 32 of word t // 32 is set where token t is allowed.

    Returns:
        float32 [num_adjusted, whole units of the vocabulary].
    """
    n, vocab = logits.shape
    adjusted = torch.empty(num_adjusted, row_units(vocab) * UNIT, dtype=torch.float32, device=logits.device)
    arguments = (logits, adjusted, params, counts, allowed, vocab, logits.stride(0) // UNIT)
    constants = {"FIELDS": FIELDS.value, "UNIT": UNIT, "enable_fp_fusion": False, "num_stages": 1}
    _adjust[(triton.cdiv(vocab, CHUNK), n)](*arguments, **constants, CHUNK=CHUNK, num_warps=NUM_WARPS)
    _adjust_entries[(n,)](*arguments, **constants, BLOCK=_ENTRIES_BLOCK, num_warps=4)
    return adjusted


@triton.jit(do_not_specialize=["count", "num_prompt"])
def _count_tokens(counts, token_ids, count, num_prompt, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    token = tl.load(token_ids + index, mask=inside, other=0)
    tl.atomic_or(counts + token, 1, mask=inside & (index < num_prompt))
    tl.atomic_add(counts + token, 2, mask=inside & (index >= num_prompt))


def count_tokens(counts: Tensor, token_ids: Tensor, num_prompt: int) -> None:
    """Adds a request's tokens to its counts.

    Args:
        counts: int32 [at least vocab], one request's: (times in the output << 1) | in the prompt.
        token_ids: int32 [tokens], the first num_prompt of them the prompt's.
    """
    if len(token_ids):
        grid = (triton.cdiv(len(token_ids), _TOKENS_BLOCK),)
        _count_tokens[grid](
            counts,
            token_ids,
            len(token_ids),
            num_prompt,
            BLOCK=_TOKENS_BLOCK,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )


def variants() -> Iterator[Variant]:
    pointers = {"adjusted": "*fp32", "fields": "*i64", "counts": "*i32", "allowed": "*i32"}
    for dtype in LOGITS_TYPES:
        for kernel, tile, num_warps in (
            (_adjust, {"CHUNK": CHUNK}, NUM_WARPS),
            (_adjust_entries, {"BLOCK": _ENTRIES_BLOCK}, 4),
        ):
            yield Variant(
                name=dtype,
                kernel=kernel,
                signature={"logits": f"*{dtype}"} | pointers | {"vocab": "i32", "stride_units": "i32"},
                constants={"FIELDS": FIELDS.value, "UNIT": UNIT} | tile,
                num_warps=num_warps,
                num_stages=1,
                enable_fp_fusion=False,
            )
    yield Variant(
        name="int32",
        kernel=_count_tokens,
        signature={"counts": "*i32", "token_ids": "*i32", "count": "i32", "num_prompt": "i32"},
        constants={"BLOCK": _TOKENS_BLOCK},
        num_warps=4,
        num_stages=1,
    )
