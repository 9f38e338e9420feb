"""A step's arrays from the requests' tables: Triton's interpreter and the reference against loops written out."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.gpu import step_input

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
POISON = -7

both = pytest.mark.parametrize("module", [step_input, reference], ids=["triton", "reference"])


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tables(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and blocks of every row, each number once."""
    tokens = torch.arange(rows * MAX_MODEL_LEN, dtype=torch.int32).view(rows, -1) + 1000
    blocks = torch.randperm(rows * MAX_MODEL_LEN // BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    return tokens, blocks.view(rows, -1).int()


# (computed, query length) of each request, requests with padding.
STEPS = {
    "one token": ([(37, 1)], 1),
    "a whole prompt": ([(0, 1)], 1),
    "decode": ([(15, 1), (16, 1), (2047, 1), (0, 1), (700, 1)], 5),
    "padded decode": ([(15, 1), (16, 1), (2047, 1)], 8),
    "only padding": ([], 4),
    "mixed": ([(3, 1), (0, 1537), (511, 513), (100, 1), (0, 17)], 5),
}


@both
@pytest.mark.parametrize(("requests", "padded"), STEPS.values(), ids=STEPS)
def test_gather_step_fills_the_entries_of_its_tokens_and_padding_alone(module, requests, padded):
    count, table_rows = len(requests), [6, 2, 0, 5, 3][: len(requests)]
    token_table, block_tables = tables(rows=7)
    token_ids, positions, slots, context_lens = [], [], [], []
    for row, (computed, length) in zip(table_rows, requests, strict=True):
        for position in range(computed, computed + length):
            token_ids.append(int(token_table[row, position]))
            positions.append(position)
            slots.append(int(block_tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
        context_lens.append(computed + length)
    padding = padded - count
    expected = (
        token_ids + [0] * padding,
        positions + [0] * padding,
        slots + [-1] * padding,
        context_lens + [0] * padding,
    )

    lengths = [length for _, length in requests]
    buffers = [torch.full((len(values) + 5,), POISON, dtype=torch.int32) for values in expected]
    module.gather_step(
        token_table,
        block_tables,
        int32(*table_rows, *[0] * padding),
        int32(*np.cumsum([0, *lengths, *[1] * padding])),
        int32(*[computed for computed, _ in requests]),
        *buffers,
        num_requests=count,
        padded=padded,
        block_size=BLOCK_SIZE,
        max_query_len=max(lengths, default=1),
    )
    for buffer, values in zip(buffers, expected, strict=True):
        assert buffer.tolist() == values + [POISON] * 5


def test_a_step_may_be_gathered_from_views_at_any_address():
    token_table, block_tables = tables(rows=3)
    staged = int32(9, 2, 1, 0, 1, 2, 20, 30)
    buffers = [torch.full((2,), POISON, dtype=torch.int32) for _ in range(4)]
    step_input.gather_step(
        token_table,
        block_tables,
        staged[1:3],
        staged[3:6],
        staged[6:],
        *buffers,
        num_requests=2,
        padded=2,
        block_size=BLOCK_SIZE,
        max_query_len=1,
    )
    assert buffers[0].tolist() == [int(token_table[2, 20]), int(token_table[1, 30])]
    assert buffers[3].tolist() == [21, 31]


@both
@pytest.mark.parametrize("lengths", [[1], [0], [3, 0, 5], [1, 1900, 1, 513], [2048] * 20], ids=str)
def test_write_segments_writes_its_segments_alone(module, lengths):
    generator = torch.Generator().manual_seed(0)
    rows = list(range(len(lengths), 0, -1))
    columns = [(37 * row) % (MAX_MODEL_LEN - length + 1) for row, length in zip(rows, lengths, strict=True)]
    starts = np.cumsum([0, *lengths])
    values = torch.randint(0, 2**31 - 1, (starts[-1] + 3,), generator=generator, dtype=torch.int32)
    table = torch.full((len(rows) + 2, MAX_MODEL_LEN), POISON, dtype=torch.int32)
    expected = table.clone()
    for row, column, start, length in zip(rows, columns, starts, lengths, strict=False):
        for index in range(length):
            expected[row, column + index] = values[start + index]
    module.write_segments(table, int32(*rows), int32(*columns), int32(*starts), values)
    assert torch.equal(table, expected)


@both
def test_a_segment_may_be_longer_than_all_its_programs_write_at_once(module):
    values = torch.arange(40_000, dtype=torch.int32)
    table = torch.full((2, 40_010), POISON, dtype=torch.int32)
    module.write_segments(table, int32(1), int32(4), int32(0, 40_000), values)
    assert table[0].eq(POISON).all()
    assert torch.equal(table[1, 4:-6], values)
    assert table[1, :4].eq(POISON).all()
    assert table[1, -6:].eq(POISON).all()


@both
def test_no_segments_are_no_work(module):
    table = torch.full((2, 3), POISON, dtype=torch.int32)
    module.write_segments(table, int32(), int32(), int32(0), int32())
    assert table.eq(POISON).all()


@both
@pytest.mark.parametrize("count", [0, 1, 700])
def test_store_tokens_leaves_out_positions_beyond_the_row(module, count):
    table = torch.full((701, 9), POISON, dtype=torch.int32)
    rows = torch.arange(700, 700 - count, -1, dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32) % 11  # 9 and 10 have no place
    token_ids = torch.arange(count, dtype=torch.int32) + 5
    expected = table.clone()
    for row, position, token in zip(rows.tolist(), positions.tolist(), token_ids.tolist(), strict=True):
        if position < 9:
            expected[row, position] = token
    module.store_tokens(table, rows, positions, token_ids)
    assert torch.equal(table, expected)


def test_tables_may_be_larger_than_32_bits_can_index():
    # A sparse file: row 4 begins 2 ** 32 entries in, which 32 bits would take for row 0.
    with tempfile.TemporaryFile() as file:
        stride = 2**30
        memory = torch.from_numpy(np.memmap(file, np.int32, "w+", shape=4 * stride + 64))
        table = memory.as_strided((5, 64), (stride, 1))
        step_input.write_segments(table, int32(4), int32(0), int32(0, 3), int32(11, 12, 13))
        step_input.store_tokens(table, int32(4), int32(3), int32(14))
        assert table[0].eq(0).all()
        assert table[4, :5].tolist() == [11, 12, 13, 14, 0]
        buffers = [torch.full((4,), POISON, dtype=torch.int32) for _ in range(3)]
        context_lens = int32(POISON)
        step_input.gather_step(
            table,
            table,
            int32(4),
            int32(0, 4),
            int32(0),
            *buffers,
            context_lens,
            num_requests=1,
            padded=1,
            block_size=1,
            max_query_len=4,
        )
    assert [buffer.tolist() for buffer in buffers] == [[11, 12, 13, 14], [0, 1, 2, 3], [11, 12, 13, 14]]
