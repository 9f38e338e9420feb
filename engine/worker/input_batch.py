"""The requests that a worker knows: one persistent row each, changed by deltas."""

from __future__ import annotations

import numpy as np

from engine.outputs import ScheduledStart


class InputBatch:
    """Tokens and block tables of running requests, in preallocated arrays. Touched on the worker's thread alone.

    A request keeps its row from its start to its release; the flat batch of a step gathers from the rows.

    Attributes:
        token_ids: int32 [rows, max_model_len].
        num_tokens: int32 [rows], tokens known of each row.
        block_tables: int32 [rows, blocks of max_model_len].
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, request_id: str) -> int:
        return self._rows[request_id]

    def add(self, start: ScheduledStart) -> int:
        """Gives a request a row, filled with its tokens and blocks."""
        row = self._free_rows.pop()
        self._rows[start.spec.request_id] = row
        count = len(start.token_ids)
        self.token_ids[row, :count] = start.token_ids
        self.num_tokens[row] = count
        self._num_blocks[row] = 0
        self.append_blocks(row, start.block_ids)
        return row

    def append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        if block_ids:
            first = self._num_blocks[row]
            self._num_blocks[row] = last = first + len(block_ids)
            self.block_tables[row, first:last] = block_ids

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One token to each row; integers [n] both, and no row twice."""
        # A token sampled at the very end of the context is put out but never computed: it has no place in the row.
        fitting = self.num_tokens[rows] < self.token_ids.shape[1]
        rows = rows[fitting]
        self.token_ids[rows, self.num_tokens[rows]] = token_ids[fitting]
        self.num_tokens[rows] += 1

    def remove(self, request_id: str) -> int:
        """Frees a request's row and returns it."""
        row = self._rows.pop(request_id)
        self._free_rows.append(row)
        return row

    def clear(self) -> list[int]:
        """Frees all rows and returns those that were in use."""
        return [self.remove(request_id) for request_id in list(self._rows)]
