"""Attention over the KV blocks."""

from __future__ import annotations

from torch import Tensor

from engine.protocols import AttentionBackend


class Attention:
    """One layer's attention: what stays the same from step to step, and the backend that does the work."""

    def __init__(self, backend: AttentionBackend, *, head_dim: int, sliding_window: int | None) -> None:
        self._backend = backend
        self._scale = head_dim**-0.5
        self._sliding_window = sliding_window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Stores key and value, [tokens, kv_heads, head_dim], and attends: [tokens, heads * head_dim]."""
        attended = self._backend.forward(
            query, key, value, *kv_cache, scale=self._scale, sliding_window=self._sliding_window
        )
        return attended.flatten(1)
