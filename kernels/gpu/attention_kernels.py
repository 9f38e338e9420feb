"""Attention over paged keys and values: the kernels. `attention` chooses their tiles and launches them.

A program serves one KV head and one tile of queries: a few tokens of one request, times the query heads that share the
KV head, so that a key is read once for all of them. It walks over the keys in tiles with an online softmax. Where there
are too few programs to fill the device, or contexts are long, the keys of a tile are split between several programs,
whose results a second kernel combines.

Source: Dao 2023 (FlashAttention-2) for the online softmax; Dao et al. 2023 (Flash-Decoding) for the split keys;
Kwon et al. 2023 for the pages.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below every logit, yet finite: a row whose keys so far are all masked keeps a maximum that can be subtracted.
LOWEST = tl.constexpr(-1.0e30)

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _queries_of(tile, query_start, context_lens, num_requests, tile_tokens, first_tile, shortest, longest):
    """What a tile of queries consists of.

    Where first_tile is negative each request is one tile. Otherwise a request has one for every `tile_tokens` of its
    tokens: tiles of request r begin at query_start[r] // tile_tokens + r, which leaves room enough for all requests
    before, and `tile` counts from first_tile on.

    Returns:
        The request, the tile's first token in the batch, how many tokens it has (none or less where there is nothing to
        do: a request of another length, or of padding, or no tile), and the first one's position.
    """
    request = tile
    first = 0
    if first_tile >= 0:
        tile += first_tile
        request = 0
        end = num_requests
        while request + 1 < end:
            middle = (request + end) // 2
            begins = tl.load(query_start + middle) // tile_tokens + middle
            request = tl.where(begins <= tile, middle, request)
            end = tl.where(begins <= tile, end, middle)
        first = (tile - tl.load(query_start + request) // tile_tokens - request) * tile_tokens
    start = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - start
    context = tl.load(context_lens + request)
    ours = (context > 0) & (query_len >= shortest) & (query_len <= longest)
    tokens = tl.where(ours, tl.minimum(tile_tokens, query_len - first), 0)
    return request, start + first, tokens, context - query_len + first


@triton.jit
def _key_tiles(first_position, last_position, window, splits, min_share, tile_keys):
    """Where the keys of a tile of queries begin, how many tiles of keys there are, and how many a split takes."""
    begin = tl.maximum(first_position - window + 1, 0) // tile_keys * tile_keys
    tiles = tl.cdiv(last_position + 1 - begin, tile_keys)
    share = tl.maximum(tl.cdiv(tiles, splits), min_share)
    return begin, tiles, share


@triton.jit
def _load_blocks(table, key_start, first_key, end_key, block_shift, KEYS: tl.constexpr):
    """The block of each key of the tile that starts at key_start; 0 for keys outside first_key .. end_key."""
    keys_at = key_start + tl.arange(0, KEYS)
    return tl.load(table + (keys_at >> block_shift), mask=(keys_at >= first_key) & (keys_at < end_key), other=0)


@triton.jit
def _load_vectors(
    cache, cache_rows, readable, head_dim, PADDED_DIM: tl.constexpr, FULL: tl.constexpr, MASKED: tl.constexpr
):
    """Rows of a cache, [rows, PADDED_DIM]; if MASKED zeros for what is not readable, for 0 times NaN is NaN."""
    dims = tl.arange(0, PADDED_DIM)
    # The number of rows fits 31 bits, that of elements may not.
    pointers = cache + cache_rows.to(tl.int64)[:, None] * head_dim + dims[None, :]
    if MASKED:
        vectors = tl.load(pointers, mask=readable[:, None] & (dims < head_dim)[None, :], other=0.0)
    elif FULL:
        vectors = tl.load(pointers)
    else:
        vectors = tl.load(pointers, mask=(dims < head_dim)[None, :], other=0.0)
    return vectors


@triton.jit
def _as_operand(cached, queries):
    """Of the queries' type. FP8 goes by way of float32: straight to bfloat16 takes slower instructions on 9.0."""
    if cached.dtype == queries.dtype:
        return cached
    return cached.to(tl.float32).to(queries.dtype)


@triton.jit
def _attend(
    queries,
    total,
    maximum,
    accumulator,
    blocks,
    key_start,
    positions,
    first_key,
    end_key,
    window,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    kv_head,
    kv_heads,
    block_shift,
    logit_scale,
    head_dim,
    PADDED_DIM: tl.constexpr,
    FULL: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax: the tile of keys that starts at key_start.

    Args:
        queries: [rows, PADDED_DIM]. positions: [rows], of their tokens.
        total, maximum: [rows], sum of the weights so far and greatest logit so far. accumulator: [rows, PADDED_DIM].
        first_key, end_key: keys outside are not read. window: keys that a token sees, itself included.
        blocks: [KEYS], of the keys.
    """
    keys_at = key_start + tl.arange(0, KEYS)
    readable = (keys_at >= first_key) & (keys_at < end_key)
    # A row of the cache is one token's key or value for one head.
    cache_rows = ((blocks * kv_heads + kv_head) << block_shift) + (keys_at & ((1 << block_shift) - 1))
    keys = _load_vectors(key_cache, cache_rows, readable, head_dim, PADDED_DIM, FULL, MASKED)
    values = _load_vectors(value_cache, cache_rows, readable, head_dim, PADDED_DIM, FULL, MASKED)
    # For float32 three products of TF32 parts: nearly as exact as its own, which would not fit the registers.
    logits = tl.dot(queries, tl.trans(_as_operand(keys, queries)), input_precision="tf32x3")
    if key_scales is not None:
        if MASKED:
            logits *= tl.load(key_scales + cache_rows, mask=readable, other=0.0)[None, :]
        else:
            logits *= tl.load(key_scales + cache_rows)[None, :]
    if MASKED:
        distance = positions[:, None] - keys_at[None, :]
        logits = tl.where((distance >= 0) & (distance < window) & readable[None, :], logits, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(logits, 1) * logit_scale)
    weights = tl.exp2(logits * logit_scale - new_maximum[:, None])
    correction = tl.exp2(maximum - new_maximum)
    total = total * correction + tl.sum(weights, 1)
    accumulator *= correction[:, None]
    if value_scales is not None:
        # Weights times the token's greatest value, not times its 448th part, which may be too small for float16.
        if MASKED:
            weights *= (tl.load(value_scales + cache_rows, mask=readable, other=0.0) * FP8_MAX)[None, :]
        else:
            weights *= (tl.load(value_scales + cache_rows) * FP8_MAX)[None, :]
    accumulator = tl.dot(weights.to(queries.dtype), _as_operand(values, queries), accumulator, input_precision="tf32x3")
    return total, new_maximum, accumulator


# Not to be specialised: numbers that change from step to step, and tables that start at any entry of another one.
TABLES = ("block_tables", "table_rows", "query_start", "context_lens")
_SHARED_INTEGERS = (
    "num_requests",
    "group",
    "window",
    "splits",
    "min_share",
    "rows",
    "first_tile",
    "shortest",
    "longest",
)
ATTENTION_INTEGERS = (*_SHARED_INTEGERS, "token_stride", "head_stride", "table_stride", "block_shift", "head_units")
COMBINE_INTEGERS = (*_SHARED_INTEGERS, "head_dim", "tile_keys")


@triton.jit(do_not_specialize=ATTENTION_INTEGERS, do_not_specialize_on_alignment=TABLES)
def attention_kernel(
    output,
    partial_output,
    partial_lse,
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_tables,
    table_rows,
    query_start,
    context_lens,
    token_stride,
    head_stride,
    table_stride,
    num_requests,
    group,
    block_shift,
    window,
    splits,
    min_share,
    rows,
    first_tile,
    shortest,
    longest,
    scale,
    head_units,
    PADDED_DIM: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of the requests that have `shortest` to `longest` tokens. Grid: (kv_heads, tiles, splits).

    Args:
        output: [tokens, heads, head_dim], contiguous; head_dim is PADDED_DIM if FULL, else head_units * 8.
        partial_output: float32 [tiles, kv_heads, splits, rows, PADDED_DIM], each split's own output.
        partial_lse: float32 [tiles, kv_heads, splits, rows], base-2 logarithms of its sums of exponentials.
        token_stride, head_stride: of query, in units of 8 elements, so that its alignment is known.
        group: query heads of a KV head. rows: of a tile that are in use: its tokens times group, ROWS at most.
        min_share: tiles of keys that are worth a split.
    """
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    # The last tiles of a long prompt have most keys: they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    request, first_token, tokens, first_position = _queries_of(
        tile, query_start, context_lens, num_requests, rows // group, first_tile, shortest, longest
    )
    if tokens <= 0:
        return
    last_position = first_position + tokens - 1
    begin, key_tiles, share = _key_tiles(first_position, last_position, window, splits, min_share, KEYS)
    tile_from = split * share
    if tile_from >= key_tiles:
        return
    tile_to = tl.minimum(tile_from + share, key_tiles)
    # Between these every row sees every key.
    full_from = tl.cdiv(tl.maximum(last_position - window + 1 - begin, 0), KEYS)
    full_from = tl.minimum(tl.maximum(full_from, tile_from), tile_to)
    full_to = (first_position + 1 - begin) // KEYS
    full_to = tl.minimum(tl.maximum(full_to, full_from), tile_to)

    head_dim = PADDED_DIM if FULL else head_units * 8
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    used = row < tokens * group
    token = first_token + row // group
    head = kv_head * group + row % group
    query_at = (token.to(tl.int64) * token_stride + head * head_stride) * 8
    queries = tl.load(
        query + query_at[:, None] + dims[None, :], mask=used[:, None] & (dims < head_dim)[None, :], other=0.0
    )
    positions = tl.minimum(first_position + row // group, last_position)
    table = block_tables + tl.load(table_rows + request).to(tl.int64) * table_stride
    logit_scale = scale * 1.4426950408889634
    first_key = tl.maximum(first_position - window + 1, 0)
    end_key = last_position + 1

    total = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    accumulator = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    # Each step loads the next one's blocks, so that a tile's loads need not wait for its table.
    blocks = _load_blocks(table, begin + full_from * KEYS, first_key, end_key, block_shift, KEYS)
    for index in range(full_from, full_to):
        key_start = begin + index * KEYS
        next_blocks = _load_blocks(table, key_start + KEYS, first_key, end_key, block_shift, KEYS)
        total, maximum, accumulator = _attend(
            queries, total, maximum, accumulator, blocks, key_start, positions, first_key, end_key, window,
            key_cache, value_cache, key_scales, value_scales, kv_head, kv_heads, block_shift, logit_scale,
            head_dim, PADDED_DIM, FULL, KEYS, False,
        )  # fmt: skip
        blocks = next_blocks
    # The edges: tiles that the window cuts, then those on the diagonal.
    before = full_from - tile_from
    for edge in tl.range(0, before + tile_to - full_to, num_stages=1):
        index = tl.where(edge < before, tile_from + edge, full_to + edge - before)
        key_start = begin + index * KEYS
        blocks = _load_blocks(table, key_start, first_key, end_key, block_shift, KEYS)
        total, maximum, accumulator = _attend(
            queries, total, maximum, accumulator, blocks, key_start, positions, first_key, end_key, window,
            key_cache, value_cache, key_scales, value_scales, kv_head, kv_heads, block_shift, logit_scale,
            head_dim, PADDED_DIM, FULL, KEYS, True,
        )  # fmt: skip

    # At least 1 where a row has seen a key. Of a split it may see none: that part is 0 and counts for nothing.
    total = tl.maximum(total, 1e-30)
    inverse = 1.0 / total
    if value_scales is not None:
        inverse *= 1.0 / FP8_MAX
    result = accumulator * inverse[:, None]
    mask = used[:, None] & (dims < head_dim)[None, :]
    if share >= key_tiles:
        output_at = (token.to(tl.int64) * (kv_heads * group) + head) * head_dim
        tl.store(output + output_at[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=mask)
    else:
        partial_row = ((tile * kv_heads + kv_head) * splits + split) * rows + row
        tl.store(
            partial_output + partial_row.to(tl.int64)[:, None] * PADDED_DIM + dims[None, :], result, mask=used[:, None]
        )
        tl.store(partial_lse + partial_row, maximum + tl.log2(total), mask=used)


@triton.jit(do_not_specialize=COMBINE_INTEGERS, do_not_specialize_on_alignment=TABLES)
def combine_kernel(
    output,
    partial_output,
    partial_lse,
    query_start,
    context_lens,
    num_requests,
    group,
    head_dim,
    tile_keys,
    window,
    splits,
    min_share,
    rows,
    first_tile,
    shortest,
    longest,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Joins what the splits of each row have computed. Grid: (kv_heads, tiles, rows); arguments as of attention_kernel.

    SPLITS: how many are read at a time.
    """
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    tile = tl.program_id(1)
    row = tl.program_id(2)
    _, first_token, tokens, first_position = _queries_of(
        tile, query_start, context_lens, num_requests, rows // group, first_tile, shortest, longest
    )
    if row >= tokens * group:
        return
    _, key_tiles, share = _key_tiles(first_position, first_position + tokens - 1, window, splits, min_share, tile_keys)
    if share >= key_tiles:
        return

    used = tl.cdiv(key_tiles, share)
    dims = tl.arange(0, PADDED_DIM)
    maximum = LOWEST
    total = 0.0
    result = tl.zeros([PADDED_DIM], tl.float32)
    for split_from in range(0, used, SPLITS):
        split = split_from + tl.arange(0, SPLITS)
        partial_row = ((tile * kv_heads + kv_head) * splits + split) * rows + row
        lse = tl.load(partial_lse + partial_row, mask=split < used, other=float("-inf"))
        partial_at = partial_row.to(tl.int64)[:, None] * PADDED_DIM + dims[None, :]
        outputs = tl.load(partial_output + partial_at, mask=(split < used)[:, None], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(lse - new_maximum)
        total = total * correction + tl.sum(weights, 0)
        result = result * correction + tl.sum(outputs * weights[:, None], 0)
        maximum = new_maximum
    token = first_token + row // group
    head = kv_head * group + row % group
    output_at = (token.to(tl.int64) * (kv_heads * group) + head) * head_dim + dims
    tl.store(output + output_at, (result / total).to(output.dtype.element_ty), mask=dims < head_dim)
