"""The plain torch backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import torch_attention
from engine.attention.reference_attention import ReferenceAttention
from engine.attention.torch_attention import TorchAttention
from engine.protocols import KVCache
from tests.engine.attention.batches import random_batch

MIXED = [(5, 5), (40, 1), (1, 1), (33, 20), (17, 1), (64, 64), (16, 2), (200, 1), (47, 46), (31, 1)]
CLOSE = {"rtol": 0.0, "atol": 2e-6}


@pytest.mark.parametrize("window", [None, 1, 8, 16, 100])
@pytest.mark.parametrize("backend", [TorchAttention, ReferenceAttention])
def test_mixed_batch_equals_float64(backend, window):
    batch = random_batch(MIXED)
    attended = batch.attend(backend(), sliding_window=window)
    torch.testing.assert_close(attended.double(), batch.attend_naively(sliding_window=window), **CLOSE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 32, 16), (8, 1, 128, 16), (9, 3, 80, 8), (2, 2, 256, 1), (6, 2, 96, 7)],
)
def test_shapes_of_heads_and_blocks(heads, kv_heads, head_dim, block_size):
    batch = random_batch(MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    torch.testing.assert_close(batch.attend(TorchAttention()).double(), batch.attend_naively(), **CLOSE)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_types_stay_close_to_float64(dtype, tolerance):
    batch = random_batch(MIXED, dtype=dtype)
    attended = batch.attend(TorchAttention())
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.double(), batch.attend_naively(), rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("window", [None, 10, 70, 100, 150])
def test_chunks_longer_than_a_tile(window):
    requests = [(torch_attention.TILE * 2 + 90, torch_attention.TILE + 40), (torch_attention.TILE + 1,) * 2]
    batch = random_batch(requests, heads=2, kv_heads=1, head_dim=32)
    expected = batch.attend_naively(sliding_window=window)
    torch.testing.assert_close(batch.attend(TorchAttention(), sliding_window=window).double(), expected, **CLOSE)


def test_request_attends_alike_alone_and_in_a_batch():
    batch = random_batch(MIXED)
    together = batch.attend(TorchAttention())
    starts = batch.metadata.query_start.tolist()
    for request, (context, length) in enumerate(MIXED):
        alone = random_batch([(context, length)])
        rows = slice(starts[request], starts[request + 1])
        alone.query = batch.query[rows]
        alone.keys, alone.values = [batch.keys[request]], [batch.values[request]]
        table = alone.metadata.block_tables[0].long()
        for cache, known in ((alone.key_cache, alone.keys[0]), (alone.value_cache, alone.values[0])):
            for position in range(context - length):
                cache[table[position // 16], :, position % 16] = known[position]
        torch.testing.assert_close(alone.attend(TorchAttention()), together[rows], rtol=0.0, atol=1e-6)


def test_layers_of_one_step_may_differ_in_window_and_shape():
    backend = TorchAttention()
    batch = random_batch(MIXED)
    other = random_batch(MIXED, heads=4, kv_heads=4)
    backend.prepare(batch.metadata)
    for layer in (batch, other, batch):
        for window in (None, 8):
            attended = layer.forward(backend, sliding_window=window)
            torch.testing.assert_close(attended.double(), layer.attend_naively(sliding_window=window), **CLOSE)


def test_step_writes_its_own_slots_and_no_other():
    batch = random_batch(MIXED)
    caches = KVCache(batch.key_cache.clone(), batch.value_cache.clone())
    backend = TorchAttention()
    backend.prepare(batch.metadata)
    key, value = batch.new(batch.keys), batch.new(batch.values)
    batch.forward(backend, caches)
    slots = batch.metadata.slot_mapping
    for cache, before, new in ((caches.keys, batch.key_cache, key), (caches.values, batch.value_cache, value)):
        assert torch.equal(cache[slots // 16, :, slots % 16], new)
        cache[slots // 16, :, slots % 16] = before[slots // 16, :, slots % 16]
        torch.testing.assert_close(cache, before, rtol=0.0, atol=0.0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.integers(1, 70).flatmap(lambda context: st.tuples(st.just(context), st.integers(1, context))),
        min_size=1,
        max_size=8,
    ),
    window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_the_reference(requests, window, seed):
    batch = random_batch(requests, heads=4, kv_heads=2, head_dim=16, seed=seed)
    expected = batch.attend(ReferenceAttention(), sliding_window=window)
    torch.testing.assert_close(batch.attend(TorchAttention(), sliding_window=window), expected, **CLOSE)


def test_groups_bound_padding_and_size(monkeypatch):
    group = torch_attention._group_by_length
    assert group([0, 1, 2, 3], [100, 10, 90, 9]) == [[0, 2], [1, 3]]
    monkeypatch.setattr(torch_attention, "GROUP_SLOTS", 100)
    assert group([0, 1, 2], [50, 50, 50]) == [[0, 1], [2]]
    assert group([1], [5, 1000]) == [[1]]
