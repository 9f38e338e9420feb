"""Paged attention in Triton's interpreter against float64, with NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu import attention

FP8 = torch.float8_e4m3fn
FEW, MANY = 1, 64
"""Multiprocessors: so few that no keys are split, or so many that all are that can be."""


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaNs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests of (tokens, context), and caches that hold NaN but for the keys that they see."""

    requests: list[tuple[int, int]]
    window: int | None
    query: Tensor
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    block_tables: Tensor
    table_rows: Tensor
    truth: Tensor
    """[tokens, heads, head_dim] in float64; NaN for requests without context, which are padding."""

    @property
    def query_start(self) -> Tensor:
        return torch.tensor([0, *np.cumsum([tokens for tokens, _ in self.requests])], dtype=torch.int32)

    def attend(self, *, num_sms: int = FEW, max_context_len: int | None = None) -> Tensor:
        contexts = [context for _, context in self.requests]
        return attention.paged_attention(
            self.query,
            self.keys,
            self.values,
            self.block_tables,
            self.table_rows,
            self.query_start,
            torch.tensor(contexts, dtype=torch.int32),
            query_lens=np.array([tokens for tokens, _ in self.requests]),
            scale=self.query.shape[2] ** -0.5,
            sliding_window=self.window,
            max_context_len=max_context_len or max(contexts),
            num_sms=num_sms,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
        )

    def of(self, chosen: list[int]) -> Batch:
        """Some of the requests, in another order."""
        spans = [slice(*span) for span in pairwise(self.query_start.tolist())]
        tokens = torch.cat([torch.arange(len(self.query))[spans[request]] for request in chosen])
        return replace(
            self,
            requests=[self.requests[request] for request in chosen],
            query=self.query[tokens],
            table_rows=self.table_rows[chosen],
            truth=self.truth[tokens],
        )


def draw(
    requests: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    fp8: bool = False,
    size: float = 1.0,
) -> Batch:
    """Random queries, keys and values, these of a standard deviation of `size`."""
    generator = torch.Generator().manual_seed(7)
    used = [-(-context // block_size) for _, context in requests]
    num_blocks, rows = sum(used) + 1, len(requests) + 2
    # Block 0 holds nothing but NaN, and the tables name it wherever a request has no block.
    blocks = torch.randperm(num_blocks - 1, generator=generator) + 1
    block_tables = torch.zeros(rows, max(used) + 2, dtype=torch.int32)
    table_rows = torch.randperm(rows, generator=generator)[: len(requests)].int()
    shape = (num_blocks, kv_heads, block_size, head_dim)
    caches = [size * torch.randn(shape, generator=generator) for _ in range(2)]
    scales: list[Tensor | None] = [None, None]
    if fp8:
        quantized = [reference.quantize_fp8(cache) for cache in caches]
        caches, scales = [cache for cache, _ in quantized], [scale for _, scale in quantized]
    else:
        caches = [cache.to(dtype) for cache in caches]
    wide = [
        cache.double() if scale is None else cache.double() * scale.double()[..., None]
        for cache, scale in zip(caches, scales, strict=True)
    ]
    tokens = sum(count for count, _ in requests)
    query = torch.randn(tokens, kv_heads * group, head_dim, generator=generator).to(dtype)
    truth = torch.full(query.shape, torch.nan, dtype=torch.float64)
    seen = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    start = 0
    for (count, context), row, blocks_used in zip(requests, table_rows.tolist(), used, strict=True):
        span, start = slice(start, start + count), start + count
        if context == 0:
            continue
        own, blocks = blocks[:blocks_used], blocks[blocks_used:]
        truth[span] = reference.paged_attention(
            query[span].double(),
            *wide,
            own[None],
            torch.tensor([0, count]),
            torch.tensor([context]),
            scale=head_dim**-0.5,
            sliding_window=window,
        )
        first = max(context - count + 1 - window, 0) if window else 0
        positions = torch.arange(first, context)
        seen[own[positions // block_size], positions % block_size] = True
        block_tables[row, :blocks_used] = own
        # A block that the window has left behind is another request's by now.
        block_tables[row, : first // block_size] = 0
    for cache, scale in zip(caches, scales, strict=True):
        (cache.view(torch.uint8) if fp8 else cache).masked_fill_(~seen[:, None, :, None], 0x7F if fp8 else torch.nan)
        if scale is not None:
            scale.masked_fill_(~seen[:, None, :], torch.nan)
    return Batch(
        requests=requests,
        window=window,
        query=query,
        keys=caches[0],
        values=caches[1],
        key_scales=scales[0],
        value_scales=scales[1],
        block_tables=block_tables,
        table_rows=table_rows,
        truth=truth,
    )


class Launches:
    """Stands for a kernel and keeps the grids that it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.grids: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches(attention.attention_kernel)
    monkeypatch.setattr(attention, "attention_kernel", launches)
    return launches


def assert_true(output: Tensor, batch: Batch, tolerance: float | None = None) -> None:
    """Equal to the truth, NaN where that is: for float32 to its last digits, for float16 nearly so."""
    assert output.dtype == batch.query.dtype
    tolerance = tolerance or (3e-6 if output.dtype == torch.float32 else 2e-3)
    torch.testing.assert_close(output.double(), batch.truth, rtol=0.0, atol=tolerance, equal_nan=True)


MIXED = [(1, 37), (70, 90), (5, 64), (1, 1), (33, 33), (2, 130), (1, 16), (1, 97)]
"""Decodes, drafts, and prompts whole and in part."""


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("window", [None, 1, 24, 65])
def test_mixed_batch(block_size: int, window: int | None, launches: Launches) -> None:
    batch = draw(MIXED, block_size=block_size, window=window)
    assert_true(batch.attend(), batch)
    assert len(launches.grids) == 2


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(("head_dim", "dtype"), [(32, torch.float32), (16, torch.float16)])
def test_groups_of_query_heads(group: int, head_dim: int, dtype: torch.dtype) -> None:
    batch = draw([(1, 40), (3, 35), (8, 70), (61, 100)], group=group, head_dim=head_dim, dtype=dtype)
    assert_true(batch.attend(), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    batch = draw([(40, 50), (1, 70)], kv_heads=1, head_dim=head_dim, dtype=dtype)
    assert_true(batch.attend(num_sms=MANY), batch)


@pytest.mark.parametrize("window", [None, 2000])
def test_long_contexts_are_split(window: int | None, launches: Launches) -> None:
    batch = draw([(1, 3333), (4, 1500), (1, 100), (1, 257), (2, 2048)], kv_heads=1, window=window)
    assert_true(batch.attend(num_sms=MANY), batch)
    ((kv_heads, tiles, splits),) = launches.grids
    assert (kv_heads, tiles) == (1, 5)
    assert splits == 8 if window else splits > 8


def test_a_chunk_of_a_long_prompt_is_split(launches: Launches) -> None:
    batch = draw([(50, 2900), (1, 5), (41, 41)], kv_heads=1, dtype=torch.float16)
    assert_true(batch.attend(num_sms=MANY), batch)
    assert [splits for *_, splits in launches.grids][1] == 3


@pytest.mark.parametrize(("request_", "dtype"), [((8, 1027), torch.float32), ((50, 2058), torch.float16)])
def test_a_split_that_some_tokens_see_nothing_of(request_: tuple[int, int], dtype: torch.dtype) -> None:
    """The last one: it has the last tile of keys alone, and the tokens span two."""
    batch = draw([request_], kv_heads=1, dtype=dtype)
    assert_true(batch.attend(num_sms=MANY), batch)


def test_many_requests_around_a_prompt() -> None:
    batch = draw([(1, 9 + i) for i in range(20)] + [(200, 210)] + [(1, 2)] * 20 + [(129, 129)], kv_heads=1)
    assert_true(batch.attend(), batch)


def test_kinds_that_are_not_there_are_not_launched(launches: Launches) -> None:
    draw([(1, 20), (8, 20)]).attend()
    draw([(20, 20)]).attend()
    assert launches.grids == [(2, 2, 1), (2, 2, 1)]


def test_nothing_is_written_for_padding() -> None:
    """A captured graph's batch: the longest context is not known, so that splits are as for the longest of all."""
    batch = draw([(1, 700), (1, 33), *[(1, 0)] * 6])
    assert batch.truth[2:].isnan().all()
    assert_true(batch.attend(num_sms=MANY, max_context_len=100_000), batch)


def test_no_requests() -> None:
    batch = draw([(1, 1)])
    assert batch.of([0]).attend().shape == (1, 4, 16)
    empty = replace(batch, requests=[], query=batch.query[:0], table_rows=batch.table_rows[:0])
    assert empty.attend(max_context_len=1).shape == (0, 4, 16)


def test_strided_query() -> None:
    batch = draw(MIXED)
    qkv = torch.full((len(batch.query), 4 + 2 * 2, 16), torch.nan)
    qkv[:, :4] = batch.query
    strided = replace(batch, query=qkv[:, :4])
    assert torch.equal(strided.attend(), batch.attend())


@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_sms", [FEW, MANY])
def test_fp8_caches(dtype: torch.dtype, size: float, num_sms: int) -> None:
    """Values of 1e-4 have scales of 1e-6, where float16 has a digit or two."""
    batch = draw([(1, 700), (5, 64), (40, 60), (1, 1)], dtype=dtype, window=600, fp8=True, size=size)
    assert_true(batch.attend(num_sms=num_sms), batch, size * (3e-6 if dtype == torch.float32 else 3e-3))


@pytest.mark.parametrize("num_sms", [FEW, MANY])
def test_a_request_has_the_same_bits_alone_as_beside_others(
    num_sms: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its keys are split as often: which depends on the number of programs alone."""
    monkeypatch.setattr(attention, "num_splits", lambda programs, slots, most: min(3, most) if num_sms == MANY else 1)
    requests = [(1, 600), (1, 700), (7, 650), (60, 660)]
    batch = draw(requests, kv_heads=1)
    together = batch.of([2, 0, 3, 1]).attend(num_sms=num_sms)
    parts = dict(zip([2, 0, 3, 1], together.split([7, 1, 60, 1]), strict=True))
    for request in range(len(requests)):
        assert torch.equal(batch.of([request]).attend(num_sms=num_sms, max_context_len=700), parts[request])
    assert {splits for *_, splits in launches.grids} <= ({1} if num_sms == FEW else {2, 3})


def test_a_token_has_the_same_bits_decoded_as_verified() -> None:
    verified = draw([(5, 100)])
    decoded = replace(verified, requests=[(1, 98)], query=verified.query[2:3])
    assert torch.equal(decoded.attend(), verified.attend()[2:3])


def test_masked_logits_may_be_the_only_large_ones() -> None:
    """A row's maximum starts low enough for logits of -10,000."""
    batch = draw([(40, 40), (1, 33)])
    keys = torch.where(batch.keys.isnan(), batch.keys, 1e4)
    query = torch.full_like(batch.query, -0.25)
    ordinary = replace(batch, keys=torch.zeros_like(keys).where(~keys.isnan(), keys), query=query)
    torch.testing.assert_close(replace(batch, keys=keys, query=query).attend(), ordinary.attend())


def test_what_it_refuses() -> None:
    batch = draw([(1, 20)])
    with pytest.raises(ValueError, match=r"heads=3: must be a multiple of kv_heads, which is 2"):
        replace(batch, query=batch.query[:, :3]).attend()
    with pytest.raises(ValueError, match=r"heads=66: must be at most 32 times kv_heads, which is 2"):
        replace(batch, query=torch.zeros(1, 66, 16)).attend()
    with pytest.raises(ValueError, match=r"query with strides \(68, 17, 1\): must be multiples of 8"):
        replace(batch, query=torch.zeros(1, 4, 17)[:, :, :16]).attend()
    with pytest.raises(ValueError, match=r"caches with strides .*: must be contiguous"):
        replace(batch, keys=batch.keys.transpose(1, 2).contiguous().transpose(1, 2)).attend()


def test_splits_fill_the_device() -> None:
    slots = 264
    assert attention.num_splits(8, slots, 128) == 30  # 240 of 264 at once
    assert attention.num_splits(8, slots, 3) == 3
    assert attention.num_splits(160, slots, 128) == 3  # 480 in two waves; 320 would take as many
    assert attention.num_splits(250, slots, 128) == 1
    assert attention.num_splits(2048, slots, 128) == 1
    assert attention.num_splits(288, slots, 128) == 5  # 1440 in six waves, where 288 would take two


def test_a_long_context_among_many_is_split() -> None:
    assert attention.balancing_splits(64, 264, 8192) == 1
    assert attention.balancing_splits(64, 264, 100_000) == 13
    assert attention.balancing_splits(500, 264, 100_000) == 2
    assert attention.balancing_splits(10_000, 264, 100_000) == 0


@pytest.mark.parametrize("num_decodes", [1, 255, 1023])
@pytest.mark.parametrize("prompt_len", [9, 20, 60, 200])
def test_what_splits_leave_is_bounded_in_mixed_batches(num_decodes: int, prompt_len: int) -> None:
    """One prompt among many decodes, over long contexts, has tiles of its own alone."""
    for place in (0, num_decodes // 2, num_decodes):
        query_lens = np.ones(num_decodes + 1, np.int64)
        query_lens[place] = prompt_len
        launches = attention.plan_launches(
            query_lens,
            heads=32,
            kv_heads=8,
            head_dim=128,
            dtype=torch.bfloat16,
            sliding_window=None,
            max_context_len=131_072,
            num_sms=132,
            device=torch.device("cpu"),
        )
        for launch in launches:
            rows = launch.tiles * launch.tile_tokens * 32
            assert launch.splits == 1 or launch.splits * rows * 128 * 4 <= 128 << 20
        long = launches[-1]
        assert long.first_tile >= 0
        assert long.splits > 1
        assert long.tiles <= prompt_len // long.tile_tokens + 2
