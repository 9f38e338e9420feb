"""Every Triton kernel against float64, or bit for bit where its arithmetic is exact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.gpu.activation import silu_and_mul
from kernels.gpu.embedding import embedding
from kernels.gpu.kv_write import rotate_and_store
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.step_input import gather_step, store_tokens, write_segments
from tests.gpu.attention import attention, fp8_attention, long_attention
from tests.gpu.check import Check, Setup
from tests.gpu.compare import NAMES, dtypes, equal, near, poisoned
from tests.gpu.report import Row
from tests.gpu.sampling import prompt_logprobs, sampling

EPS = 1e-5


def norms(setup: Setup) -> Iterator[Row]:
    shapes = [(1, 64), (3, 80)] if setup.tiny else [(1, 64), (3, 80), (1, 4096), (257, 4096), (5, 16_384), (8192, 1024)]
    generator = setup.generator(1)
    for dtype in dtypes(setup):
        for shape in shapes:
            x, residual = (torch.randn(shape, generator=generator, device=setup.device).to(dtype) for _ in range(2))
            weight = (1 + 0.2 * torch.randn(shape[1], generator=generator, device=setup.device)).to(dtype)
            name = f"{NAMES[dtype]} {list(shape)}"
            with poisoned():
                normed = rms_norm(x, weight, EPS)
                added, total = add_rms_norm(x, residual, weight, EPS)
            yield near(f"rms_norm {name}", normed, _rms_norm(x, weight))
            yield equal(f"add_rms_norm, sum, {name}", total, x + residual)
            yield near(f"add_rms_norm {name}", added, _rms_norm(x + residual, weight))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def activation(setup: Setup) -> Iterator[Row]:
    shapes = [(1, 48), (3, 160)] if setup.tiny else [(1, 48), (3, 160), (1, 28_672), (255, 28_672), (8192, 6144)]
    generator = setup.generator(2)
    for dtype in dtypes(setup):
        for shape in shapes:
            x = (3 * torch.randn(shape, generator=generator, device=setup.device)).to(dtype)
            with poisoned():
                out = silu_and_mul(x)
            gate, up = x.double().chunk(2, dim=-1)
            yield near(f"silu_and_mul {NAMES[dtype]} {list(shape)}", out, F.silu(gate) * up)


def embeddings(setup: Setup) -> Iterator[Row]:
    shapes = [(1, 50, 32), (7, 50, 80)] if setup.tiny else [(1, 128_256, 4096), (1000, 151_936, 1024), (7, 50, 80)]
    generator = setup.generator(3)
    for dtype in dtypes(setup):
        for tokens, vocab, size in shapes:
            table = torch.randn(vocab, size, generator=generator, device=setup.device).to(dtype)
            ids = torch.randint(vocab, (tokens,), generator=generator, device=setup.device, dtype=torch.int32)
            ids[-1] = vocab - 1
            with poisoned():
                out = embedding(ids, table)
            yield equal(f"embedding {NAMES[dtype]} {[tokens, vocab, size]}", out, table[ids.long()])


def kv_write(setup: Setup) -> Iterator[Row]:
    """Queries are returned, keys and values reach their slots, and nothing else in the cache is touched."""
    heads = [(4, 2, 16), (3, 1, 80)] if setup.tiny else [(32, 8, 128), (32, 8, 64), (7, 1, 80), (9, 3, 96), (8, 4, 256)]
    generator = setup.generator(4)
    for dtype in dtypes(setup):
        for num_heads, kv_heads, head_dim in heads:
            for normed, quantized, block_size in ((False, False, 16), (True, False, 32), (True, True, 16)):
                if quantized and setup.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
                    continue
                for tokens in (1, 5) if setup.tiny else (1, 333):
                    what = f"{'normed ' if normed else ''}{'fp8 ' if quantized else ''}"
                    name = f"{what}{NAMES[dtype]} {[tokens, num_heads, kv_heads, head_dim]} block {block_size}"
                    shape = (tokens, num_heads, kv_heads, head_dim, block_size)
                    yield from _kv_write(setup, generator, name, dtype, shape, normed=normed, quantized=quantized)


def _kv_write(
    setup: Setup,
    generator: torch.Generator,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    *,
    normed: bool,
    quantized: bool,
) -> Iterator[Row]:
    tokens, heads, kv_heads, head_dim, block_size = shape
    device = setup.device

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = 100 * random(tokens, head_dim // 2)
    cosines, sines = angles.cos(), angles.sin()
    norm = ((1 + 0.2 * random(head_dim)).to(dtype), (1 + 0.2 * random(head_dim)).to(dtype), EPS) if normed else None
    blocks = 2 + tokens // block_size * 2
    slots = torch.randperm(blocks * block_size, generator=generator, device=device)[:tokens].to(torch.int32)
    slots[tokens // 2] = -1
    stored = slots >= 0
    cache_shape = (blocks, kv_heads, block_size, head_dim)
    cache_type = torch.float8_e4m3fn if quantized else dtype
    caches = [torch.full(cache_shape, 7.0, device=device).to(cache_type) for _ in range(2)]
    scales = [torch.full(cache_shape[:3], 3.0, device=device) for _ in range(2)] if quantized else [None, None]
    with poisoned():
        query = rotate_and_store(
            qkv,
            cosines,
            sines,
            slots,
            *caches,
            heads=heads,
            kv_heads=kv_heads,
            norm=norm,
            key_scales=scales[0],
            value_scales=scales[1],
        )
    wide = qkv.double().view(tokens, heads + 2 * kv_heads, head_dim)
    queries, keys, values = wide.split([heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        queries, keys = _rms_norm(queries, norm[0]), _rms_norm(keys, norm[1])
    yield near(f"rotate_and_store, queries, {name}", query, _rotated(queries, cosines, sines))
    for kind, cache, scale, truth in zip(
        ("keys", "values"), caches, scales, (_rotated(keys, cosines, sines), values), strict=True
    ):
        at = slots[stored].long()
        rows = cache.double().transpose(1, 2).flatten(0, 1)  # [slots, kv_heads, head_dim]
        untouched = torch.ones(len(rows), dtype=torch.bool, device=device)
        untouched[at] = False
        yield equal(f"rotate_and_store, other {kind}, {name}", rows[untouched], torch.full_like(rows[untouched], 7.0))
        found = rows[at]
        if scale is not None:
            found = found * scale.double().transpose(1, 2).flatten(0, 1)[at][..., None]
        if stored.any():
            # e4m3 has three bits behind the leading one; a relative step of 1/16 is about 0.025 over random numbers.
            limit = 0.04 if quantized else None
            yield near(f"rotate_and_store, {kind}, {name}", found.to(dtype), truth[stored], limit)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cosines.double()[:, None], sines.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def step_input(setup: Setup) -> Iterator[Row]:
    """The tables' kernels, bit for bit."""
    device, generator = setup.device, setup.generator(5)
    sizes = [(1, 1, 0), (3, 2, 1)] if setup.tiny else [(1, 1, 0), (13, 900, 0), (200, 1, 56), (255, 1, 1)]
    rows, columns, block_size = (4, 64, 16) if setup.tiny else (256, 4096, 16)
    table = torch.randint(1 << 17, (rows, columns), generator=generator, device=device, dtype=torch.int32)
    blocks = torch.randperm(rows * columns // block_size, generator=generator, device=device)
    block_tables = blocks.to(torch.int32).view(rows, -1)
    for requests, longest, padding in sizes:
        order = torch.randperm(rows, generator=generator, device=device)[:requests].to(torch.int32)
        lengths = torch.randint(1, longest + 1, (requests,), generator=generator, device=device)
        computed = (torch.rand(requests, generator=generator, device=device) * (columns - lengths)).to(torch.int32)
        starts = F.pad(torch.cat([lengths, lengths.new_ones(padding)]).cumsum(0), (1, 0)).to(torch.int32)
        order, computed = F.pad(order, (0, padding)), F.pad(computed, (0, padding))
        found: list[Tensor] = []
        truth: list[Tensor] = []
        for gather, arrays in ((gather_step, found), (reference.gather_step, truth)):
            count = int(starts[-1])
            sizes_out = (count + 3, count + 3, count + 3, requests + padding + 3)
            arrays += [torch.full((size,), -77, device=device, dtype=torch.int32) for size in sizes_out]
            gather(
                table,
                block_tables,
                order,
                starts,
                computed,
                *arrays,
                num_requests=requests,
                padded=requests + padding,
                block_size=block_size,
                max_query_len=longest,
            )
        for kind, one, other in zip(("token ids", "positions", "slots", "contexts"), found, truth, strict=True):
            yield equal(f"gather_step, {kind}, {[requests, longest, padding]}", one, other)

    segments = min(rows, 40)
    order = torch.randperm(rows, generator=generator, device=device)[:segments].to(torch.int32)
    lengths = torch.randint(columns // 2, (segments,), generator=generator, device=device)
    lengths[0] = 0
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    at = (torch.rand(segments, generator=generator, device=device) * (columns - lengths)).to(torch.int32)
    values = torch.randint(1 << 17, (int(starts[-1]),), generator=generator, device=device, dtype=torch.int32)
    one, other = table.clone(), table.clone()
    write_segments(one, order, at, starts, values)
    reference.write_segments(other, order, at, starts, values)
    yield equal("write_segments", one, other)
    at[0] = columns  # beyond the row: left out
    store_tokens(one, order, at, values[:segments])
    reference.store_tokens(other, order.long(), at.long(), values[:segments])
    yield equal("store_tokens", one, other)


CHECKS: dict[str, Check] = {
    **{f"attention {name}": partial(attention, dtype=dtype) for dtype, name in NAMES.items()},
    "fp8 attention": fp8_attention,
    "long attention": long_attention,
    "sampling": sampling,
    "prompt logprobs": prompt_logprobs,
    "norms": norms,
    "activation": activation,
    "embedding": embeddings,
    "kv write": kv_write,
    "step input": step_input,
}
"""The slowest first: they run side by side."""
