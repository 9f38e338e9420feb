"""Attention over the KV blocks."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from engine.layers.norm import QueryKeyNorm
from engine.layers.recorder import Heads, Recorded
from engine.layers.rotary import RotaryEmbedding
from engine.protocols import AttentionBackend

Angles = tuple[Tensor, Tensor]


class Attention:
    """One layer's way from projected queries, keys and values to what they attend to.

    Queries and keys are normed where the model does that, and turned by their positions; keys and values are stored.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        rotary: RotaryEmbedding,
        heads: Heads,
        *,
        norm: QueryKeyNorm | None,
        sliding_window: int | None,
    ) -> None:
        self._backend = backend
        self._rotary = rotary
        self._heads = heads
        self._norm = norm
        self._scale = heads.dim**-0.5
        self._sliding_window = sliding_window

    @overload
    def __call__(self, qkv: Tensor, angles: Angles, kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...
    @overload
    def __call__(self, qkv: Recorded, angles: None, kv_cache: tuple[Tensor, Tensor]) -> Recorded: ...
    def __call__(
        self, qkv: Tensor | Recorded, angles: Angles | None, kv_cache: tuple[Tensor, Tensor]
    ) -> Tensor | Recorded:
        """[tokens, (heads + 2 * kv_heads) * head_dim] to [tokens, heads * head_dim]."""
        if isinstance(qkv, Recorded):
            return qkv.recorder.attention(
                qkv,
                self._heads,
                kv_cache,
                norms=None if self._norm is None else self._norm.recorded,
                scale=self._scale,
                sliding_window=self._sliding_window,
            )
        assert angles is not None
        queries, keys = self._heads.queries, self._heads.keys
        rows = qkv.view(qkv.shape[0], queries + 2 * keys, self._heads.dim)
        query_key, value = rows[:, : queries + keys], rows[:, queries + keys :]
        if self._norm is not None:
            query_key = self._norm(query_key)
        query_key = self._rotary(query_key, angles)
        attended = self._backend.forward(
            query_key[:, :queries],
            query_key[:, queries:],
            value,
            *kv_cache,
            scale=self._scale,
            sliding_window=self._sliding_window,
        )
        return attended.flatten(1)
