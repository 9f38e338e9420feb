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
        token_ids, positions: integers [tokens], on the device.
        attention: which keys each token sees.
        rows: int64 [requests], where each request's state is kept.
        query_start: int64 [requests + 1], on the host.
        num_tokens: int64 [requests], tokens of each request once the step has run: the position of its next one.
        sampling: int64, the requests that get a token, by their place in the step.
        kept: int64 [len(sampling)], on the device, their last tokens in the flat batch.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    rows: np.ndarray
    query_start: np.ndarray
    num_tokens: np.ndarray
    sampling: np.ndarray
    kept: torch.Tensor


class HostBuffers(InputBatch):
    """The requests' rows in host memory, and preallocated arrays, each aliased by a tensor, for a step's input.

    What `prepare` returns points into the buffers and is valid until its next call.
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
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._device = device
        self._block_size = block_size
        self._token_ids, self._token_ids_tensor = _aliased(max_num_batched_tokens, np.int64)
        self._positions, self._positions_tensor = _aliased(max_num_batched_tokens, np.int64)
        self._slots, self._slots_tensor = _aliased(max_num_batched_tokens, np.int64)
        self._query_start, self._query_start_tensor = _aliased(max_num_seqs + 1, np.int32)
        self._context_lens, self._context_lens_tensor = _aliased(max_num_seqs, np.int32)
        self._arange = np.arange(max_num_batched_tokens, dtype=np.int64)

    def prepare(self, work: SchedulerOutput, padded: int | None = None) -> ModelInput:
        """Writes a step's arrays. Drafts must already stand in the rows' token_ids."""
        assert padded is None, "only steps on a device are padded"
        count = len(work.steps)
        rows = np.fromiter((self.row_of(step.request_id) for step in work.steps), np.int64, count)
        lengths = np.fromiter((step.num_tokens for step in work.steps), np.int64, count)
        computed = np.fromiter((step.num_computed_tokens for step in work.steps), np.int64, count)
        sampling = np.flatnonzero(np.fromiter((step.samples for step in work.steps), np.bool_, count))

        query_start = self._query_start[: count + 1]
        query_start[0] = 0
        np.cumsum(lengths, out=query_start[1:])
        total = int(query_start[count])
        token_rows = np.repeat(rows, lengths)
        positions = self._positions[:total]
        np.subtract(self._arange[:total], np.repeat(query_start[:-1] - computed, lengths), out=positions)
        self._token_ids[:total] = self.token_ids[token_rows, positions]
        block_index, offset = np.divmod(positions, self._block_size)
        self._slots[:total] = self.block_tables[token_rows, block_index] * np.int64(self._block_size) + offset
        num_tokens = computed + lengths
        self._context_lens[:count] = num_tokens

        max_context = int(num_tokens.max())
        blocks = -(-max_context // self._block_size)
        return ModelInput(
            token_ids=self._token_ids_tensor[:total].to(self._device),
            positions=self._positions_tensor[:total].to(self._device),
            attention=AttentionMetadata(
                slot_mapping=self._slots_tensor[:total],
                block_tables=torch.from_numpy(self.block_tables[rows, :blocks]),
                query_start=self._query_start_tensor[: count + 1],
                context_lens=self._context_lens_tensor[:count],
                query_lens=lengths,
                max_context_len=max_context,
            ),
            rows=rows,
            query_start=query_start.astype(np.int64),
            num_tokens=num_tokens,
            sampling=sampling,
            kept=torch.from_numpy(query_start[sampling + 1].astype(np.int64) - 1).to(self._device),
        )


def _aliased(size: int, dtype: type[np.integer]) -> tuple[np.ndarray, torch.Tensor]:
    array: np.ndarray = np.zeros(size, dtype)
    return array, torch.from_numpy(array)
