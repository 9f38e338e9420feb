"""Random flat batches over a paged cache whose unused slots are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocols import AttentionBackend, AttentionMetadata, Heads, KVCache


@dataclass
class Batch:
    """Requests (context, query_len), with all their keys known: the cache holds those before the queries."""

    requests: Sequence[tuple[int, int]]
    metadata: AttentionMetadata
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor

    def new(self, per_request: list[Tensor]) -> Tensor:
        """Rows of the step's own tokens."""
        return torch.cat([rows[c - q :] for rows, (c, q) in zip(per_request, self.requests, strict=True)])

    def attend(self, backend: AttentionBackend, *, sliding_window: int | None = None) -> Tensor:
        """Runs a step of one layer on copies of the caches."""
        backend.prepare(self.metadata)
        return self.forward(backend, sliding_window=sliding_window)

    def forward(
        self, backend: AttentionBackend, caches: KVCache | None = None, *, sliding_window: int | None = None
    ) -> Tensor:
        """One layer of a step that is prepared, on copies of the caches where none are given."""
        tokens, heads, head_dim = self.query.shape
        qkv = torch.cat((self.query, self.new(self.keys), self.new(self.values)), dim=1).flatten(1)
        return backend.forward(
            qkv,
            (torch.ones(tokens, head_dim // 2), torch.zeros(tokens, head_dim // 2)),
            caches or KVCache(self.key_cache.clone(), self.value_cache.clone()),
            heads=Heads(heads, self.keys[0].shape[1], head_dim),
            norm=None,
            scale=head_dim**-0.5,
            sliding_window=sliding_window,
        )

    def attend_naively(self, *, sliding_window: int | None = None) -> Tensor:
        """float64, one query at a time, no cache."""
        rows, start = [], 0
        for (context, length), keys, values in zip(self.requests, self.keys, self.values, strict=True):
            group = self.query.shape[1] // keys.shape[1]
            for i in range(length):
                end = context - length + i + 1
                first = 0 if sliding_window is None else max(0, end - sliding_window)
                k = keys[first:end].double().repeat_interleave(group, 1)
                v = values[first:end].double().repeat_interleave(group, 1)
                q = self.query[start + i].double()
                weights = (torch.einsum("hd,khd->hk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
                rows.append(torch.einsum("hk,khd->hd", weights, v))
            start += length
        return torch.stack(rows)


def random_batch(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    needed = [-(-context // block_size) for context, _ in requests]
    spare = 3
    order = torch.randperm(sum(needed) + spare, generator=generator)
    # What stands past a request's blocks must not be read: it is no block.
    tables = torch.full((len(requests), max(needed)), 2**30, dtype=torch.int32)
    cache = torch.full((sum(needed) + spare, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    batch = Batch(requests, None, draw(sum(q for _, q in requests), heads, head_dim), [], [], cache, cache.clone())
    slots, taken = [], 0
    for request, (context, length) in enumerate(requests):
        tables[request, : needed[request]] = order[taken : taken + needed[request]].int()
        taken += needed[request]
        batch.keys.append(draw(context, kv_heads, head_dim))
        batch.values.append(draw(context, kv_heads, head_dim))
        positions = torch.arange(context)
        blocks, offsets = tables[request, positions // block_size].long(), positions % block_size
        before = slice(0, context - length)
        batch.key_cache[blocks[before], :, offsets[before]] = batch.keys[-1][before]
        batch.value_cache[blocks[before], :, offsets[before]] = batch.values[-1][before]
        slots.append((blocks * block_size + offsets)[context - length :])
    lengths = torch.tensor([q for _, q in requests])
    batch.metadata = AttentionMetadata(
        slot_mapping=torch.cat(slots),
        block_tables=tables,
        query_start=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
        context_lens=torch.tensor([c for c, _ in requests]).int(),
        query_lens=lengths.numpy(),
        max_context_len=max(c for c, _ in requests),
    )
    return batch
