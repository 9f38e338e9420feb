"""Attention by the C++ kernels, over keys and values in panels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.protocols import AttentionMetadata, HeadNorm, Heads, KVCache
from kernels.cpu.library import BLOCK_SIZE, Batch, CpuKernels, Kind, Operation, array_of


class CpuAttention:
    """AttentionBackend of the CPU kernels. A step plan has attention among its operations; `forward` runs it alone."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self._metadata: AttentionMetadata

    def new_kv_cache(
        self, num_blocks: int, block_size: int, heads: Heads, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """A block's elements for a head are one panel; their order in it is the kernels' business."""
        assert block_size == BLOCK_SIZE
        shape = (num_blocks, heads.keys, block_size * heads.dim)
        return KVCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))

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
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_cache: KVCache,
        *,
        heads: Heads,
        norm: HeadNorm | None,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See AttentionBackend."""
        tokens = qkv.shape[0]
        qkv = qkv.contiguous()
        cosines, sines = (each.contiguous() for each in angles)
        out = torch.empty(tokens, heads.queries, heads.dim, dtype=qkv.dtype)
        norms = None if norm is None else (norm.query.float(), norm.key.float())
        shared = {
            "key_cache": kv_cache.keys.data_ptr(),
            "value_cache": kv_cache.values.data_ptr(),
            "heads": heads.queries,
            "kv_heads": heads.keys,
            "head_dim": heads.dim,
        }
        rotate = Operation(kind=Kind.ROTATE_AND_STORE, output=qkv.data_ptr(), **shared)
        if norm is not None and norms is not None:
            rotate.query_norm, rotate.key_norm, rotate.eps = norms[0].data_ptr(), norms[1].data_ptr(), norm.eps
        attend = Operation(
            kind=Kind.ATTEND,
            input=qkv.data_ptr(),
            output=out.data_ptr(),
            scale=scale,
            window=sliding_window or 0,
            **shared,
        )
        self.kernels.run(qkv.dtype, array_of([rotate, attend]), self.batch(tokens, cosines, sines))
        return out
