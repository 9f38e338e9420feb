"""A step's input arrays, gathered on the GPU from the tables of the running requests."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variants import Variant

_BLOCK = 512
_MAX_PARTS = 32
"""Programs that share one segment of write_segments: 16,384 values a round."""
_LAUNCH = {"BLOCK": _BLOCK, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}

# Counts change from step to step, and the staged inputs lie at any address: neither may make Triton compile a further
# variant while requests wait.
_INTEGERS = ["num_requests", "block_size", "token_stride", "block_stride", "stride", "count", "row_length"]
_STAGED = ["table_rows", "query_start", "num_computed", "rows", "columns", "starts", "values", "positions", "token_ids"]


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_STAGED)
def _gather_step(
    token_table,
    block_tables,
    table_rows,
    query_start,
    num_computed,
    token_ids,
    positions,
    slots,
    context_lens,
    num_requests,
    block_size,
    token_stride,
    block_stride,
    BLOCK: tl.constexpr,
):
    """Program (request, part): BLOCK of the request's tokens."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    if request < num_requests:
        row = tl.load(table_rows + request).to(tl.int64)
        start = tl.load(query_start + request)
        length = tl.load(query_start + request + 1) - start
        computed = tl.load(num_computed + request)
        offset = part * BLOCK + tl.arange(0, BLOCK)
        inside = offset < length
        position = computed + offset
        token = tl.load(token_table + row * token_stride + position, mask=inside)
        block = tl.load(block_tables + row * block_stride + position // block_size, mask=inside)
        tl.store(token_ids + start + offset, token, mask=inside)
        tl.store(positions + start + offset, position, mask=inside)
        tl.store(slots + start + offset, block * block_size + position % block_size, mask=inside)
        if part == 0:
            tl.store(context_lens + request, computed + length)
    elif part == 0:
        token = tl.load(query_start + num_requests) + request - num_requests
        tl.store(token_ids + token, 0)
        tl.store(positions + token, 0)
        tl.store(slots + token, -1)
        tl.store(context_lens + request, 0)


def gather_step(
    token_table: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    query_start: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    *,
    num_requests: int,
    padded: int,
    block_size: int,
    max_query_len: int,
) -> None:
    """Fills a step's arrays, all int32 and on one device, in one launch.

    Args:
        token_table: [rows, max_model_len].
        block_tables: [rows, max_blocks].
        table_rows, num_computed: [at least num_requests].
        query_start: [at least num_requests + 1].
        token_ids, positions, slots: written, one entry for each token and then one for each padded request;
            a slot is block * block_size + offset.
        context_lens: written, one entry for each request, padded ones included.
        padded: requests with the padding, num_requests without. A padded request has context 0 and one token, with
            id 0, position 0 and slot -1. The caller pads `table_rows` and `query_start`, which are its own.
        max_query_len: no request has more tokens in this step.
    """
    if padded == 0:
        return
    grid = (padded, triton.cdiv(max(max_query_len, 1), _BLOCK))
    _gather_step[grid](
        token_table,
        block_tables,
        table_rows,
        query_start,
        num_computed,
        token_ids,
        positions,
        slots,
        context_lens,
        num_requests,
        block_size,
        token_table.stride(0),
        block_tables.stride(0),
        **_LAUNCH,
    )


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_STAGED)
def _write_segments(table, rows, columns, starts, values, stride, BLOCK: tl.constexpr):
    """Program (segment, part): every so many BLOCKs of the segment."""
    segment = tl.program_id(0)
    start = tl.load(starts + segment)
    length = tl.load(starts + segment + 1) - start
    target = table + tl.load(rows + segment).to(tl.int64) * stride + tl.load(columns + segment)
    first = tl.program_id(1) * BLOCK
    while first < length:
        offset = first + tl.arange(0, BLOCK)
        inside = offset < length
        tl.store(target + offset, tl.load(values + start + offset, mask=inside), mask=inside)
        first += tl.num_programs(1) * BLOCK


def write_segments(table: Tensor, rows: Tensor, columns: Tensor, starts: Tensor, values: Tensor) -> None:
    """table[rows[i], columns[i] + j] = values[starts[i] + j] for each segment i and j < starts[i + 1] - starts[i].

    Args:
        table: int32 [rows, columns], written.
        rows, columns: int32 [segments]; no two segments overlap, and none goes beyond its row.
        starts: int32 [segments + 1], rising.
        values: int32 [at least starts[-1]].
    """
    segments = len(rows)
    if segments == 0:
        return
    grid = (segments, min(max(triton.cdiv(len(values), _BLOCK), 1), _MAX_PARTS))
    _write_segments[grid](table, rows, columns, starts, values, table.stride(0), **_LAUNCH)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_STAGED)
def _store_tokens(token_table, rows, positions, token_ids, count, row_length, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + index, mask=inside, other=0)
    token = tl.load(token_ids + index, mask=inside, other=0)
    tl.store(token_table + row * stride + position, token, mask=inside & (position < row_length))


def store_tokens(token_table: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    """token_table[rows[i], positions[i]] = token_ids[i], but for positions beyond the row, which are left out.

    Args:
        token_table: int32 [rows, max_model_len], written.
        rows, positions, token_ids: int32 [n]; no entry twice.
    """
    count = len(rows)
    if count == 0:
        return
    _store_tokens[(triton.cdiv(count, _BLOCK),)](
        token_table,
        rows,
        positions,
        token_ids,
        count,
        token_table.shape[1],
        token_table.stride(0),
        **_LAUNCH,
    )


def variants() -> Iterator[Variant]:
    for kernel in (_gather_step, _write_segments, _store_tokens):
        arguments = [name for name in kernel.arg_names if name != "BLOCK"]
        yield Variant(
            name="int32",
            kernel=kernel,
            signature={name: "i32" if name in _INTEGERS else "*i32" for name in arguments},
            constants={"BLOCK": _BLOCK},
            num_warps=_LAUNCH["num_warps"],
            num_stages=_LAUNCH["num_stages"],
        )
