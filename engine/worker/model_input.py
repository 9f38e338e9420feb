"""A step's work as the flat arrays that the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.outputs import SchedulerOutput
from engine.protocols import AttentionMetadata
from engine.worker.input_batch import InputBatch


@dataclass(slots=True)
class ModelInput:
    """All scheduled tokens of a step in one sequence, request after request, without padding.

    Attributes:
        token_ids, positions: int64 [tokens].
        attention: which keys each token sees.
        rows: int64 [requests], each request's row in the InputBatch.
        query_start: int64 [requests + 1], on the host.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    rows: np.ndarray
    query_start: np.ndarray


class InputBuffers:
    """Preallocated host arrays, each aliased by a tensor, that every step's input is written into.

    What `prepare` returns points into the buffers and is valid until its next call.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids, self._token_ids_tensor = _aliased(max_num_batched_tokens, np.int64)
        self._positions, self._positions_tensor = _aliased(max_num_batched_tokens, np.int64)
        self._slots, self._slots_tensor = _aliased(max_num_batched_tokens, np.int64)
        self._query_start, self._query_start_tensor = _aliased(max_num_seqs + 1, np.int32)
        self._context_lens, self._context_lens_tensor = _aliased(max_num_seqs, np.int32)
        self._arange = np.arange(max_num_batched_tokens, dtype=np.int64)

    def prepare(self, work: SchedulerOutput, batch: InputBatch) -> ModelInput:
        """Writes a step's arrays. Drafts must already stand in the batch's token_ids."""
        count = len(work.steps)
        rows = np.fromiter((batch.row_of(step.request_id) for step in work.steps), np.int64, count)
        lengths = np.fromiter((step.num_tokens for step in work.steps), np.int64, count)
        computed = np.fromiter((step.num_computed_tokens for step in work.steps), np.int64, count)

        query_start = self._query_start[: count + 1]
        query_start[0] = 0
        np.cumsum(lengths, out=query_start[1:])
        total = int(query_start[count])
        token_rows = np.repeat(rows, lengths)
        positions = self._positions[:total]
        np.subtract(self._arange[:total], np.repeat(query_start[:-1] - computed, lengths), out=positions)
        self._token_ids[:total] = batch.token_ids[token_rows, positions]
        block_index, offset = np.divmod(positions, self._block_size)
        self._slots[:total] = batch.block_tables[token_rows, block_index] * np.int64(self._block_size) + offset
        context_lens = self._context_lens[:count]
        np.add(computed, lengths, out=context_lens, casting="unsafe")

        max_context = int(context_lens.max())
        blocks = -(-max_context // self._block_size)
        return ModelInput(
            token_ids=self._token_ids_tensor[:total],
            positions=self._positions_tensor[:total],
            attention=AttentionMetadata(
                slot_mapping=self._slots_tensor[:total],
                block_tables=torch.from_numpy(batch.block_tables[rows, :blocks]),
                query_start=self._query_start_tensor[: count + 1],
                context_lens=self._context_lens_tensor[:count],
                max_query_len=int(lengths.max()),
                max_context_len=max_context,
            ),
            rows=rows,
            query_start=query_start.astype(np.int64),
        )


def _aliased(size: int, dtype: type[np.integer]) -> tuple[np.ndarray, torch.Tensor]:
    array: np.ndarray = np.zeros(size, dtype)
    return array, torch.from_numpy(array)
