"""The references against float64 formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.reference import (
    add_rms_norm,
    paged_attention,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from tests.engine.attention.batches import random_batch

pytestmark = pytest.mark.usefixtures("fixed_randomness")

TYPES = [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]


@pytest.fixture
def fixed_randomness():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_paged_attention(dtype, tolerance, window):
    batch = random_batch([(21, 1), (35, 7), (16, 16)], dtype=dtype)
    step = batch.metadata
    caches = batch.key_cache, batch.value_cache
    reshape_and_cache(batch.new(batch.keys), batch.new(batch.values), *caches, step.slot_mapping)
    attended = paged_attention(
        batch.query,
        *caches,
        step.block_tables,
        step.query_start,
        step.context_lens,
        scale=64**-0.5,
        sliding_window=window,
    )
    assert attended.dtype == dtype
    expected = batch.attend_naively(sliding_window=window)
    torch.testing.assert_close(attended.double(), expected, rtol=0.0, atol=tolerance)


def test_paged_attention_refuses_uneven_groups():
    batch = random_batch([(4, 4)], heads=3, kv_heads=2)
    step = batch.metadata
    with pytest.raises(ValueError, match="heads=3: must be a multiple of kv_heads, which is 2"):
        paged_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            step.block_tables,
            step.query_start,
            step.context_lens,
            scale=1.0,
        )


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("size", [1, 33, 576])
def test_rms_norm(size, dtype, tolerance):
    x, residual, weight = (torch.randn(5, size).to(dtype) for _ in range(3))
    weight = weight[0]
    total = x + residual
    expected = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed, kept = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(kept, total)
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(rms_norm(total, weight, 1e-5), normed)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_silu_and_mul(dtype, tolerance):
    x = torch.randn(7, 2, 19).to(dtype)
    gate, up = x.double().unbind(1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_and_mul(x.flatten(1)).double(), expected, rtol=tolerance, atol=tolerance)


def test_rotary_embedding_turns_each_pair_by_its_angle():
    x = torch.randn(4, 3, 6)
    angles = torch.randn(4, 3)
    cos, sin = angles.cos(), angles.sin()
    turned = rotary_embedding(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    for token in range(4):
        for head in range(3):
            for pair in range(3):
                a, b = x[token, head, pair].item(), x[token, head, pair + 3].item()
                angle = angles[token, pair].item()
                expected = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
                got = turned[token, head, pair].item(), turned[token, head, pair + 3].item()
                assert got == pytest.approx(expected, abs=1e-6)
