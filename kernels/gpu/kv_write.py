"""Between the projection of queries, keys and values and attention: norms, rotation, and the write to the cache."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.variants import FP8_CAPABILITY, Variant

_PAIRS = 1024
"""Pairs (i, i + head_dim / 2) of a program: with four warps, 16 bytes of a 16-bit type a thread and half."""
_NUM_WARPS = 4
_INTEGERS = ["normed", "heads", "kv_heads", "half_units", "block_size"]


@triton.jit
def _round_to_e4m3(x):
    """float32 of at most 448 in size to the nearest number that e4m3 has, ties to the even one.

    The conversion after it is exact then, which matters where Triton's own rounds twice (compute capability 8.9) or
    loses a carry (its interpreter).
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2 ** -6 e4m3's numbers are 2 ** -9 apart, as float32's are from 2 ** 14 to 2 ** 15.
    subnormal = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)


@triton.jit(do_not_specialize=_INTEGERS)
def _rotate_and_store(
    qkv,
    cosines,
    sines,
    slots,
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    query_weight,
    key_weight,
    eps,
    normed,
    heads,
    kv_heads,
    half_units,
    block_size,
    UNIT: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (token, part): TILE of the token's heads, of whichever kinds. [TILE, PADDED_HALF] pairs."""
    token = tl.program_id(0).to(tl.int64)
    half = half_units * UNIT
    head_dim = 2 * half
    all_heads = heads + 2 * kv_heads
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    pair = tl.arange(0, PADDED_HALF)[None, :]
    in_half = pair < half
    is_query = head < heads
    is_value = (head >= heads + kv_heads) & (head < all_heads)

    inside = (head < all_heads) & in_half
    source = qkv + (token * all_heads + head) * head_dim + pair
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)

    dtype = qkv.dtype.element_ty
    if normed:
        query_first = tl.load(query_weight + pair, mask=in_half, other=0.0).to(tl.float32)
        query_second = tl.load(query_weight + half + pair, mask=in_half, other=0.0).to(tl.float32)
        key_first = tl.load(key_weight + pair, mask=in_half, other=0.0).to(tl.float32)
        key_second = tl.load(key_weight + half + pair, mask=in_half, other=0.0).to(tl.float32)
        mean_square = tl.sum(first * first + second * second, axis=1, keep_dims=True) / head_dim
        inverse = tl.rsqrt(mean_square + eps)
        # Rounded where the reference's rms_norm rounds.
        normed_first = (first * inverse).to(dtype).to(tl.float32) * tl.where(is_query, query_first, key_first)
        normed_second = (second * inverse).to(dtype).to(tl.float32) * tl.where(is_query, query_second, key_second)
        first = tl.where(is_value, first, normed_first.to(dtype).to(tl.float32))
        second = tl.where(is_value, second, normed_second.to(dtype).to(tl.float32))

    cos = tl.load(cosines + token * half + pair, mask=in_half, other=0.0)
    sin = tl.load(sines + token * half + pair, mask=in_half, other=0.0)
    turned_first = tl.where(is_value, first, first * cos - second * sin)
    turned_second = tl.where(is_value, second, second * cos + first * sin)

    target = query + (token * heads + head) * head_dim + pair
    tl.store(target, turned_first.to(dtype), mask=is_query & in_half)
    tl.store(target + half, turned_second.to(dtype), mask=is_query & in_half)

    slot = tl.load(slots + token)
    if slot >= 0:
        is_key = (head >= heads) & (head < heads + kv_heads)
        kv_head = head - heads - tl.where(is_value, kv_heads, 0)
        row = ((slot // block_size).to(tl.int64) * kv_heads + kv_head) * block_size + slot % block_size
        if key_scales is not None:
            largest = tl.max(tl.maximum(tl.abs(turned_first), tl.abs(turned_second)), axis=1, keep_dims=True)
            scale = tl.where(largest > 0.0, tl.div_rn(largest, 448.0), 1.0)
            turned_first = _round_to_e4m3(tl.div_rn(turned_first, scale))
            turned_second = _round_to_e4m3(tl.div_rn(turned_second, scale))
            tl.store(key_scales + row, scale, mask=is_key)
            tl.store(value_scales + row, scale, mask=is_value)
        cached_first = turned_first.to(key_cache.dtype.element_ty)
        cached_second = turned_second.to(key_cache.dtype.element_ty)
        place = row * head_dim + pair
        tl.store(key_cache + place, cached_first, mask=is_key & in_half)
        tl.store(key_cache + place + half, cached_second, mask=is_key & in_half)
        tl.store(value_cache + place, cached_first, mask=is_value & in_half)
        tl.store(value_cache + place + half, cached_second, mask=is_value & in_half)


def _tile(head_dim: int) -> dict[str, int]:
    """The constants for a head size; half a head is UNIT times the kernel's half_units."""
    padded_half = max(triton.next_power_of_2(head_dim // 2), 32)
    return {"UNIT": 8 if head_dim % 16 == 0 else 4, "PADDED_HALF": padded_half, "TILE": _PAIRS // padded_half}


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
    """Norms and rotates queries and keys and stores keys and values in the paged cache, in one launch.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], all queries, then all keys, then all values.
        cosines, sines: float32 [tokens, head_dim / 2], of the angles of the pairs (i, i + head_dim / 2).
        slots: int32 [tokens], block * block_size + offset; nothing is stored for a negative one.
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], written; float8_e4m3fn with scales, else of
            qkv's type. head_dim is a multiple of 8.
        norm: weight of the queries' rms_norm and of the keys', [head_dim] each, and eps; over each head, before the
            rotation.
        key_scales, value_scales: float32 [blocks, kv_heads, block_size], written: an entry is fp8 * scale, and the
            scale is a vector's largest entry over 448.

    Returns:
        The queries, [tokens, heads, head_dim] in qkv's type. The rotation is float32 and rounded once.

    Raises:
        ValueError: head_dim is not a multiple of 8, or a tensor is not contiguous.

    Source: Su et al. 2021, in the half-split form of GPT-NeoX; Kwon et al. 2023 (paged cache).
    """
    tokens, (block_size, head_dim) = len(qkv), key_cache.shape[2:]
    if head_dim % 8:
        raise ValueError(f"head_dim={head_dim}: must be a multiple of 8")
    for name, tensor in {"qkv": qkv, "key_cache": key_cache, "value_cache": value_cache}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} with strides {tensor.stride()}: must be contiguous")
    query = qkv.new_empty(tokens, heads, head_dim)
    if tokens == 0:
        return query
    # Without norms any pointer will do for their weights: one compiled kernel serves both kinds of model.
    query_weight, key_weight, eps = norm if norm is not None else (qkv, qkv, 0.0)
    tile = _tile(head_dim)
    _rotate_and_store[(tokens, triton.cdiv(heads + 2 * kv_heads, tile["TILE"]))](
        qkv,
        cosines,
        sines,
        slots,
        query,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        query_weight,
        key_weight,
        eps,
        int(norm is not None),
        heads,
        kv_heads,
        head_dim // 2 // tile["UNIT"],
        block_size,
        **tile,
        num_warps=_NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return query


def variants() -> Iterator[Variant]:
    """Of half a head only the padded size is compiled in: 32 for heads of 64; 64 for 80, 96 and 128; 128 for 256."""
    for head_dim in (64, 128, 256):
        tile = _tile(head_dim)
        for dtype in ("bf16", "fp16", "fp32"):
            signature = dict.fromkeys(["qkv", "query", "query_weight", "key_weight"], f"*{dtype}")
            signature |= {"cosines": "*fp32", "sines": "*fp32", "slots": "*i32", "eps": "fp32"}
            signature |= dict.fromkeys(_INTEGERS, "i32")
            caches, scales = ("key_cache", "value_cache"), ("key_scales", "value_scales")
            for quantized in (False, True):
                yield Variant(
                    name=f"half{tile['PADDED_HALF']} {dtype}" + (" fp8" if quantized else ""),
                    kernel=_rotate_and_store,
                    signature=signature
                    | dict.fromkeys(caches, "*fp8e4nv" if quantized else f"*{dtype}")
                    | (dict.fromkeys(scales, "*fp32") if quantized else {}),
                    constants=tile | ({} if quantized else dict.fromkeys(scales)),
                    num_warps=_NUM_WARPS,
                    num_stages=1,
                    min_capability=FP8_CAPABILITY if quantized else 80,
                )
