"""Sampling by the C++ kernels, at every instruction set that this processor has, is sampling by numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import cache_folder
from engine.request import EngineRequest
from engine.sampling.noise import gumbel_of_bits
from engine.sampling.sampler import SampleResult, sample
from engine.sampling.state import SamplingState
from engine.sampling_params import SamplingParams
from kernels.cpu.build import build, supported_levels
from kernels.cpu.library import CpuKernels

NAN, INF, LARGEST = float("nan"), float("inf"), float(np.finfo(np.float32).max)
LEVELS = supported_levels()


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(build(request.param, cache_folder() / "kernels"), num_threads=2)


def drawn(
    kernels: CpuKernels | None,
    logits: np.ndarray,
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int],
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
) -> SampleResult:
    """One row of logits for each of the requests, which have the same tokens so far."""
    state = SamplingState(len(params), logits.shape[1], kernels)
    for row, (of_row, seed) in enumerate(zip(params, seeds, strict=True)):
        spec = EngineRequest(
            request_id="r", prompt_token_ids=tuple(prompt), params=of_row, seed=seed, eos_token_ids=(0,)
        )
        state.add(row, spec, [*prompt])
        state.record(row, output)
    before = logits.copy()
    rows, lengths = np.arange(len(params)), np.full(len(params), len(prompt) + len(output))
    result = sample(torch.from_numpy(logits), state, rows, lengths)
    assert np.array_equal(logits, before, equal_nan=True)
    return result


def assert_same(found: SampleResult, expected: SampleResult) -> None:
    assert found.broken == expected.broken
    assert found.token_ids.dtype == expected.token_ids.dtype
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.ranks, other.ranks)
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=2e-6, atol=2e-6)


def test_every_value_of_the_noise_is_that_of_its_definition(kernels: CpuKernels) -> None:
    bits = np.arange(2**23, dtype=np.int32)
    noise = np.empty(2**23, np.float32)
    kernels._library.manta_gumbel_of_bits(
        ctypes.c_void_p(bits.ctypes.data), ctypes.c_void_p(noise.ctypes.data), ctypes.c_int64(bits.size)
    )
    assert np.array_equal(noise, gumbel_of_bits(bits))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 5.0), st.sampled_from([1e-40, 1e-6, 100.0])),
    top_k=st.one_of(st.just(0), st.integers(1, 10), st.integers(11, 3000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0), st.sampled_from([1e-9, 0.5, 0.999999])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-300, 1e-5, 1.0])),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    logit_bias=st.dictionaries(st.integers(0, 70), st.floats(-100, 100), max_size=3),
    min_tokens=st.sampled_from([0, 0, 16]),
    logprobs=st.one_of(st.none(), st.integers(0, 6), st.just(80)),
)
SPECIAL = st.sampled_from([NAN, INF, -INF, LARGEST, -LARGEST, 0.0, -0.0, 1e-40])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rng=st.integers(0, 2**32).map(np.random.default_rng),
    vocab=st.sampled_from([1, 2, 15, 16, 63, 64, 65, 301, 1024, 5003]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    levels=st.sampled_from([None, 1, 4]),
    special=st.lists(st.tuples(SPECIAL, st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0])), max_size=2),
    params=st.lists(PARAMS, min_size=1, max_size=6),
    num_output=st.integers(0, 12),
)
def test_any_mix_of_requests_draws_what_numpy_draws(
    kernels: CpuKernels, rng, vocab, spread, levels, special, params, num_output
) -> None:
    """Levels make ties: logits are then multiples of spread / levels. Special values lie anywhere among the others."""
    logits = rng.normal(0, spread, (len(params), vocab))
    if levels is not None:
        logits = np.round(logits * levels / max(spread, 0.1)) * max(spread, 0.1) / levels
    for value, share in special:
        logits[rng.random(logits.shape) < share] = value
    logits = logits.astype(np.float32)
    history = {
        "seeds": rng.integers(0, 2**64, len(params), dtype=np.uint64).tolist(),
        "prompt": rng.integers(0, vocab, 9).tolist(),
        "output": rng.integers(0, vocab, num_output).tolist(),
    }
    with np.errstate(invalid="ignore", over="ignore"):
        expected = drawn(None, logits, params, **history)
    assert_same(drawn(kernels, logits, params, **history), expected)


MIX = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=5),
    SamplingParams(),
    SamplingParams(temperature=0.02),
    SamplingParams(temperature=3.0, logprobs=0),
    SamplingParams(top_k=20),
    SamplingParams(temperature=2.0, top_k=30_000, top_p=0.8),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(top_p=0.95, logprobs=2),
    SamplingParams(temperature=2.0, top_p=0.95),
    SamplingParams(min_p=0.05, frequency_penalty=0.5),
    SamplingParams(top_p=0.9, min_p=0.0001),
    SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(logit_bias={5: 3.0}, top_k=900),
]


def mixed(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, dict[str, list[int]]]:
    """Logits for MIX, peaked as a language model's, and what `drawn` needs beside them."""
    logits = (rng.gumbel(0, 1.7, (len(MIX), vocab))).astype(np.float32)
    seeds = rng.integers(0, 2**64, len(MIX), dtype=np.uint64).tolist()
    return logits, {
        "seeds": seeds,
        "prompt": rng.integers(0, vocab, 50).tolist(),
        "output": rng.integers(0, vocab, 50).tolist(),
    }


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_large_vocabularies_draw_what_numpy_draws(kernels: CpuKernels, vocab: int) -> None:
    for seed in range(4):
        logits, history = mixed(np.random.default_rng(seed), vocab)
        assert_same(drawn(kernels, logits, MIX, **history), drawn(None, logits, MIX, **history))


def test_nothing_depends_on_the_number_of_threads_or_on_the_batch() -> None:
    library = build(LEVELS[0], cache_folder() / "kernels")
    one, more = CpuKernels(library, num_threads=1), CpuKernels(library, num_threads=5)
    logits, history = mixed(np.random.default_rng(9), 5003)
    together = drawn(more, logits, MIX, **history)
    expected = drawn(one, logits, MIX, **history)
    assert_same(together, expected)
    for row, params in enumerate(MIX):
        alone = drawn(more, logits[row : row + 1], [params], **(history | {"seeds": history["seeds"][row : row + 1]}))
        assert alone.token_ids[0] == expected.token_ids[row]
        found, other = alone.logprobs[0], expected.logprobs[row]
        assert (found is None) == (other is None)
        assert found is None or other is None or np.array_equal(found.logprobs, other.logprobs)


def test_thousands_of_equal_tokens_are_cut_by_lower_id(kernels: CpuKernels) -> None:
    logits = np.zeros((5, 9000), np.float32)
    logits[:, ::3] = 1.0
    params = [
        SamplingParams(top_k=2000, logprobs=700),
        SamplingParams(top_k=5000),
        SamplingParams(top_p=0.3),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=4000, top_p=0.9),
    ]
    for seed in range(30):
        history = {"seeds": [seed] * len(params)}
        assert_same(drawn(kernels, logits, params, **history), drawn(None, logits, params, **history))


@pytest.mark.parametrize("rest", [-30.0, -LARGEST])
def test_filters_end_at_a_gap_between_the_tokens(kernels: CpuKernels, rest: float) -> None:
    """Just as many tokens as top_k asks for, or all that weighs, lie above the gap."""
    rng = np.random.default_rng(2)
    logits = np.full((4, 9000), rest, np.float32)
    logits[:, rng.permutation(9000)[:1000]] = rng.normal(0, 0.3, 1000)
    params = [
        SamplingParams(top_k=1000),
        SamplingParams(top_k=1001, logprobs=1000),
        SamplingParams(top_k=1000, top_p=0.999999),
        SamplingParams(top_p=0.999999),
    ]
    history = {"seeds": list(range(4))}
    assert_same(drawn(kernels, logits, params, **history), drawn(None, logits, params, **history))


def test_a_model_without_possible_tokens_breaks_its_own_row_alone(kernels: CpuKernels) -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[1], logits[2] = NAN, -INF
    params = [SamplingParams(logprobs=1)] * 4
    result = drawn(kernels, logits, params, seeds=[1, 2, 3, 1])
    assert result.broken == (1, 2)
    assert result.token_ids[0] == result.token_ids[3]
