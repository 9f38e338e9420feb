"""The parts of sampling on a GPU, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.sampling import noise as numpy_noise
from kernels import reference
from kernels.gpu.logits import count_tokens, logit_of_key, token_key, token_of_key
from kernels.gpu.logprobs import token_logprobs
from kernels.gpu.noise import GUMBEL_MAX, NOISE_ERROR, approximate_wait, gumbel, random_bits, random_bits_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Of numpy in Triton's interpreter, about infinities."""

BLOCK = 1 << 18


@triton.jit
def _noises(exact, waits, BLOCK: tl.constexpr):
    bits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(exact + bits, gumbel(bits))
    tl.store(waits + bits, approximate_wait(bits))


def test_noise_is_that_of_its_definition_and_its_bound_holds_for_every_value():
    exact, waits = torch.empty(2**23), torch.empty(2**23)
    _noises[(2**23 // BLOCK,)](exact, waits, BLOCK=BLOCK)
    expected = numpy_noise.gumbel_of_bits(np.arange(2**23))
    assert np.array_equal(exact.numpy(), expected)
    assert np.abs(-np.log(waits.numpy().astype(np.float64)) - expected).max() < NOISE_ERROR.value / 10
    assert expected.max() == np.float32(GUMBEL_MAX.value)


@triton.jit
def _bits(seed, position, tokens, several, single, start, TOKENS: tl.constexpr):
    index = tl.arange(0, TOKENS)
    tl.store(several + index, random_bits(tl.load(seed), tl.load(position), start, TOKENS))
    tl.store(single + index, random_bits_of(tl.load(seed), tl.load(position), tl.load(tokens + index)))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 8191, 2**31 - 1])
def test_random_bits_are_those_of_numpy(seed, position):
    start, tokens = 262_144, np.random.default_rng(0).integers(0, 2**31, 64)
    several, single = torch.empty(2, 64, dtype=torch.int32)
    seeds = torch.from_numpy(np.array([seed], np.uint64).view(np.int64))
    positions = torch.tensor([position], dtype=torch.int32)
    _bits[(1,)](seeds, positions, torch.from_numpy(tokens.astype(np.int32)), several, single, start, TOKENS=64)
    for found, ids in ((several, start + np.arange(64)), (single, tokens)):
        blocks = numpy_noise.random_blocks(seed, position, ids // 4)
        assert np.array_equal(found.numpy(), np.choose(ids % 4, blocks))


@triton.jit
def _keys(logits, keys, values, tokens, BLOCK: tl.constexpr):
    token = tl.arange(0, BLOCK)
    key = token_key(tl.load(logits + token), token)
    tl.store(keys + token, key)
    tl.store(values + token, logit_of_key(key))
    tl.store(tokens + token, token_of_key(key))


def test_keys_have_the_order_of_tokens_and_give_them_back():
    rng, largest = np.random.default_rng(0), float(np.finfo(np.float32).max)
    logits = np.round(rng.normal(0, 3, 1024)).astype(np.float32) + np.float32(0)
    logits[:6] = [-np.inf, largest, -largest, 1e-45, -1e-45, -np.inf]
    logits[logits == 0] = 0
    keys, values = torch.empty(1024, dtype=torch.int64), torch.empty(1024)
    tokens = torch.empty(1024, dtype=torch.int32)
    _keys[(1,)](torch.from_numpy(logits), keys, values, tokens, BLOCK=1024)
    assert np.array_equal(np.argsort(-keys.numpy()), np.argsort(-logits, kind="stable"))
    assert np.array_equal(values.numpy(), logits)
    assert np.array_equal(tokens.numpy(), np.arange(1024))


@pytest.mark.parametrize("num_prompt", [0, 5, 1500])
def test_tokens_are_counted_as_in_the_reference(num_prompt):
    token_ids = torch.from_numpy(np.random.default_rng(1).integers(0, 50, 1500).astype(np.int32))
    found, expected = torch.zeros(56, dtype=torch.int32), torch.zeros(56, dtype=torch.int32)
    count_tokens(found, token_ids, num_prompt)
    reference.count_tokens(expected, token_ids, num_prompt)
    assert torch.equal(found, expected)
    assert int((found >> 1).sum()) == 1500 - num_prompt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "k"), [(7, 7), (130, 0), (5003, 20)])
def test_token_logprobs_are_those_of_the_reference(dtype, vocab, k):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, vocab, generator=generator) * 4).to(dtype)
    logits[0, ::3], logits[1, 1], logits[2] = -torch.inf, torch.nan, torch.nan
    logits[3, 2] = torch.inf
    token_ids = torch.randint(0, vocab, (5,), generator=generator)
    ids, values, ranks = token_logprobs(logits, token_ids, k)
    expected = reference.token_logprobs(logits, token_ids, k)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(values, expected[1], rtol=2e-6, atol=2e-6)
    assert torch.equal(ranks, expected[2])
