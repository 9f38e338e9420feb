"""Sampling on a device, its kernels interpreted, gives the tokens and log-probabilities of sampling by numpy.

Both take the same float32 logits. Where top_p ends is right to about 1e-6 of the probability in either; the rows here
are fixed, and none of them ends that near to a token's boundary unless both sums are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.request import EngineRequest
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.device_state import lowest_scaled
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import SampleResult, sample
from engine.sampling.state import SamplingState
from engine.sampling_params import SamplingParams
from tests.engine.sampling.reference import request

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Of numpy in Triton's interpreter, about infinities."""

CPU = torch.device("cpu")
NAN, INF, LARGEST = float("nan"), float("inf"), float(np.finfo(np.float32).max)


class Samplers:
    """The device's sampler and numpy's, with the same requests."""

    def __init__(self, specs: Sequence[EngineRequest], vocab: int) -> None:
        self.device = DeviceSampler(len(specs), vocab, CPU)
        self.host = SamplingState(len(specs), vocab)
        for row, spec in enumerate(specs):
            tokens = [*spec.prompt_token_ids, *spec.output_token_ids]
            self.device.add(row, spec, tokens)
            self.host.add(row, spec, tokens)
        self.lengths = np.array([len(spec.prompt_token_ids) + len(spec.output_token_ids) for spec in specs])

    def step(self, logits: torch.Tensor) -> SampleResult:
        """Draws one token for each request with both; the device's, after they were found equal."""
        rows = np.arange(len(logits))
        with np.errstate(invalid="ignore", over="ignore"):
            expected = sample(logits, self.host, rows, self.lengths)
        before = logits.clone()
        drawn = self.device.sample(logits, rows, self.lengths)
        assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
        assert drawn.token_ids.dtype == torch.int32
        found = drawn.result()
        assert found.token_ids.tolist() == drawn.token_ids.tolist()
        assert_same(found, expected)
        for row, token in enumerate(found.token_ids.tolist()):
            self.host.record(row, [token])
        self.lengths = self.lengths + 1
        return found


def assert_same(found: SampleResult, expected: SampleResult) -> None:
    assert found.broken == expected.broken
    assert found.token_ids.dtype == np.int64
    usable = np.setdiff1d(np.arange(len(expected.token_ids)), expected.broken)
    assert found.token_ids[usable].tolist() == expected.token_ids[usable].tolist()
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.ranks, other.ranks)
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=2e-6, atol=2e-6)


def bell(rng: np.random.Generator, *shape: int, spread: float, levels: int | None = None) -> torch.Tensor:
    """Random logits; with levels they are multiples of spread / levels, so that many are equal."""
    logits = rng.normal(0, spread, shape)
    if levels is not None:
        logits = np.round(logits * levels / spread) * spread / levels
    return torch.from_numpy(logits.astype(np.float32))


def specs_of(params: Sequence[SamplingParams], rng: np.random.Generator, **given) -> list[EngineRequest]:
    seeds = 2**64 - 1 - rng.integers(0, 2**63, len(params), dtype=np.uint64) * np.uint64(2)
    return [request(one, seed=int(seed), **given) for one, seed in zip(params, seeds, strict=True)]


MIX = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=5.0),
    SamplingParams(temperature=1e-3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(top_k=40, min_p=0.3),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.99, temperature=2.0),
    SamplingParams(top_p=0.9, min_p=0.02),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=700, top_p=0.8),
]


@pytest.mark.parametrize("vocab", [1, 5, 131, 1000])
@pytest.mark.parametrize(("spread", "levels"), [(3.0, None), (0.3, None), (1.0, 2)])
def test_mixed_rows_draw_what_numpy_draws(vocab, spread, levels):
    rng = np.random.default_rng(vocab)
    samplers = Samplers(specs_of(MIX, rng), vocab)
    samplers.step(bell(rng, len(MIX), vocab, spread=spread, levels=levels))


WIDE = [
    SamplingParams(),
    SamplingParams(top_k=30),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.99),
    SamplingParams(top_p=0.9, min_p=0.01, temperature=3.0),
    SamplingParams(top_k=2500),
    SamplingParams(top_k=3000, top_p=0.9, temperature=4.0),
]


@pytest.mark.parametrize(("spread", "levels"), [(4.0, None), (0.3, None), (1.0, 1)])
def test_rows_of_several_chunks_draw_what_numpy_draws(spread, levels):
    """Small spreads make the candidates too many to be gathered."""
    rng, vocab = np.random.default_rng(7), 9001
    samplers = Samplers(specs_of(WIDE, rng), vocab)
    samplers.step(bell(rng, len(WIDE), vocab, spread=spread, levels=levels))


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.5}, {"top_k": 2}, {"top_k": 2400}, {"top_k": 2400, "top_p": 0.3}, {"temperature": 0}],
    ids=str,
)
def test_equal_tokens_are_kept_by_lower_id(params):
    rng, vocab = np.random.default_rng(1), 5000
    samplers = Samplers(specs_of([SamplingParams(**params)] * 3, rng), vocab)
    found = samplers.step(torch.full((3, vocab), -2.5))
    kept = {"top_p": vocab // 2, "temperature": 1} | {"top_k": params.get("top_k", vocab)}
    assert found.token_ids.max() < min(kept[name] for name in params)


def test_a_row_gets_the_same_token_alone_and_in_any_batch():
    rng, vocab = np.random.default_rng(3), 4500
    specs = specs_of(WIDE, rng)
    logits, rows = bell(rng, len(WIDE), vocab, spread=0.5), np.arange(len(WIDE))
    together = Samplers(specs, vocab).step(logits).token_ids
    backwards = Samplers(specs, vocab).device.sample(logits.flip(0), rows[::-1], np.ones(len(WIDE))).result()
    assert backwards.token_ids[::-1].tolist() == together.tolist()
    for row, spec in enumerate(specs):
        assert Samplers([spec], vocab).step(logits[row : row + 1]).token_ids[0] == together[row]


def test_special_values_are_handled_as_by_numpy():
    rng, vocab = np.random.default_rng(5), 300
    values = [NAN, INF, -INF, LARGEST, -LARGEST, -0.0, 1e-40]
    params = [SamplingParams(**mix, logprobs=3) for mix in ({"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.7})]
    for share in (0.02, 0.7):
        logits = bell(rng, len(params), vocab, spread=1.0)
        for value in values:
            logits[torch.from_numpy(rng.random(logits.shape) < share / len(values))] = value
        Samplers(specs_of(params, rng), vocab).step(logits)


def test_rows_without_a_usable_logit_are_broken_and_leave_others_alone():
    good = [0.0, 5.0, 1.0, 2.0, -1.0]
    logits = torch.tensor([good, [NAN] * 5, [NAN, 1.0, NAN, 30.0, -INF], [-INF] * 5, [0.0, 0.0, INF, 0.0, -INF]])
    for mix in ({"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 2}, {"logit_bias": {0: 1.0}}):
        specs = [request(SamplingParams(**mix, logprobs=2), seed=3)] * 5
        found = Samplers(specs, 5).step(logits)
        assert found.broken == (1, 3)
        assert found.token_ids[[2, 4]].tolist() == [3, 2]


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 100.0])
def test_extreme_temperatures_draw_what_numpy_draws(temperature):
    rng = np.random.default_rng(6)
    params = [SamplingParams(temperature=temperature, **mix) for mix in ({}, {"top_k": 5}, {"top_p": 0.4})]
    Samplers(specs_of(params, rng), 700).step(bell(rng, 3, 700, spread=2.0, levels=3))


# ---- what changes logits ----

PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.3}


def test_penalties_count_each_drawn_token_without_being_told():
    rng, vocab = np.random.default_rng(2), 60
    params = [
        SamplingParams(temperature=0, **PENALTIES),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, presence_penalty=-0.5),
        SamplingParams(top_k=9, frequency_penalty=1.3),
        SamplingParams(repetition_penalty=0.6, top_p=0.95),
    ]
    samplers = Samplers(specs_of(params, rng, prompt=[1, 2, 2, 59], output=[2, 7, 7]), vocab)
    logits = bell(rng, len(params), vocab, spread=1.0)
    drawn = [samplers.step(logits).token_ids.tolist() for _ in range(8)]
    assert len({tokens[1] for tokens in drawn}) == 1
    assert len({tokens[0] for tokens in drawn}) > 3


def test_greedy_rows_with_penalties_are_counted():
    samplers = Samplers([request(SamplingParams(temperature=0, frequency_penalty=1.0))], 4)
    drawn = [int(samplers.step(torch.tensor([[0.0, 3.0, 2.5, 0.0]])).token_ids[0]) for _ in range(6)]
    assert drawn == [1, 2, 1, 2, 1, 2]


def test_a_row_forgets_its_former_request():
    logits = torch.tensor([[0.0, 3.0, 2.5, 0.0]])
    full = SamplingParams(temperature=0, **PENALTIES, logit_bias={3: 9.0}, min_tokens=5, stop_token_ids=[1])
    samplers = Samplers([request(full, prompt=[1], output=[1] * 9)], 4)
    assert samplers.step(logits).token_ids[0] == 3
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, frequency_penalty=0.1)):
        samplers.device.add(0, request(params), [0])
        assert samplers.device.sample(logits, np.array([0]), np.array([1])).result().token_ids[0] == 1


def test_biases_and_min_tokens_act_as_by_numpy():
    rng, vocab = np.random.default_rng(8), 40
    bias = {4: 2.5, 5: -100.0, 9: 1.5, 39: 100.0, 4000: 5.0}
    params = [
        SamplingParams(temperature=0, logit_bias=bias, min_tokens=4, stop_token_ids=[39, 3, 5000]),
        SamplingParams(logit_bias=bias, min_tokens=2, stop_token_ids=[39], **PENALTIES),
        SamplingParams(temperature=0, min_tokens=3),
        SamplingParams(top_k=3, logit_bias={7: 3.0}),
    ]
    samplers = Samplers(specs_of(params, rng, prompt=[1, 9], output=[4], eos=[2]), vocab)
    logits = bell(rng, len(params), vocab, spread=1.0)
    logits[2, 2] = 50.0
    drawn = np.array([samplers.step(logits).token_ids for _ in range(5)])
    assert (drawn[:, 0] == 39).tolist() == [False, False, False, True, True]
    assert (drawn[:, 2] == 2).tolist() == [False, False, True, True, True]


def test_more_biases_than_a_program_takes_at_once():
    rng, vocab = np.random.default_rng(9), 900
    bias = {int(token): float(rng.normal(0, 3)) for token in rng.permutation(vocab)[:600]}
    samplers = Samplers(specs_of([SamplingParams(logit_bias=bias)] * 2, rng), vocab)
    samplers.step(bell(rng, 2, vocab, spread=1.0))


def test_a_mask_leaves_only_what_it_allows():
    rng, vocab = np.random.default_rng(10), 75
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=4)]
    samplers = Samplers(specs_of(params, rng), vocab)
    logits, constrained = bell(rng, 4, vocab, spread=1.0), np.array([3, 0, 1])
    allowed = rng.random((3, vocab)) < 0.2
    words = np.zeros((3, 96), np.bool_)
    words[:, :vocab] = allowed
    mask = torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32))
    masked = logits.clone()
    masked[constrained] = masked[constrained].where(torch.from_numpy(allowed), -INF)
    rows, lengths = np.arange(4), np.ones(4, np.int64)
    expected = sample(masked, samplers.host, rows, lengths)
    found = samplers.device.sample(logits, rows, lengths, allowed=mask, constrained=constrained)
    assert_same(found.result(), expected)
    assert allowed[[1, 2, 0], found.result().token_ids[[0, 1, 3]]].all()


# ---- log-probabilities ----


def test_logprobs_are_those_of_numpy_for_the_rows_that_ask():
    rng, vocab = np.random.default_rng(11), 150
    params = [
        SamplingParams(logprobs=0),
        SamplingParams(),
        SamplingParams(temperature=0, logprobs=200),
        SamplingParams(top_k=3, logprobs=5, logit_bias={0: 100.0}),
    ]
    logits = bell(rng, 4, vocab, spread=1.0, levels=3)
    found = Samplers(specs_of(params, rng), vocab).step(logits)
    assert [None if one is None else one.token_ids.shape[1] for one in found.logprobs] == [1, None, 151, 6]


def test_prompt_logprobs_are_those_of_numpy():
    rng, vocab = np.random.default_rng(12), 4099
    logits, tokens = bell(rng, 70, vocab, spread=2.0, levels=20), rng.integers(0, vocab, 70)
    sampler = DeviceSampler(1, vocab, CPU)
    for k, rows in ((0, 70), (4, 70), (5000, 2)):
        found = sampler.prompt_logprobs(logits[:rows], tokens[:rows], k).result()
        expected = token_logprobs(logits[:rows], tokens[:rows], k)
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.array_equal(found.ranks, expected.ranks)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=2e-6, atol=2e-6)


# ---- how logits lie ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [51, 56, 64])
def test_logits_of_any_type_and_stride_are_taken_and_nothing_beyond_them(dtype, width):
    rng, vocab = np.random.default_rng(13), 51
    params = [SamplingParams(temperature=0, logprobs=2), SamplingParams(top_k=5), SamplingParams(logit_bias={1: 2.0})]
    wide = torch.full((3, width), 1000.0, dtype=dtype)
    wide[:, :vocab] = bell(rng, 3, vocab, spread=2.0).to(dtype)
    Samplers(specs_of(params, rng), vocab).step(wide[:, :vocab])


def test_no_rows_are_no_tokens():
    found = DeviceSampler(1, 10, CPU).sample(torch.zeros(0, 10), np.zeros(0, np.int64), np.zeros(0, np.int64)).result()
    assert found.token_ids.tolist() == [] == found.logprobs


@pytest.mark.parametrize("min_p", [1e-300, 1e-5, 0.1, 0.5, 0.999, 1.0])
def test_the_lowest_scaled_logit_is_the_first_that_min_p_leaves(min_p):
    lowest = np.float32(lowest_scaled(min_p))
    assert np.exp(lowest, dtype=np.float64) >= min_p
    assert np.exp(np.nextafter(lowest, np.float32(-INF)), dtype=np.float64) < min_p
