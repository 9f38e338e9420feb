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
