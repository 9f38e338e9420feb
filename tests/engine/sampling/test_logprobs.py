"""Log-probabilities and ranks, of sampled tokens and of prompts."""

import numpy as np
import pytest
import torch

from engine.sampling.candidates import best_tokens
from engine.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("vocab", [2, 70, 1001, 4096])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_those_of_a_full_softmax(vocab, k):
    generator = torch.Generator().manual_seed(vocab + k)
    logits = torch.randn(130, vocab, generator=generator) * 5
    tokens = torch.randint(0, vocab, (130,), generator=generator).numpy()
    found = token_logprobs(logits, tokens, k)
    k = min(k, vocab)
    full = logits.double().log_softmax(-1)
    best, ids = full.topk(k)
    assert found.token_ids.dtype == found.ranks.dtype == np.int32
    assert found.logprobs.dtype == np.float32
    assert found.token_ids.shape == found.logprobs.shape == (130, 1 + k)
    assert np.array_equal(found.token_ids[:, 0], tokens)
    assert np.array_equal(found.token_ids[:, 1:], ids.numpy())
    chosen = full.gather(1, torch.from_numpy(tokens)[:, None])
    np.testing.assert_allclose(found.logprobs, torch.cat((chosen, best), 1).numpy(), rtol=2e-6, atol=2e-6)
    assert np.array_equal(found.ranks, 1 + (full > chosen).sum(1).numpy())


def test_equal_tokens_share_a_rank_and_come_by_lower_id():
    found = token_logprobs(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), np.array([4]), 4)
    assert found.token_ids.tolist() == [[4, 1, 2, 4, 0]]
    assert found.ranks.tolist() == [1]


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(70, 5003, generator=torch.Generator().manual_seed(0))
    tokens = np.arange(70)
    together, alone = token_logprobs(logits, tokens, 3), token_logprobs(logits[66:67], tokens[66:67], 3)
    assert np.array_equal(together.logprobs[66:67], alone.logprobs)


def test_impossible_and_broken_values_give_no_nan():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, -inf, 0.0, -inf], [nan, 0.0, nan, 0.0], [nan] * 4, [0.0, inf, 0.0, 0.0]])
    found = token_logprobs(logits, np.array([1, 1, 0, 1]), 4)
    half = np.float32(np.log(0.5))
    assert found.logprobs[0].tolist() == [-inf, half, half, -inf, -inf]
    assert found.token_ids[0].tolist() == [1, 0, 2, 1, 3]
    assert found.logprobs[1].tolist() == [half, half, half, -inf, -inf]
    assert found.logprobs[2].tolist() == [-inf] * 5
    assert found.logprobs[3, 0] == 0
    assert found.ranks.tolist() == [3, 1, 1, 1]


@pytest.mark.parametrize("vocab", [1, 63, 64, 200, 1000, 40_007])
@pytest.mark.parametrize("levels", [2, 50, 10**6])
def test_best_tokens_are_the_head_of_a_stable_sort(vocab, levels):
    rng = np.random.default_rng(vocab + levels)
    logits = rng.integers(-levels, levels, vocab).astype(np.float32)
    logits[rng.random(vocab) < 0.3] = -np.inf
    order = np.argsort(-logits, kind="stable")
    for k in (0, 1, 2, 7, 64, 256, 900, vocab, vocab + 5):
        assert np.array_equal(best_tokens(logits, k), order[:k])
