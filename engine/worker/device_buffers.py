"""The requests that a worker knows, as tables on its device, and the flat batch that a step gathers from them there.

What InputBatch and InputBuffers are to a CPU. Generated tokens stay on the device: the step that sampled them wrote
them into the table, and the next one reads them there, whether or not the host has seen them. The host sends what it
alone knows: new requests and blocks, and which tokens of which rows the step computes.

    host      prepare: deltas and header, packed ──┐ one copy
    device                                         └─▶ write_segments ─▶ gather_step ─▶ model ─▶ sampler ─▶ store_tokens

All device work goes to the current stream, in this order, step after step; so nothing on the device is read before it
is written, or written while it is still read. Only the packed host memory needs care, see _Staging.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.outputs import ScheduledStart, SchedulerOutput
from engine.protocols import AttentionMetadata
from engine.worker.model_input import ModelInput
from kernels.gpu.step_input import gather_step, store_tokens, write_segments

_ALIGNMENT = 4
"""int32s in 16 bytes. Triton compiles a kernel anew for a pointer that is less aligned, so a header's parts are not."""


class DeviceBuffers:
    """Tokens and block tables of running requests on a device, and the static buffers of a step.

    Touched on the worker's thread alone. A request keeps its row from its start to its release. What add and
    append_blocks are given goes to the device with the next prepare. What that returns points into the buffers, which
    the device overwrites in the next step.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # Zeros, since an entry that nobody wrote must still be a token and a block when padding points at it.
        self._token_table, self._block_tables = zeros(max_num_seqs, max_model_len), zeros(max_num_seqs, max_blocks)
        self._token_ids, self._positions, self._slots = (zeros(max_num_batched_tokens) for _ in range(3))
        self._context_lens = zeros(max_num_seqs)
        self._max_num_seqs, self._max_model_len, self._block_size = max_num_seqs, max_model_len, block_size
        # The header lies at one place for life, as captured graphs need it. Deltas that are longer than usual (requests
        # whose tokens come from the prefix cache) get memory of their own.
        self._header_size = _Header.size(max_num_seqs)
        capacity = self._header_size + 2 * max_num_batched_tokens
        self._arrived = zeros(capacity)
        self._header = _Header.of(self._arrived, max_num_seqs)
        self._staging = (_Staging(capacity, device), _Staging(capacity, device))
        self._turn = 0

        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_blocks = [0] * max_num_seqs
        self._new_tokens, self._new_blocks = _Segments(), _Segments()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, request_id: str) -> int:
        return self._rows[request_id]

    def add(self, start: ScheduledStart) -> int:
        """Gives a request a row, with its tokens and blocks."""
        row = self._free_rows.pop()
        self._rows[start.spec.request_id] = row
        self._num_blocks[row] = 0
        self._new_tokens.add(row, 0, start.token_ids)
        self.append_blocks(row, start.block_ids)
        return row

    def append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._new_blocks.add(row, self._num_blocks[row], block_ids)
            self._num_blocks[row] += len(block_ids)

    def remove(self, request_id: str) -> int:
        """Frees a request's row and returns it. The request must have been in a step since it was added."""
        row = self._rows.pop(request_id)
        self._free_rows.append(row)
        return row

    def clear(self) -> list[int]:
        """Frees all rows, drops what was not yet sent, and returns the rows that were in use."""
        self._new_tokens.clear()
        self._new_blocks.clear()
        return [self.remove(request_id) for request_id in list(self._rows)]

    def prepare(self, work: SchedulerOutput, padded: int | None = None) -> ModelInput:
        """Sends the deltas and gathers the step's batch; enqueues, and waits for nothing on the device.

        Args:
            padded: requests that a decode batch is filled up to, each of one token that writes and sees nothing. They
                are in the result's tensors, but for `kept`, and not in its arrays on the host.
        """
        count = len(work.steps)
        rows = np.fromiter((self._rows[step.request_id] for step in work.steps), np.int64, count)
        lengths = np.fromiter((step.num_tokens for step in work.steps), np.int64, count)
        computed = np.fromiter((step.num_computed_tokens for step in work.steps), np.int64, count)
        samples = np.fromiter((step.samples for step in work.steps), np.bool_, count)
        step = self._send(rows, lengths, computed, samples, count if padded is None else padded)
        gather_step(
            self._token_table,
            self._block_tables,
            self._header.table_rows,
            self._header.query_start,
            self._header.num_computed,
            self._token_ids,
            self._positions,
            self._slots,
            self._context_lens,
            num_requests=count,
            padded=len(step.attention.query_lens),
            block_size=self._block_size,
            max_query_len=int(lengths.max()),
        )
        return step

    def dummy_step(self, num_tokens: int, num_requests: int) -> ModelInput:
        """A batch of nothing but padding, in the same memory as any other; each request "samples".

        It shows what a step takes before there are requests, and stands in for one when a graph is captured. Bounds
        that a host has to give are those of the longest context.
        """
        lengths = np.full(num_requests, num_tokens // num_requests, np.int64)
        lengths[: num_tokens % num_requests] += 1
        rows = np.arange(num_requests)
        step = self._send(rows, lengths, -lengths, np.ones(num_requests, np.bool_), num_requests)
        step.attention.max_context_len = self._max_model_len
        step.attention.slot_mapping.fill_(-1)
        for buffer in (step.token_ids, step.positions, step.attention.context_lens):
            buffer.zero_()
        return step

    def append_tokens(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """One token to each request that the last prepared step samples.

        A token sampled at the very end of the context has no place in its row and is left out.

        Args:
            rows: of those requests; where they are on the device is known since `prepare`.
            token_ids: int32 [len(rows)], on the device.
        """
        sampled = len(rows)
        if sampled:
            header = self._header
            store_tokens(
                self._token_table, header.sampled_rows[:sampled], header.sampled_positions[:sampled], token_ids
            )

    def _send(
        self, rows: np.ndarray, lengths: np.ndarray, computed: np.ndarray, samples: np.ndarray, size: int
    ) -> ModelInput:
        """Brings a step's header, and all deltas, to the device; `size` counts the padding."""
        count = len(rows)
        query_lens = np.ones(size, np.int64)
        query_lens[:count] = lengths
        query_start = np.zeros(size + 1, np.int64)
        np.cumsum(query_lens, out=query_start[1:])
        num_tokens = computed + lengths
        sampling = np.flatnonzero(samples)

        deltas = [
            (table, segments)
            for table, segments in ((self._token_table, self._new_tokens), (self._block_tables, self._new_blocks))
            if segments
        ]
        used = self._header_size + sum(segments.packed_size for _, segments in deltas)
        staging = self._staging[self._turn]
        self._turn ^= 1
        packed = staging.acquire(used)
        header = _Header.of(packed, self._max_num_seqs)
        header.table_rows[:count] = rows
        header.table_rows[count:size] = 0
        header.num_computed[:count] = computed
        header.num_computed[count:size] = 0
        header.query_start[: size + 1] = query_start
        header.kept[: len(sampling)] = query_start[sampling + 1] - 1
        header.sampled_rows[: len(sampling)] = rows[sampling]
        header.sampled_positions[: len(sampling)] = num_tokens[sampling]
        at = self._header_size
        for _, segments in deltas:
            segments.pack(packed[at:])
            at += segments.packed_size

        arrived = self._arrived if used <= len(self._arrived) else self._arrived.new_empty(used)
        staging.send(arrived[:used])
        if arrived is not self._arrived:
            self._arrived[: self._header_size].copy_(arrived[: self._header_size])
        at = self._header_size
        for table, segments in deltas:
            write_segments(table, *segments.parts(arrived[at:]))
            at += segments.packed_size
            segments.clear()

        total = int(query_start[size])
        return ModelInput(
            token_ids=self._token_ids[:total],
            positions=self._positions[:total],
            attention=AttentionMetadata(
                slot_mapping=self._slots[:total],
                block_tables=self._block_tables,
                query_start=self._header.query_start[: size + 1],
                context_lens=self._context_lens[:size],
                query_lens=query_lens,
                max_context_len=int(num_tokens.max()),
                table_rows=self._header.table_rows[:size],
            ),
            rows=rows,
            query_start=query_start[: count + 1],
            num_tokens=num_tokens,
            sampling=sampling,
            kept=self._header.kept[: len(sampling)],
        )


class _Header(NamedTuple):
    """What every step sends: parts of a packed buffer, numpy on the host or a tensor on the device."""

    table_rows: Any
    num_computed: Any
    sampled_rows: Any
    sampled_positions: Any
    kept: Any
    query_start: Any

    @classmethod
    def of(cls, packed: Any, max_num_seqs: int) -> _Header:
        part = _aligned(max_num_seqs)
        starts = range(0, 6 * part, part)
        table_rows, num_computed, sampled_rows, sampled_positions, kept = (packed[at : at + part] for at in starts[:5])
        query_start = packed[starts[5] : cls.size(max_num_seqs)]
        return cls(table_rows, num_computed, sampled_rows, sampled_positions, kept, query_start)

    @staticmethod
    def size(max_num_seqs: int) -> int:
        return 5 * _aligned(max_num_seqs) + _aligned(max_num_seqs + 1)


class _Segments:
    """Values that go into parts of a table's rows with the next step; falsy when there are none."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._starts = [0]
        self._values: list[Sequence[int]] = []

    def add(self, row: int, column: int, values: Sequence[int]) -> None:
        self._rows.append(row)
        self._columns.append(column)
        self._starts.append(self._starts[-1] + len(values))
        self._values.append(values)

    @property
    def packed_size(self) -> int:
        return 3 * len(self._rows) + 1 + self._starts[-1]

    def parts(self, packed: Any) -> tuple[Any, Any, Any, Any]:
        """Rows, columns, starts and values in a packed buffer: the arguments of write_segments."""
        count = len(self._rows)
        starts, values = packed[2 * count : 3 * count + 1], packed[3 * count + 1 : self.packed_size]
        return packed[:count], packed[count : 2 * count], starts, values

    def pack(self, packed: np.ndarray) -> None:
        rows, columns, starts, values = self.parts(packed)
        rows[:], columns[:], starts[:] = self._rows, self._columns, self._starts
        values[:] = np.fromiter(chain.from_iterable(self._values), np.int32, len(values))


class _Staging:
    """Host memory that goes to the device in one copy.

    On CUDA it is pinned, and the copy runs after `send` has returned: until then the memory must stay as it is. Two of
    these, used in turn, let the host prepare a step while the copy for the one before still waits behind the step
    before that.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(size)

    def acquire(self, size: int) -> np.ndarray:
        """int32 [size or more] to write, once the last copy is done with it."""
        if self._copied is not None:
            self._copied.synchronize()
        if size > len(self._array):
            self._allocate(max(size, 2 * len(self._array)))
        return self._array

    def send(self, target: torch.Tensor) -> None:
        target.copy_(self._tensor[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _allocate(self, size: int) -> None:
        self._tensor = torch.empty(size, dtype=torch.int32, pin_memory=self._copied is not None)
        self._array: np.ndarray = self._tensor.numpy()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
