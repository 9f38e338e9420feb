"""What a row remembers: penalties, biases, min_tokens; and that it forgets."""

import numpy as np
import pytest
import torch

from engine.sampling.sampler import sample
from engine.sampling.state import SamplingState
from engine.sampling_params import SamplingParams
from tests.engine.sampling.reference import processed, request

VOCAB = 12
GREEDY = {"temperature": 0.0}


def next_token(state: SamplingState, logits, num_tokens: int, row: int = 0) -> int:
    rows = torch.tensor(np.asarray(logits, np.float32))[None]
    return int(sample(rows, state, np.array([row]), np.array([num_tokens])).token_ids[0])


def fresh(spec, token_ids=None) -> SamplingState:
    state = SamplingState(2, VOCAB)
    state.add(0, spec, list(token_ids or [*spec.prompt_token_ids, *spec.output_token_ids]))
    return state


PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, **GREEDY)


def test_penalties_look_at_prompt_and_output():
    spec = request(PENALTIES, prompt=[1, 2, 2, 3], output=[3, 4, 4])
    logits = np.array([5, 5, -5, 5, 5, 5, -5, 0, 0, 0, 0, 0], np.float32)
    found = fresh(spec).adjusted(0, 7, logits)
    np.testing.assert_allclose(found, processed(logits, spec, [1, 2, 2, 3, 3, 4, 4]), rtol=1e-6)
    np.testing.assert_allclose(found[:6], [5, 5 / 1.5, -7.5, 5 / 1.5 - 0.7, 5 / 1.5 - 1.0, 5], rtol=1e-6)


def test_recorded_tokens_count_like_those_a_row_started_with():
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, 9).tolist()
    logits = rng.normal(0, 3, VOCAB).astype(np.float32)
    grown = fresh(request(PENALTIES, prompt=prompt))
    for start in range(0, 9, 2):
        grown.record(0, output[start : start + 2])
    resumed = fresh(request(PENALTIES, prompt=prompt, output=output))
    preempted = fresh(request(PENALTIES, prompt=prompt), token_ids=prompt + output)
    expected = grown.adjusted(0, 15, logits)
    assert not np.array_equal(expected, logits)
    assert np.array_equal(resumed.adjusted(0, 15, logits), expected)
    assert np.array_equal(preempted.adjusted(0, 15, logits), expected)


def test_penalties_count_any_number_of_distinct_tokens():
    rng, vocab = np.random.default_rng(1), 2000
    prompt, output = rng.integers(0, vocab, 300).tolist(), rng.integers(0, vocab, 1500).tolist()
    spec, logits = request(PENALTIES, prompt=prompt), rng.normal(0, 3, vocab).astype(np.float32)
    state = SamplingState(1, vocab)
    state.add(0, spec, prompt)
    for token in output:
        state.record(0, [token])
    found = state.adjusted(0, 1800, logits)
    np.testing.assert_allclose(found, processed(logits, spec, prompt + output), rtol=1e-5, atol=1e-5)


def test_a_frequency_penalty_drives_repeated_tokens_out():
    logits = [0.0, 3.0, 2.5, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    state = fresh(request(SamplingParams(frequency_penalty=1.0, **GREEDY)))
    tokens = []
    for position in range(1, 7):
        tokens.append(next_token(state, logits, position))
        state.record(0, tokens[-1:])
    assert tokens == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_forces_and_bans(temperature):
    logits = np.linspace(0, 11, VOCAB)
    forced = fresh(request(SamplingParams(temperature=temperature, logit_bias={4: 100.0})))
    assert [next_token(forced, logits, position) for position in range(20)] == [4] * 20
    banned = fresh(request(SamplingParams(temperature=temperature, logit_bias={11: -100, 10: -100})))
    assert max(next_token(banned, logits, position) for position in range(20)) == 9


def test_ids_outside_the_vocabulary_are_left_out():
    params = SamplingParams(logit_bias={500: 100.0, 3: 50.0}, min_tokens=5, stop_token_ids=[900], **GREEDY)
    assert next_token(fresh(request(params)), np.zeros(VOCAB), 1) == 3


@pytest.mark.parametrize("resumed", [0, 1, 2])
def test_min_tokens_keeps_the_sequence_from_stopping_and_counts_from_the_original_prompt(resumed):
    params = SamplingParams(min_tokens=3, stop_token_ids=[10], **GREEDY)
    spec = request(params, prompt=[1, 2], output=[5] * resumed, eos=[11])
    logits = np.arange(VOCAB)
    state = fresh(spec)
    assert [next_token(state, logits, length) for length in range(2 + resumed, 7)] == [9] * (3 - resumed) + [11, 11]


def test_a_reused_row_remembers_nothing():
    old = SamplingParams(
        temperature=2.0,
        top_k=3,
        top_p=0.5,
        min_p=0.2,
        repetition_penalty=2.0,
        logit_bias={7: 100.0},
        min_tokens=15,
        logprobs=3,
        stop_token_ids=[11],
    )
    state = fresh(request(old, seed=77, prompt=[1, 2, 3]))
    untouched = SamplingState(2, VOCAB)
    state.remove(0)
    for name, value in vars(state).items():
        assert np.array_equal(value, vars(untouched)[name]), name
    state.add(0, request(old), [0])
    state.add(0, request(SamplingParams(**GREEDY)), [0])
    result = sample(torch.arange(VOCAB).float()[None], state, np.array([0]), np.array([1]))
    assert result.token_ids.tolist() == [11]
    assert result.logprobs == [None]


def test_a_row_does_not_see_its_neighbours_history():
    state = SamplingState(2, VOCAB)
    for row in (0, 1):
        state.add(row, request(PENALTIES), [0])
    state.record(0, [5, 5, 5])
    logits = np.ones(VOCAB, np.float32)
    assert state.adjusted(0, 4, logits)[5] < 0.5
    assert state.adjusted(1, 4, logits)[5] == 1.0


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, np.uint64(2**64 - 1), np.int64(12)])
def test_seeds_of_64_bits_are_kept_whole(seed):
    assert int(fresh(request(SamplingParams(), seed=seed)).seed[0]) == int(seed)


def test_only_rows_with_penalties_hold_arrays_of_the_vocabulary():
    state = SamplingState(4, 10_000)
    state.add(0, request(SamplingParams(top_p=0.5)), [0])
    state.record(0, [3])
    assert max(array.size for array in vars(state).values() if isinstance(array, np.ndarray)) == 4
    assert state._adjustments == {}
