"""Sampling draws what its documentation says, whatever the row's neighbours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.sampler import sample
from engine.sampling.state import SamplingState
from engine.sampling_params import SamplingParams
from tests.engine.sampling.reference import (
    chi_square,
    chi_square_limit,
    kept_tokens,
    likely_tokens,
    processed,
    request,
)


def state_of(vocab: int, *specs) -> SamplingState:
    state = SamplingState(len(specs), vocab)
    for row, spec in enumerate(specs):
        state.add(row, spec, [*spec.prompt_token_ids, *spec.output_token_ids])
    return state


def draws(logits, params: SamplingParams, n: int, *, seed: int = 1, eos=()) -> np.ndarray:
    """The tokens of one request at positions 1 to n, all from the same logits."""
    logits = np.asarray(logits, np.float32)
    state = state_of(logits.size, request(params, seed=seed, eos=eos))
    rows = torch.from_numpy(logits).expand(n, -1).contiguous()
    return sample(rows, state, np.zeros(n, np.int64), np.arange(1, n + 1)).token_ids


def bell(rng: np.random.Generator, *shape: int, spread: float = 3.0) -> np.ndarray:
    return rng.normal(0, spread, shape).astype(np.float32)


# ---- the choice itself ----


def test_greedy_takes_the_best_and_the_lowest_of_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-1.0, -1.0, -1.0, -1.0], [0.0, 1.0, 2.0, 3.0]])
    spec = request(SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=0.5))
    result = sample(logits, state_of(4, spec), np.zeros(3, np.int64), np.ones(3, np.int64))
    assert result.token_ids.tolist() == [1, 0, 3]
    assert result.token_ids.dtype == np.int64
    assert result.logprobs == [None] * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("vocab", [1, 3, 64, 301, 5003])
@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_temperature_alone_is_the_gumbel_max_over_the_whole_vocabulary(vocab, temperature, spread):
    rng = np.random.default_rng(vocab)
    logits, params = bell(rng, vocab, spread=spread), SamplingParams(temperature=temperature)
    found = draws(logits, params, 12, seed=11)
    for position, token in enumerate(found.tolist(), 1):
        assert token in likely_tokens(logits.astype(np.float64), params, 11, position)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 700},
        {"top_p": 0.05},
        {"top_p": 0.6},
        {"top_p": 0.97},
        {"min_p": 0.2},
        {"min_p": 0.001},
        {"top_k": 300, "top_p": 0.3},
        {"top_k": 900, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.9999, "min_p": 0.05},
        {"top_p": 0.1, "min_p": 0.35},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_filters_leave_what_full_sorts_leave(filters, spread):
    """Flat logits make the candidates too many for the search of the best tokens alone."""
    logits, params = bell(np.random.default_rng(3), 3001, spread=spread), SamplingParams(temperature=0.9, **filters)
    found = draws(logits, params, 15, seed=2**64 - 1)
    kept = set(kept_tokens(logits.astype(np.float64), params, 1e-5))
    for position, token in enumerate(found.tolist(), 1):
        assert token in kept
        assert token in likely_tokens(logits.astype(np.float64), params, 2**64 - 1, position)


@settings(max_examples=100, deadline=None)
@given(
    rng=st.integers(0, 2**32).map(np.random.default_rng),
    vocab=st.sampled_from([2, 5, 40, 301, 900]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 10.0]),
    params=st.builds(
        SamplingParams,
        temperature=st.one_of(st.just(0.0), st.floats(0.05, 5.0)),
        top_k=st.one_of(st.just(0), st.integers(1, 10), st.integers(11, 400)),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
        min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
        repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
        presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
        frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
        logit_bias=st.dictionaries(st.integers(0, 1), st.floats(-100, 100), max_size=2),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.just([1]),
    ),
    seed=st.integers(0, 2**64 - 1),
    num_output=st.integers(0, 5),
)
def test_any_mix_of_parameters_draws_what_the_reference_draws(rng, vocab, spread, params, seed, num_output):
    logits = bell(rng, vocab, spread=spread)
    prompt, output = rng.integers(0, vocab, 4).tolist(), rng.integers(0, vocab, num_output).tolist()
    spec = request(params, seed=seed, prompt=prompt, output=output)
    before = torch.from_numpy(logits[None].copy())
    result = sample(before, state_of(vocab, spec), np.array([0]), np.array([4 + num_output]))
    expected = processed(logits, spec, prompt + output)
    assert int(result.token_ids[0]) in likely_tokens(expected, params, seed, 4 + num_output)
    assert np.array_equal(before.numpy()[0], logits)


# ---- boundaries ----


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_k": 100}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.2807}, {1}),  # the best three weigh 0.280702 each
        ({"top_p": 0.2808}, {1, 2}),
        ({"top_p": 0.8422}, {0, 1, 2, 4}),
        ({"top_p": 0.9999}, {0, 1, 2, 3, 4, 5}),
        ({"min_p": 1.0}, {1, 2, 4}),
        ({"min_p": 0.250001}, {1, 2, 4}),
        ({"min_p": 0.249999}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.5, "top_p": 0.5}, {1, 2}),  # a half of what min_p left
        ({"min_p": 0.5, "top_k": 1}, {1}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # the first of two equals is just enough
        ({"top_k": 2, "top_p": 0.500001}, {1, 2}),
    ],
    ids=str,
)
def test_filters_at_their_boundaries(filters, expected):
    """Three equal best tokens, two with a quarter of their weight, one with a sixteenth."""
    logits = np.log([1 / 4, 1, 1, 1 / 4, 1, 1 / 16])
    assert set(draws(logits, SamplingParams(**filters), 2000).tolist()) == expected


def test_equal_tokens_at_the_edge_of_a_large_nucleus_are_kept_by_lower_id():
    found = draws(np.zeros(2000), SamplingParams(top_p=0.5), 800)
    assert found.max() < 1000
    assert np.bincount(found // 250, minlength=4).min() > 150
    assert draws(np.zeros(2000), SamplingParams(top_k=1500), 800).max() in range(1450, 1500)


# ---- distribution ----


@pytest.mark.parametrize(
    ("params", "probabilities"),
    [
        (SamplingParams(), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (SamplingParams(temperature=0.5), [0.25, 0.04, 0.0225, 0.01, 0.0025]),
        (SamplingParams(top_k=3), [0.5, 0.2, 0.15, 0, 0]),
        (SamplingParams(top_p=0.6), [0.5, 0.2, 0, 0, 0]),
        (SamplingParams(min_p=0.19), [0.5, 0.2, 0.15, 0.1, 0]),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params, probabilities):
    n, expected = 20_000, np.array(probabilities) / sum(probabilities)
    counts = np.bincount(draws(np.log([0.5, 0.2, 0.15, 0.1, 0.05]), params, n, seed=5), minlength=5)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert chi_square(counts[kept], n * expected[kept]) < chi_square_limit(int(kept.sum()) - 1)


def test_a_large_vocabulary_is_drawn_as_often_as_its_probabilities_say():
    """Most of the probability lies outside the best tokens, so that the rest of the vocabulary must compete."""
    logits = bell(np.random.default_rng(8), 4096, spread=1.0)
    weights = np.exp(logits.astype(np.float64))
    found = draws(logits, SamplingParams(), 4000)
    expected = (weights / weights.sum()).reshape(64, 64).sum(axis=1)
    assert chi_square(np.bincount(found // 64, minlength=64), 4000 * expected) < chi_square_limit(63)


def test_seeds_reproduce_and_differ():
    logits, params = np.zeros(1000), SamplingParams()
    assert np.array_equal(draws(logits, params, 50, seed=9), draws(logits, params, 50, seed=9))
    for other in (8, 9 + 2**32, 2**64 - 1):
        assert np.mean(draws(logits, params, 50, seed=9) == draws(logits, params, 50, seed=other)) < 0.1


# ---- batches ----


def mixed_specs(rng: np.random.Generator, n: int, vocab: int) -> list:
    choices = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=4),
        SamplingParams(),
        SamplingParams(temperature=1.7, logprobs=0),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.9, logprobs=2),
        SamplingParams(temperature=3.0, top_p=0.99),
        SamplingParams(min_p=0.1, frequency_penalty=0.5),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(logit_bias={5: 3.0}, top_k=900),
        SamplingParams(min_tokens=9, stop_token_ids=[7]),
    ]
    return [
        request(
            choices[i % len(choices)],
            seed=int(rng.integers(0, 2**63)),
            prompt=rng.integers(0, vocab, 5).tolist(),
            output=rng.integers(0, vocab, i % 4).tolist(),
        )
        for i in range(n)
    ]


def test_a_row_gets_the_same_token_alone_and_in_any_batch():
    rng, n, vocab = np.random.default_rng(4), 33, 3001
    specs = mixed_specs(rng, n, vocab)
    logits = torch.from_numpy(np.concatenate([bell(rng, 16, vocab, spread=0.4), bell(rng, n - 16, vocab)]))
    lengths = np.array([len(spec.prompt_token_ids) + len(spec.output_token_ids) for spec in specs])
    alone = [
        sample(logits[i : i + 1], state_of(vocab, spec), np.array([0]), lengths[i : i + 1])
        for i, spec in enumerate(specs)
    ]
    state = state_of(vocab, *specs)
    for size in (n, n, 7, 2):
        batch = rng.permutation(n)[:size]
        result = sample(logits[torch.from_numpy(batch)], state, batch, lengths[batch])
        for place, i in enumerate(batch.tolist()):
            assert result.token_ids[place] == alone[i].token_ids[0]
            found, expected = result.logprobs[place], alone[i].logprobs[0]
            assert (found is None) == (expected is None) == (specs[i].params.logprobs is None)
            if found is not None:
                assert found.token_ids.shape == (1, 1 + specs[i].params.logprobs)
                assert np.array_equal(found.token_ids, expected.token_ids)
                assert np.array_equal(found.logprobs, expected.logprobs)
                assert np.array_equal(found.ranks, expected.ranks)


def test_logprobs_are_of_the_raw_logits():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    params = SamplingParams(temperature=0.1, logit_bias={0: 100.0}, logprobs=1)
    result = sample(logits, state_of(4, request(params)), np.array([0]), np.array([1]))
    found = result.logprobs[0]
    assert found.token_ids.tolist() == [[0, 3]]
    assert found.ranks.tolist() == [4]
    np.testing.assert_allclose(found.logprobs, logits.log_softmax(-1).numpy()[:, [0, 3]], rtol=1e-6)


# ---- bad rows ----


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"logit_bias": {0: 1.0}}], ids=str)
def test_bad_logits_leave_other_rows_alone(params):
    nan, inf = float("nan"), float("inf")
    good = [0.0, 5.0, 1.0, 2.0, -1.0]
    rows = [
        good,
        [nan] * 5,
        [nan, 1.0, nan, 30.0, -inf],
        [-inf] * 5,
        [0.0, 0.0, inf, 0.0, -inf],
        good,
    ]
    specs = [request(SamplingParams(**params), seed=3) for _ in rows]
    lengths = np.full(6, 2)
    result = sample(torch.tensor(rows), state_of(5, *specs), np.arange(6), lengths)
    alone = sample(torch.tensor([good]), state_of(5, specs[0]), np.array([0]), lengths[:1])
    assert result.broken == (1, 3)
    assert result.token_ids[0] == result.token_ids[5] == alone.token_ids[0]
    assert result.token_ids[2] == 3
    assert result.token_ids[4] == 2


def test_logits_of_half_precision_are_taken():
    logits = torch.tensor([[1.0, 4.0, 2.0]], dtype=torch.bfloat16)
    result = sample(logits, state_of(3, request(SamplingParams(top_k=1))), np.array([0]), np.array([1]))
    assert result.token_ids.tolist() == [1]
