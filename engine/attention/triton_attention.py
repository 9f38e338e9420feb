"""Attention by the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.protocols import AttentionMetadata, HeadNorm, Heads, KVCache
from kernels.gpu.attention import Launch, paged_attention, plan_launches
from kernels.gpu.kv_write import rotate_and_store


class TritonAttention:
    """AttentionBackend of kernels.gpu. The caches are [blocks, kv_heads, block_size, head_dim].

    With fp8, keys and values are stored as FP8 (e4m3) with a scale for each token and head.
    """

    def __init__(self, *, num_sms: int, fp8: bool = False) -> None:
        """
        Args:
            num_sms: multiprocessors of the device.
        """
        self._num_sms = num_sms
        self._fp8 = fp8

    def new_kv_cache(
        self, num_blocks: int, block_size: int, heads: Heads, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        shape = (num_blocks, heads.keys, block_size)
        stored = torch.float8_e4m3fn if self._fp8 else dtype
        keys, values = (torch.empty(*shape, heads.dim, dtype=stored, device=device) for _ in range(2))
        if not self._fp8:
            return KVCache(keys, values)
        return KVCache(keys, values, *(torch.empty(shape, device=device) for _ in range(2)))

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._step = metadata
        self._launches: dict[tuple[Heads, int | None], list[Launch]] = {}
        self._slots = metadata.slot_mapping.int()
        contexts = metadata.context_lens
        self._table_rows = (
            torch.arange(len(contexts), dtype=torch.int32, device=contexts.device)
            if metadata.table_rows is None
            else metadata.table_rows
        )

    def forward(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_cache: KVCache,
        *,
        heads: Heads,
        norm: HeadNorm | None,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        step = self._step
        shape = heads, sliding_window
        if shape not in self._launches:
            self._launches[shape] = plan_launches(
                step.query_lens,
                heads=heads.queries,
                kv_heads=heads.keys,
                head_dim=heads.dim,
                dtype=qkv.dtype,
                sliding_window=sliding_window,
                max_context_len=step.max_context_len,
                num_sms=self._num_sms,
                device=qkv.device,
            )
        query = rotate_and_store(
            qkv,
            *angles,
            self._slots,
            kv_cache.keys,
            kv_cache.values,
            heads=heads.queries,
            kv_heads=heads.keys,
            norm=norm,
            key_scales=kv_cache.key_scales,
            value_scales=kv_cache.value_scales,
        )
        return paged_attention(
            query,
            kv_cache.keys,
            kv_cache.values,
            step.block_tables,
            self._table_rows,
            step.query_start,
            step.context_lens,
            query_lens=step.query_lens,
            scale=scale,
            sliding_window=sliding_window,
            max_context_len=step.max_context_len,
            num_sms=self._num_sms,
            launches=self._launches[shape],
            key_scales=kv_cache.key_scales,
            value_scales=kv_cache.value_scales,
        )
