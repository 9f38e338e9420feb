"""What every kernel must compute, in plain torch: the truth that the fast ones are tested against.

The layers use the pointwise ones directly where no device kernel exists.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores keys and values in the paged cache.

    Args:
        key, value: [tokens, kv_heads, head_dim].
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], written in place.
        slot_mapping: int64 [tokens], block * block_size + offset; no slot twice.
    """
    block_size = key_cache.shape[2]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping % block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of a flat batch over paged keys and values.

    Args:
        query: [tokens, heads, head_dim], any float type; requests one after another, no padding.
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim]; slots past a request's context are not read.
        block_tables: int32 [requests, max_blocks]; entries past a request's length are not read.
        query_start: int32 [requests + 1], where each request's tokens start in `query`.
        context_lens: int32 [requests], keys visible to a request's last token, itself included.
        scale: factor on the logits, usually head_dim ** -0.5.
        sliding_window: most keys that a token sees, itself included; None is all before it.

    Returns:
        [tokens, heads, head_dim] in query's type; accumulation is float32 (float64 for float64).

    Raises:
        ValueError: heads is not a multiple of kv_heads.

    Source: Vaswani et al. 2017; Kwon et al. 2023 (paged keys); Ainslie et al. 2023 (grouped queries).
    """
    heads, kv_heads, block_size = query.shape[1], key_cache.shape[1], key_cache.shape[2]
    if heads % kv_heads:
        raise ValueError(f"heads={heads}: must be a multiple of kv_heads, which is {kv_heads}")
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = torch.empty_like(query)
    starts = query_start.tolist()
    for request, context in enumerate(context_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        positions = torch.arange(context, device=query.device)
        blocks = block_tables[request, positions // block_size].long()
        keys = key_cache[blocks, :, positions % block_size].to(accumulate)
        values = value_cache[blocks, :, positions % block_size].to(accumulate)
        keys = keys.repeat_interleave(heads // kv_heads, dim=1)
        values = values.repeat_interleave(heads // kv_heads, dim=1)
        logits = torch.einsum("qhd,khd->hqk", query[start:end].to(accumulate), keys) * scale
        distance = positions[context - (end - start) :, None] - positions
        hidden = distance < 0 if sliding_window is None else (distance < 0) | (distance >= sliding_window)
        weights = logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times weight.

    Args:
        x: [..., size]. weight: [size], or anything that broadcasts against x.

    Returns:
        As x. The mean is float32; what is normalised is rounded to x's type before the weight, as the models were
        trained.

    Source: Zhang and Sennrich 2019.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm of x + residual, and that sum: the residual that the next norm is given."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: [..., 2 * size] to [..., size]. Source: Shazeer 2020."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + head_dim / 2) of every head by its token's angles.

    Args:
        x: [tokens, heads, head_dim].
        cos, sin: [tokens, head_dim] in x's type, of the angles twice over; sin is negated in its first half.

    Returns:
        As x.

    Source: Su et al. 2021, in the half-split form of GPT-NeoX.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos[:, None], swapped, sin[:, None])


# What feeds a step, around the layers' own operations.


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """The table's rows of integers [tokens]: [vocab, size] to [tokens, size]."""
    return F.embedding(token_ids, table)


def rotate_and_store(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    heads: int,
    kv_heads: int,
    norm: tuple[Tensor, Tensor, float] | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Norms and rotates queries and keys; stores keys and values in the paged cache.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], all queries, then all keys, then all values.
        cosines, sines: float32 [tokens, head_dim / 2], of the angles of the pairs (i, i + head_dim / 2).
        slots: int32 [tokens], block * block_size + offset; nothing is stored for a negative one.
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], written; float8_e4m3fn with scales.
        norm: weight of the queries' rms_norm and of the keys', [head_dim] each, and eps; over each head, before the
            rotation.
        key_scales, value_scales: float32 [blocks, kv_heads, block_size], written: see quantize_fp8.

    Returns:
        The queries, [tokens, heads, head_dim] in qkv's type. The rotation is float32 and rounded once.
    """
    tokens, _ = qkv.shape
    block_size, head_dim = key_cache.shape[2:]
    query, key, value = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        query_weight, key_weight, eps = norm
        query, key = rms_norm(query, query_weight, eps), rms_norm(key, key_weight, eps)
    query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)

    stored = slots >= 0
    blocks, offsets = slots[stored].long() // block_size, slots[stored].long() % block_size
    for cache, scales, vectors in ((key_cache, key_scales, key), (value_cache, value_scales, value)):
        vectors = vectors[stored]
        if scales is not None:
            vectors, scales[blocks, :, offsets] = quantize_fp8(vectors)
        cache[blocks, :, offsets] = vectors.to(cache.dtype)
    return query.to(qkv.dtype)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[tokens, heads, head_dim] in any type to float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cosines[:, None], sines[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., size] to float8_e4m3fn of the same shape and their scales, float32 [...]: x is about fp8 * scale.

    A vector's largest entry becomes 448, the type's largest number; a zero vector has scale 1.
    """
    largest = x.float().abs().amax(-1)
    scale = torch.where(largest > 0, largest / 448, 1.0)
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def gather_step(
    token_table: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    query_start: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    *,
    num_requests: int,
    padded: int,
    block_size: int,
    max_query_len: int,
) -> None:
    """Fills a step's arrays from the tables of the running requests; all int32.

    Args:
        token_table: [rows, max_model_len].
        block_tables: [rows, max_blocks].
        table_rows, num_computed: [at least num_requests].
        query_start: [at least num_requests + 1].
        token_ids, positions, slots: written, one entry for each token and then one for each padded request.
        context_lens: written, one entry for each request, padded ones included.
        padded: requests with the padding, num_requests without. A padded request has context 0 and one token, with
            id 0, position 0 and slot -1.
        max_query_len: no request has more tokens in this step; a bound for kernels alone.
    """
    starts = query_start[: num_requests + 1].tolist()
    for request in range(num_requests):
        row, computed = int(table_rows[request]), int(num_computed[request])
        tokens = slice(starts[request], starts[request + 1])
        end = computed + tokens.stop - tokens.start
        position = torch.arange(computed, end, device=positions.device)
        token_ids[tokens] = token_table[row, computed:end]
        positions[tokens] = position
        slots[tokens] = block_tables[row, position // block_size] * block_size + position % block_size
        context_lens[request] = end
    padding = slice(starts[-1], starts[-1] + padded - num_requests)
    token_ids[padding], positions[padding], slots[padding] = 0, 0, -1
    context_lens[num_requests:padded] = 0


def write_segments(table: Tensor, rows: Tensor, columns: Tensor, starts: Tensor, values: Tensor) -> None:
    """table[rows[i], columns[i] + j] = values[starts[i] + j] for each segment i and j < starts[i + 1] - starts[i]."""
    bounds = starts.tolist()
    for row, column, start, end in zip(rows.tolist(), columns.tolist(), bounds, bounds[1:], strict=False):
        table[row, column : column + end - start] = values[start:end]


def store_tokens(token_table: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    """token_table[rows[i], positions[i]] = token_ids[i], but for positions beyond the row, which are left out."""
    fitting = positions < token_table.shape[1]
    token_table[rows[fitting], positions[fitting]] = token_ids[fitting]


def count_tokens(counts: Tensor, token_ids: Tensor, num_prompt: int) -> None:
    """Adds a request's tokens to its counts.

    Args:
        counts: int32 [at least vocab], (times in the output << 1) | in the prompt.
        token_ids: int32 [tokens], the first num_prompt of them the prompt's.
    """
    counts[token_ids[:num_prompt].long()] |= 1
    counts += 2 * torch.bincount(token_ids[num_prompt:], minlength=len(counts)).int()


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token a row and of the row's k best tokens.

    Args:
        logits: float [n, vocab]; NaN counts as -inf, +inf as the largest number.
        token_ids: integers [n].

    Returns:
        Token ids int32 [n, 1 + k], the token itself and then the best ones, equal ones by lower id; float32 [n, 1 + k],
        their log-probabilities, -inf in a row of impossible tokens; int32 [n], 1 + how many tokens are better.
    """
    impossible = float("-inf")
    logits = logits.float().nan_to_num(nan=impossible, posinf=torch.finfo(torch.float32).max, neginf=impossible)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ids = torch.cat((token_ids[:, None], order[:, :k]), dim=1)
    chosen = logits.gather(1, ids)
    logprobs = logits.double().log_softmax(-1).gather(1, ids).float().nan_to_num(nan=impossible, neginf=impossible)
    return ids.int(), logprobs, 1 + (logits > chosen[:, :1]).sum(1).int()
