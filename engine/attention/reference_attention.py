"""The backend that tests compare others with: simple, slow, and no state but the step's metadata."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.projections import Angles, split_heads, whole_angles
from engine.protocols import AttentionMetadata, HeadNorm, Heads, KVCache
from kernels.reference import paged_attention, reshape_and_cache


class ReferenceAttention:
    """AttentionBackend over kernels.reference."""

    def new_kv_cache(
        self, num_blocks: int, block_size: int, heads: Heads, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        shape = (num_blocks, heads.keys, block_size, heads.dim)
        return KVCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._step = metadata

    def forward(
        self,
        qkv: Tensor,
        angles: Angles,
        kv_cache: KVCache,
        *,
        heads: Heads,
        norm: HeadNorm | None,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        step = self._step
        query, key, value = split_heads(qkv, whole_angles(angles, qkv.dtype), heads, norm)
        reshape_and_cache(key, value, kv_cache.keys, kv_cache.values, step.slot_mapping)
        return paged_attention(
            query,
            kv_cache.keys,
            kv_cache.values,
            step.block_tables,
            step.query_start,
            step.context_lens,
            scale=scale,
            sliding_window=sliding_window,
        )
