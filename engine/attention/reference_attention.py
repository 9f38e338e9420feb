"""The backend that tests compare others with: simple, slow, and no state but the step's metadata."""

from __future__ import annotations

from torch import Tensor

from engine.protocols import AttentionMetadata
from kernels.reference import paged_attention, reshape_and_cache


class ReferenceAttention:
    """AttentionBackend over kernels.reference."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, head_dim

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._step = metadata

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
        step = self._step
        reshape_and_cache(key, value, key_cache, value_cache, step.slot_mapping)
        return paged_attention(
            query,
            key_cache,
            value_cache,
            step.block_tables,
            step.query_start,
            step.context_lens,
            scale=scale,
            sliding_window=sliding_window,
        )
