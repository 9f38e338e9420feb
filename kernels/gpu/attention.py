"""Attention over paged keys and values on a GPU, for prompts, decodes and drafts in one batch.

At most two launches of one kernel serve a batch: "short" requests, whose tokens times the query heads of a KV head fit
a small tile, are bound by memory and split their keys between programs; "long" ones are bound by arithmetic and take
large tiles. Where keys were split a second kernel follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.gpu.attention_kernels import ATTENTION_INTEGERS, COMBINE_INTEGERS, TABLES, attention_kernel, combine_kernel
from kernels.gpu.variants import FP8_CAPABILITY, Variant

_UNLIMITED = 2**31 - 1
_MAX_SPLITS = 128
_BALANCED_KEYS = 8192
_BALANCING_WAVES = 4
_MANY_WAVES = 4
_PARTIAL_BYTES = 128 << 20
"""Most memory for what the splits of one launch leave to be joined."""
_COMBINE_WARPS = 4
_COMBINE_ENTRIES = 4096
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Tile:
    """What the kernel is compiled for, and how finely its work may be cut.

    Attributes:
        rows: queries of a tile: tokens times the query heads of a KV head.
        keys: that it takes at a time.
        programs: that a multiprocessor has room for at once.
        split_keys: fewest that are worth a split: reading them takes several times as long as combining a split.
        shared_bytes: that the device must offer, where that is more than every device does (99 KiB).
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    split_keys: int
    shared_bytes: int = 0


def _short_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """For decodes and drafts: one size, so that decoding and verifying a token give the same bits.

    A multiprocessor must have some 40 KB on their way to keep memory busy: two programs with two tiles each in flight.
    """
    if dtype == torch.float32:
        # Three TF32 products for each of float32 take three times the registers.
        if head_dim <= 64:
            return Tile(rows=32, keys=32, num_warps=4, num_stages=2, programs=2, split_keys=256)
        if head_dim <= 128:
            return Tile(rows=16, keys=32, num_warps=4, num_stages=2, programs=2, split_keys=256)
        return Tile(rows=16, keys=16, num_warps=8, num_stages=2, programs=1, split_keys=256)
    keys = 64 if head_dim <= 128 else 32
    return Tile(rows=32, keys=keys, num_warps=4, num_stages=3, programs=2, split_keys=256)


def _long_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """For prompts: as many rows as registers hold, because each tile of keys comes from the L2 cache once for all."""
    if dtype == torch.float32:
        return _short_tile(head_dim, dtype)
    if head_dim <= 128:
        return Tile(rows=128, keys=64, num_warps=8, num_stages=3, programs=1, split_keys=1024)
    return Tile(rows=64, keys=32, num_warps=8, num_stages=3, programs=1, split_keys=1024, shared_bytes=100 << 10)


def max_group(head_dim: int, dtype: torch.dtype) -> int:
    """Most query heads that may share a KV head."""
    return _short_tile(head_dim, dtype).rows


@lru_cache
def _shared_bytes(device: torch.device) -> int:
    """Most shared memory that one program can have."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(properties.shared_memory_per_block_optin)
    return 1 << 20


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel: for the requests that have `shortest` to `longest` tokens.

    Attributes:
        tiles: of queries, each of `tile_tokens` tokens of one request. splits: programs that share a tile's keys.
        first_tile: the number of the first one; negative where each request is a tile.
    """

    tile: Tile
    tiles: int
    splits: int
    tile_tokens: int
    first_tile: int
    shortest: int
    longest: int


@lru_cache(maxsize=4096)
def num_splits(programs: int, slots: int, max_splits: int) -> int:
    """How many programs to split the keys of a tile between, so that the device is busy.

    The fewest that keep at least nine tenths as many slots busy as the best number does, over all waves of programs;
    one where the tiles alone nearly fill a wave, or fill many.

    Args:
        programs: without splits. slots: programs that the device runs at once. max_splits: most that are worth it.
    """
    if 0.8 * slots <= programs <= slots or programs >= _MANY_WAVES * slots:
        return 1
    waves = [programs * splits / slots for splits in range(1, max_splits + 1)]
    busy = [count / math.ceil(count) for count in waves]
    return next(splits for splits, share in enumerate(busy, 1) if share >= 0.9 * max(busy))


def balancing_splits(programs: int, slots: int, max_context_len: int) -> int:
    """Splits that keep one long context among short ones from being the last to end.

    Those of a short context end at once. That is not free either, hence a limit on their number.
    """
    return min(-(-max_context_len // _BALANCED_KEYS), _BALANCING_WAVES * slots // programs)


def plan_launches(
    query_lens: NDArray[np.int64],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    max_context_len: int,
    num_sms: int,
    device: torch.device,
) -> list[Launch]:
    """The launches for a batch, the same for all layers of one shape and window. Arguments as of paged_attention.

    Raises:
        ValueError: heads is not a multiple of kv_heads, or more of them than a tile has rows (16 or 32) share a KV
            head.
    """
    group = heads // kv_heads
    short, long = _short_tile(head_dim, dtype), _long_tile(head_dim, dtype)
    if long.shared_bytes > _shared_bytes(device):
        long = short
    if heads % kv_heads:
        raise ValueError(f"heads={heads}: must be a multiple of kv_heads, which is {kv_heads}")
    if group > short.rows:
        raise ValueError(f"heads={heads}: must be at most {short.rows} times kv_heads, which is {kv_heads}")
    window = _UNLIMITED if sliding_window is None else sliding_window
    row_bytes = kv_heads * group * _padded(head_dim) * 4

    def splits_of(tile: Tile, programs: int, tiles: int, tile_tokens: int, *, balanced: bool) -> int:
        keys, slots = min(max_context_len, window + tile_tokens), num_sms * tile.programs
        most = min(
            -(-keys // tile.split_keys), _MAX_SPLITS, max(_PARTIAL_BYTES // (tiles * tile_tokens * row_bytes), 1)
        )
        splits = num_splits(programs, slots, most)
        return max(splits, min(balancing_splits(programs, slots, keys), most)) if balanced else splits

    launches = []
    short_tokens = short.rows // group
    is_short = query_lens <= short_tokens
    if is_short.any():
        tiles, tokens = len(query_lens), int(query_lens[is_short].max())
        splits = splits_of(short, tiles * kv_heads, tiles, tokens, balanced=True)
        launches.append(Launch(short, tiles, splits, tokens, -1, 1, short_tokens))
    if not is_short.all():
        tokens = long.rows // group
        # As in the kernel; tiles before the first long request and behind the last one are left out.
        begins = np.concatenate(([0], np.cumsum(query_lens))) // tokens + np.arange(len(query_lens) + 1)
        requests = np.flatnonzero(~is_short)
        first = int(begins[requests[0]])
        tiles = int(begins[requests[-1] + 1]) - first
        programs = int(np.sum(-(-query_lens[requests] // tokens))) * kv_heads
        splits = splits_of(long, programs, tiles, tokens, balanced=False)
        launches.append(Launch(long, tiles, splits, tokens, first, short_tokens + 1, _UNLIMITED))
    return launches


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    query_lens: NDArray[np.int64],
    scale: float,
    sliding_window: int | None = None,
    max_context_len: int,
    num_sms: int,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    launches: list[Launch] | None = None,
) -> Tensor:
    """Causal attention of a flat batch over paged keys and values; kernels.reference.paged_attention is its truth.

    A request's result depends on the others only through the number of programs that its keys are split between,
    which follows from the arguments on the host: in a captured graph it is fixed.

    Args:
        query: [tokens, heads, head_dim], strides multiples of 8 and the last dimension contiguous.
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], of query's type, or float8_e4m3fn with scales.
            block_size is a power of two.
        block_tables: int32 [rows, max_blocks]; entries for positions that no token sees are not read, nor their keys.
        table_rows: int32 [requests], a request's row in block_tables.
        query_start: int32 [requests + 1], where each request's tokens start in `query`.
        context_lens: int32 [requests], keys up to a request's last token, itself included; of a request with 0
            nothing is written.
        query_lens: [requests], query_start's differences, on the host.
        scale: factor on the logits, greater than 0.
        sliding_window: most keys that a token sees, itself included; None is all before it.
        max_context_len: no context is longer.
        num_sms: the device's multiprocessors.
        key_scales, value_scales: float32 [blocks, kv_heads, block_size], factors of the cached entries.
        launches: plan_launches of the same arguments, where the caller has it.

    Returns:
        [tokens, heads, head_dim] in query's type; accumulation is float32.

    Raises:
        ValueError: as of plan_launches; a tensor's strides are not as above, or a cache is not contiguous.
    """
    (tokens, heads, head_dim), (kv_heads, block_size) = query.shape, key_cache.shape[1:3]
    if query.stride(2) != 1 or query.stride(0) % 8 or query.stride(1) % 8:
        raise ValueError(f"query with strides {query.stride()}: must be multiples of 8, and the last one 1")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError(f"caches with strides {key_cache.stride()} and {value_cache.stride()}: must be contiguous")
    if launches is None:
        launches = plan_launches(
            query_lens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=query.dtype,
            sliding_window=sliding_window,
            max_context_len=max_context_len,
            num_sms=num_sms,
            device=query.device,
        )
    group = heads // kv_heads
    output = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    inputs: dict[str, Any] = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "block_tables": block_tables,
        "table_rows": table_rows,
        "scale": scale,
        "token_stride": query.stride(0) // 8,
        "head_stride": query.stride(1) // 8,
        "table_stride": block_tables.stride(0),
        "block_shift": block_size.bit_length() - 1,
        "head_units": head_dim // 8,
    }
    for launch in launches:
        tile, rows, splits = launch.tile, launch.tile_tokens * group, launch.splits
        partials = launch.tiles * kv_heads * splits * rows if splits > 1 else 0
        work: dict[str, Any] = {
            "output": output,
            "partial_output": torch.empty((partials, _padded(head_dim)), dtype=torch.float32, device=query.device),
            "partial_lse": torch.empty(partials, dtype=torch.float32, device=query.device),
            "query_start": query_start,
            "context_lens": context_lens,
            "num_requests": len(query_lens),
            "group": group,
            "window": _UNLIMITED if sliding_window is None else sliding_window,
            "splits": splits,
            "min_share": tile.split_keys // tile.keys,
            "rows": rows,
            "first_tile": launch.first_tile,
            "shortest": launch.shortest,
            "longest": launch.longest,
        }
        attention_kernel[(kv_heads, launch.tiles, splits)](
            **inputs,
            **work,
            **_constants(head_dim, tile),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
        if splits > 1:
            combine_kernel[(kv_heads, launch.tiles, rows)](
                **work,
                head_dim=head_dim,
                tile_keys=tile.keys,
                **_combine_constants(head_dim),
                num_warps=_COMBINE_WARPS,
                num_stages=1,
                enable_fp_fusion=True,
            )
    return output


@lru_cache
def _padded(head_dim: int) -> int:
    return max(1 << (head_dim - 1).bit_length(), 16)


def _constants(head_dim: int, tile: Tile) -> dict[str, int]:
    padded_dim = _padded(head_dim)
    return {"PADDED_DIM": padded_dim, "FULL": head_dim == padded_dim, "ROWS": tile.rows, "KEYS": tile.keys}


def _combine_constants(head_dim: int) -> dict[str, int]:
    return {"PADDED_DIM": _padded(head_dim), "SPLITS": _COMBINE_ENTRIES // _padded(head_dim)}


_SPILL_BYTES = {
    # Compute capability 8.0 keeps the queries in registers as well.
    **dict.fromkeys(("d80 bf16 rows128", "d80 fp16 rows128", "d128 bf16 rows128", "d128 fp16 rows128"), 160),
    # For 10.0 the compiler would rather have three programs on a multiprocessor.
    **dict.fromkeys(("d64 bf16 rows32", "d64 fp16 rows32", "d128 bf16 rows32", "d128 fp16 rows32"), 16),
    **dict.fromkeys(("d80 bf16 rows32", "d80 fp16 rows32"), 80),
    "d256 fp32 rows16": 48,
    "d256 fp32 rows16 fp8": 544,
}
"""Of the variants that spill at all, as ptxas counts them."""


def variants() -> Iterator[Variant]:
    """Each tile for each type and kind of cache, and head sizes of 64, 80 and 96 (which are one), 128 and 256.

    Block size, group and window are numbers at run time.
    """
    for head_dim in (64, 80, 128, 256):
        for dtype, kind in _TYPES.items():
            tiles = dict.fromkeys((_short_tile(head_dim, dtype), _long_tile(head_dim, dtype)))
            for tile in tiles:
                for fp8 in (False, True):
                    pointers = dict.fromkeys(("output", "query"), f"*{kind}")
                    pointers |= dict.fromkeys(("partial_output", "partial_lse"), "*fp32") | dict.fromkeys(
                        TABLES, "*i32"
                    )
                    pointers |= dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv" if fp8 else f"*{kind}")
                    scales = ("key_scales", "value_scales")
                    pointers |= dict.fromkeys(scales, "*fp32") if fp8 else {}
                    name = f"d{head_dim} {kind} rows{tile.rows}" + (" fp8" if fp8 else "")
                    yield Variant(
                        name=name,
                        kernel=attention_kernel,
                        signature=pointers | dict.fromkeys(ATTENTION_INTEGERS, "i32") | {"scale": "fp32"},
                        constants=_constants(head_dim, tile) | ({} if fp8 else dict.fromkeys(scales)),
                        num_warps=tile.num_warps,
                        num_stages=tile.num_stages,
                        spill_bytes=_SPILL_BYTES.get(name, 0),
                        min_capability=FP8_CAPABILITY if fp8 else 80,
                    )
    for head_dim in (64, 128, 256):
        for kind in _TYPES.values():
            pointers = {"output": f"*{kind}"} | dict.fromkeys(("partial_output", "partial_lse"), "*fp32")
            pointers |= dict.fromkeys(("query_start", "context_lens"), "*i32")
            yield Variant(
                name=f"d{head_dim} {kind}",
                kernel=combine_kernel,
                signature=pointers | dict.fromkeys(COMBINE_INTEGERS, "i32"),
                constants=_combine_constants(head_dim),
                num_warps=_COMBINE_WARPS,
                num_stages=1,
            )
