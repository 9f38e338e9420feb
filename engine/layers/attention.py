"""Attention over the KV blocks."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from engine.layers.norm import QueryKeyNorm
from engine.layers.recorder import Recorded
from engine.protocols import AttentionBackend, Heads, KVCache

Angles = tuple[Tensor, Tensor]


class Attention:
    """One layer's way from projected queries, keys and values to what they attend to.

    Queries and keys are normed where the model does that, and turned by their positions; keys and values are stored.
    """

    def __init__(
        self, backend: AttentionBackend, heads: Heads, *, norm: QueryKeyNorm | None, sliding_window: int | None
    ) -> None:
        self._backend = backend
        self._heads = heads
        self._norm = None if norm is None else norm.of_heads
        self._scale = heads.dim**-0.5
        self._sliding_window = sliding_window

    @overload
    def __call__(self, qkv: Tensor, angles: Angles, kv_cache: KVCache) -> Tensor: ...
    @overload
    def __call__(self, qkv: Recorded, angles: None, kv_cache: KVCache) -> Recorded: ...
    def __call__(self, qkv: Tensor | Recorded, angles: Angles | None, kv_cache: KVCache) -> Tensor | Recorded:
        """[tokens, (heads + 2 * kv_heads) * head_dim] to [tokens, heads * head_dim]."""
        if isinstance(qkv, Recorded):
            return qkv.recorder.attention(
                qkv,
                self._heads,
                kv_cache,
                norm=self._norm,
                scale=self._scale,
                sliding_window=self._sliding_window,
            )
        assert angles is not None
        attended = self._backend.forward(
            qkv,
            angles,
            kv_cache,
            heads=self._heads,
            norm=self._norm,
            scale=self._scale,
            sliding_window=self._sliding_window,
        )
        return attended.flatten(1)
