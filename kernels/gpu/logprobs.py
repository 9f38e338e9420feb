"""Log-probabilities of rows of logits on a GPU: of a token and of the best ones, and the token's rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.logits import (
    CHUNK,
    LOGITS_TYPES,
    NUM_WARPS,
    UNIT,
    aligned,
    load_logits,
    token_key,
)
from kernels.gpu.variants import Variant

_BLOCK = 256
_FEW_WARPS = 4
_ROWS = 64
"""Rows whose keys are made at a time: 8 bytes for each token of the vocabulary."""


@triton.jit(do_not_specialize=["vocab", "stride_units"])
def _token_keys(logits, keys, vocab, stride_units, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """Program (chunk, row)."""
    row = tl.program_id(1)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits, None, row, -1, token, vocab, stride_units, UNIT)
    tl.store(keys + row.to(tl.int64) * vocab + token, token_key(x, token), mask=token < vocab)


@triton.jit(do_not_specialize=["vocab", "stride_units", "columns"])
def _measure(
    logits, token_ids, maxima, sums, better, vocab, stride_units, columns, UNIT: tl.constexpr, CHUNK: tl.constexpr
):
    """Program (chunk, row): the chunk's maximum, its sum of exponentials, and how many are better than the token."""
    row = tl.program_id(1)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(token_ids + row.to(tl.int64) * columns)
    own = load_logits(logits, None, row, -1, chosen, vocab, stride_units, UNIT)
    x = load_logits(logits, None, row, -1, token, vocab, stride_units, UNIT)
    most = tl.max(x, axis=0)
    entry = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(maxima + entry, most)
    tl.store(sums + entry, tl.sum(tl.where(x > float("-inf"), tl.exp(x - most), 0.0), axis=0))
    tl.store(better + entry, tl.sum((x > own).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["vocab", "stride_units", "columns", "chunks"])
def _report(
    logits, token_ids, maxima, sums, better, logprobs, ranks, vocab, stride_units, columns, chunks,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program row."""
    row = tl.program_id(0)
    best = float("-inf")
    rank = 1
    for first in range(0, chunks, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < chunks
        most = tl.load(maxima + row * chunks + index, mask=inside, other=float("-inf"))
        best = tl.maximum(best, tl.max(most, axis=0))
        rank += tl.sum(tl.load(better + row * chunks + index, mask=inside, other=0), axis=0)
    tl.store(ranks + row, rank)
    total = 0.0
    for first in range(0, chunks, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < chunks
        most = tl.load(maxima + row * chunks + index, mask=inside, other=float("-inf"))
        sum = tl.load(sums + row * chunks + index, mask=inside, other=0.0)
        total += tl.sum(tl.where(most > float("-inf"), sum * tl.exp(most - best), 0.0), axis=0)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        entry = row.to(tl.int64) * columns + column
        token = tl.load(token_ids + entry, mask=column < columns, other=0)
        x = load_logits(logits, None, row, -1, token, vocab, stride_units, UNIT)
        logprob = tl.where(x > float("-inf"), x - best - tl.log(total), x)
        tl.store(logprobs + entry, logprob, mask=column < columns)


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token a row and of the row's k best tokens.

    A row's result does not depend on its neighbours. Nothing waits for the device.

    Args:
        logits: [n, vocab], bfloat16, float16 or float32; NaN counts as -inf, +inf as the largest number.
        token_ids: integers [n], on the logits' device.
        k: alternatives, 0 to vocab.

    Returns:
        Token ids int32 [n, 1 + k], the token itself and then the best ones, equal ones by lower id; float32 [n, 1 + k],
        their log-probabilities; int32 [n], 1 + how many tokens are better than the row's own.
    """
    n, vocab = logits.shape
    logits = aligned(logits)
    ids = torch.empty(n, 1 + k, dtype=torch.int32, device=logits.device)
    values = torch.empty(n, 1 + k, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(n, dtype=torch.int32, device=logits.device)
    if n == 0:
        return ids, values, ranks
    ids[:, 0] = token_ids
    chunks, stride_units = triton.cdiv(vocab, CHUNK), logits.stride(0) // UNIT
    options = {"UNIT": UNIT, "num_stages": 1, "enable_fp_fusion": True}
    for start in range(0, n, _ROWS) if k else ():
        rows = logits[start : start + _ROWS]
        keys = torch.empty(len(rows), vocab, dtype=torch.int64, device=logits.device)
        _token_keys[(chunks, len(rows))](rows, keys, vocab, stride_units, CHUNK=CHUNK, num_warps=NUM_WARPS, **options)
        best = keys.topk(k, dim=1).values
        ids[start : start + _ROWS, 1:] = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    maxima = torch.empty(n, chunks, dtype=torch.float32, device=logits.device)
    sums, better = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    _measure[(chunks, n)](
        logits, ids, maxima, sums, better, vocab, stride_units, 1 + k, CHUNK=CHUNK, num_warps=NUM_WARPS, **options
    )
    _report[(n,)](
        logits, ids, maxima, sums, better, values, ranks, vocab, stride_units, 1 + k, chunks,
        BLOCK=_BLOCK, num_warps=_FEW_WARPS, **options,
    )  # fmt: skip
    return ids, values, ranks


def variants() -> Iterator[Variant]:
    scratch = {"token_ids": "*i32", "maxima": "*fp32", "sums": "*fp32", "better": "*i32"}
    sizes = {"vocab": "i32", "stride_units": "i32"}
    kernels: tuple[tuple[Any, dict[str, str], dict[str, str], dict[str, int], int], ...] = (
        (_token_keys, {"keys": "*i64"}, {}, {"CHUNK": CHUNK}, NUM_WARPS),
        (_measure, scratch, {"columns": "i32"}, {"CHUNK": CHUNK}, NUM_WARPS),
        (
            _report,
            scratch | {"logprobs": "*fp32", "ranks": "*i32"},
            {"columns": "i32", "chunks": "i32"},
            {"BLOCK": _BLOCK},
            _FEW_WARPS,
        ),
    )
    for kernel, pointers, numbers, tile, num_warps in kernels:
        for dtype in LOGITS_TYPES:
            yield Variant(
                name=dtype,
                kernel=kernel,
                signature={"logits": f"*{dtype}"} | pointers | sizes | numbers,
                constants={"UNIT": UNIT} | tile,
                num_warps=num_warps,
                num_stages=1,
            )
