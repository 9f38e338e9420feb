"""Attention by the C++ kernels, over keys and values in panels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.protocols import AttentionMetadata
from kernels.cpu.library import BLOCK_SIZE, Batch, CpuKernels, Kind, Operation, array_of


class CpuAttention:
    """AttentionBackend of the CPU kernels. A step plan has attention among its operations; `forward` runs it alone."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self._metadata: AttentionMetadata

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """A block's elements for a head are one panel; their order in it is the kernels' business."""
        assert block_size == BLOCK_SIZE
        return num_blocks, num_kv_heads, block_size * head_dim

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def batch(self, tokens: int, cosines: Tensor, sines: Tensor) -> Batch:
        """The step that was prepared, as the kernels take it. Valid while the metadata and the arguments live.

        Args:
            cosines, sines: float32 [tokens, head_dim / 2], contiguous.
        """
        metadata = self._metadata
        tables = metadata.block_tables
        return Batch(
            tokens=tokens,
            slots=metadata.slot_mapping.data_ptr(),
            requests=tables.shape[0],
            query_start=metadata.query_start.data_ptr(),
            context_lens=metadata.context_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See AttentionBackend."""
        tokens, heads, head_dim = query.shape
        rows = torch.cat((query, key, value), dim=1)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        cosines = torch.ones(tokens, head_dim // 2)
        shared = {
            "key_cache": key_cache.data_ptr(),
            "value_cache": value_cache.data_ptr(),
            "heads": heads,
            "kv_heads": key.shape[1],
            "head_dim": head_dim,
        }
        operations = array_of(
            [
                Operation(kind=Kind.ROTATE_AND_STORE, output=rows.data_ptr(), **shared),
                Operation(
                    kind=Kind.ATTEND,
                    input=rows.data_ptr(),
                    output=out.data_ptr(),
                    scale=scale,
                    window=sliding_window or 0,
                    **shared,
                ),
            ]
        )
        self.kernels.run(query.dtype, operations, self.batch(tokens, cosines, torch.zeros_like(cosines)))
        return out
