"""Paged attention in plain torch: what a CPU runs where no compiled kernel is at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.projections import Angles, split_heads, whole_angles
from engine.protocols import AttentionMetadata, HeadNorm, Heads, KVCache

TILE = 64
"""Queries of one request that attend at once: bounds their logits and skips most of the causal triangle."""

GROUP_SLOTS = 1 << 15
"""Key slots that are gathered for one group of decoding requests: bounds the copy."""

GROUP_FILL = 0.75
"""A decoding request joins a group if its length is at least this share of the longest: bounds the padding."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests with one query each, attended together.

    Attributes:
        tokens: int64 [requests], their places in the flat batch.
        rows: int64 [requests * kv_heads * longest], cache rows; a shorter request repeats its last one.
        hidden: bool [requests, 1, longest], True on the repeats; None where all are equally long.
    """

    tokens: Tensor
    rows: Tensor
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive queries of one request, tokens [start, end) of the flat batch.

    Attributes:
        position: of the first query in its request.
        first_key: position of the first key that any of its queries sees.
        rows: int64 [kv_heads * keys], cache rows from first_key on; None where the step itself brings all keys.
    """

    start: int
    end: int
    position: int
    first_key: int
    rows: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What layers of one shape and window share in a step.

    Attributes:
        written: int64 [tokens * kv_heads], the cache rows that the step's keys go to.
        hidden: bool [queries, origin + queries] of a tile. Column `origin` is its first query's own key; all keys
            before column 0 are seen.
    """

    written: Tensor
    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]
    hidden: Tensor
    origin: int


class TorchAttention:
    """AttentionBackend of gathers and dense products. Touched on the engine's thread alone.

    The caches are [blocks, kv_heads, block_size, head_dim], read as rows of head_dim numbers. Only rows of visible
    tokens are ever read, so that it does not matter what the memory of the others holds. Queries that share a key
    head stand beside each other in one product; keys are not repeated.

    Requests with one query are gathered into padded groups of similar length. Others attend tile by tile, a first
    chunk straight over the step's own keys. Indices and masks are made once a step and serve all layers.

    The softmax is float32. Products are of the model's type, so that bfloat16 rounds the logits before it, as
    transformers' eager attention does; float16 computes in float32, for which CPUs have fast products.
    """

    def new_kv_cache(
        self, num_blocks: int, block_size: int, heads: Heads, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        shape = (num_blocks, heads.keys, block_size, heads.dim)
        return KVCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._step = metadata
        self._plans: dict[tuple[int, int, int | None], _Plan] = {}
        self._angles: Angles | None = None

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
        if self._angles is not angles:
            self._angles, self._whole_angles = angles, whole_angles(angles, qkv.dtype)
        query, key, value = split_heads(qkv, self._whole_angles, heads, norm)
        return self._attend(query, key, value, kv_cache.keys, kv_cache.values, scale, sliding_window)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        _, kv_heads, block_size, head_dim = key_cache.shape
        shape = (kv_heads, block_size, sliding_window)
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = _make_plan(self._step, *shape, key.device)
        key_rows, value_rows = key_cache.view(-1, head_dim), value_cache.view(-1, head_dim)
        key_rows.index_copy_(0, plan.written, key.reshape(-1, head_dim))
        value_rows.index_copy_(0, plan.written, value.reshape(-1, head_dim))

        output = query.new_empty(query.shape)
        for group in plan.decodes:
            queries = query.index_select(0, group.tokens)
            requests, num_heads, _ = queries.shape
            attended = _attend(
                queries.view(requests * kv_heads, num_heads // kv_heads, head_dim),
                key_rows.index_select(0, group.rows).view(requests * kv_heads, -1, head_dim),
                value_rows.index_select(0, group.rows).view(requests * kv_heads, -1, head_dim),
                group.hidden,
                scale,
                rows=num_heads,
            )
            output.index_copy_(0, group.tokens, attended.view(queries.shape))
        for chunk in plan.chunks:
            if chunk.rows is None:
                keys = key[chunk.start : chunk.end].transpose(0, 1)
                values = value[chunk.start : chunk.end].transpose(0, 1)
            else:
                keys = key_rows.index_select(0, chunk.rows).view(kv_heads, -1, head_dim)
                values = value_rows.index_select(0, chunk.rows).view(kv_heads, -1, head_dim)
            _attend_chunk(query, keys, values, chunk, plan, scale, sliding_window, output)
        return output


def _attend_chunk(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: _Chunk,
    plan: _Plan,
    scale: float,
    sliding_window: int | None,
    output: Tensor,
) -> None:
    """Writes a chunk's rows of output, tile by tile; keys and values are [kv_heads, keys, head_dim] from first_key."""
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[0]
    for start in range(chunk.start, chunk.end, TILE):
        end = min(start + TILE, chunk.end)
        rows = end - start
        position = chunk.position + start - chunk.start
        first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
        seen = slice(first - chunk.first_key, position + rows - chunk.first_key)
        width = min(position + rows - first, plan.origin + rows)
        tile = query[start:end].view(rows, kv_heads, heads // kv_heads, head_dim)
        attended = _attend(
            tile.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim),
            keys[:, seen],
            values[:, seen],
            plan.hidden[:rows, plan.origin + rows - width : plan.origin + rows],
            scale,
            rows=rows,
        )
        output[start:end] = attended.view(heads, rows, head_dim).transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float, *, rows: int) -> Tensor:
    """Attention of n independent products.

    Args:
        query: [n, queries, head_dim]. keys, values: [n, keys, head_dim].
        hidden: bool, True where a query must not see a key; broadcasts against the last keys of the logits seen as
            [-1, rows, keys]. None hides nothing.

    Returns:
        As query.
    """
    dtype = query.dtype
    if dtype == torch.float16:
        query, keys, values = query.float(), keys.float(), values.float()
    logits = torch.bmm(query, keys.transpose(1, 2)).float().mul_(scale)
    if hidden is not None:
        logits.view(-1, rows, logits.shape[-1])[..., -hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    return torch.bmm(logits.softmax(dim=-1).to(values.dtype), values).to(dtype)


# ---- the plan of a step ----


def _make_plan(
    step: AttentionMetadata, kv_heads: int, block_size: int, sliding_window: int | None, device: torch.device
) -> _Plan:
    starts, contexts = step.query_start.tolist(), step.context_lens.tolist()
    decodes: list[int] = []
    chunks: list[_Chunk] = []
    for request, context in enumerate(contexts):
        start, end = starts[request], starts[request + 1]
        if end - start == 1:
            decodes.append(request)
            continue
        position = context - (end - start)
        first_key = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
        rows = None
        if position > 0:
            last_keys = torch.tensor([context - first_key])
            rows = _last_rows(step, torch.tensor([request]), last_keys, kv_heads, block_size).to(device)
        chunks.append(_Chunk(start, end, position, first_key, rows))

    groups = []
    visible = [context if sliding_window is None else min(context, sliding_window) for context in contexts]
    for requests in _group_by_length(decodes, visible):
        lengths = torch.tensor([visible[request] for request in requests])
        padding = torch.arange(int(lengths.max())) >= lengths[:, None]
        hidden = padding[:, None].to(device) if padding.any() else None
        tokens = torch.tensor([starts[request] for request in requests], device=device)
        rows = _last_rows(step, torch.tensor(requests), lengths, kv_heads, block_size)
        groups.append(_DecodeGroup(tokens, rows.to(device), hidden))

    slots = step.slot_mapping[:, None]
    written = _cache_rows(slots // block_size, slots % block_size, kv_heads, block_size).flatten()
    # Without a window all keys before a tile are seen by all of it.
    origin = 0 if sliding_window is None else min(sliding_window, step.max_context_len) - 1
    hidden = _hidden(min(TILE, step.max_query_len), origin, sliding_window)
    return _Plan(written.to(device), groups, chunks, hidden.to(device), origin)


def _last_rows(step: AttentionMetadata, requests: Tensor, lengths: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Cache rows of each request's last `lengths` keys, flat [requests, kv_heads, longest]; the last one repeats."""
    firsts = step.context_lens[requests] - lengths
    positions = firsts[:, None] + torch.minimum(torch.arange(int(lengths.max())), lengths[:, None] - 1)
    blocks = step.block_tables[requests].to(torch.int64).gather(1, positions // block_size)
    return _cache_rows(blocks, positions % block_size, kv_heads, block_size).flatten()


def _cache_rows(blocks: Tensor, offsets: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Rows [n, kv_heads, m] of a cache seen as [blocks * kv_heads * block_size, head_dim], from slots [n, m]."""
    heads = torch.arange(kv_heads, device=blocks.device)[None, :, None]
    return (blocks[:, None] * kv_heads + heads) * block_size + offsets[:, None]


def _group_by_length(requests: list[int], lengths: list[int]) -> list[list[int]]:
    """Requests in groups of similar length, each group in the order of the batch."""
    groups: list[list[int]] = []
    longest = 0
    for request in sorted(requests, key=lambda request: -lengths[request]):
        fits = groups and longest * (len(groups[-1]) + 1) <= GROUP_SLOTS
        if fits and lengths[request] >= longest * GROUP_FILL:
            groups[-1].append(request)
        else:
            groups.append([request])
            longest = lengths[request]
    return [sorted(group) for group in groups]


def _hidden(queries: int, origin: int, sliding_window: int | None) -> Tensor:
    """Bool [queries, origin + queries]: whether query i must not see column j, which is key j - origin."""
    distance = torch.arange(queries)[:, None] - (torch.arange(origin + queries) - origin)
    return distance < 0 if sliding_window is None else (distance < 0) | (distance >= sliding_window)
