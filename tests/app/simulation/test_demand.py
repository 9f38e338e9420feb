"""A trace's load in replicas, and copies of the trace."""

from __future__ import annotations

import pytest

from app.simulation.demand import LONGEST_SHIFT_S, ReplicaClass, copies_for, scaled_requests, superposed
from app.simulation.step_cost import StepCost
from app.traces import TraceRequest
from engine.sampling_params import InvalidParameter

CLASS = ReplicaClass("test", StepCost(step_s=0.1, token_s=0.001, block_s=0.512), 100, max_num_batched_tokens=100)


def trace(*times: float, prompt: int = 1_024, output: int = 64) -> list[TraceRequest]:
    return [TraceRequest(time, prompt, output, (0, index + 1)) for index, time in enumerate(times)]


def test_demand_adds_up_prompts_in_full_steps_and_shared_decoding() -> None:
    prompt_s = 1_000 * 0.2 / 100
    decode_s = 100 * (0.001 + 0.1 / 16 + (1_000 + 50) * 0.001)
    assert CLASS.demand([TraceRequest(0.0, 1_000, 100)]) == pytest.approx(prompt_s + decode_s)
    assert CLASS.demand([]) == 0


def test_copies_bring_as_much_as_so_many_replicas_can_do() -> None:
    requests = trace(0.0, 50.0, 100.0)
    copies = copies_for(requests, CLASS, 4.0)
    assert copies * CLASS.demand(requests) / 100.0 == pytest.approx(4.0)


def test_a_trace_of_one_moment_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="one moment"):
        copies_for(trace(5.0, 5.0), CLASS, 4.0)


def test_each_copy_comes_a_little_later_with_prefixes_of_its_own() -> None:
    requests = trace(0.0, 100.0, 200.0)
    result = superposed(requests, 3, seed=1)
    assert len(result) == 9
    times = [request.arrival_s for request in result]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] <= 200 + LONGEST_SHIFT_S
    assert len(set(times)) == 9
    # Within a copy the first block is shared, and among copies none is.
    first_blocks = [request.hash_ids[0] for request in result if request.hash_ids]
    assert sorted(first_blocks.count(each) for each in set(first_blocks)) == [3, 3, 3]
    assert len({block for request in result for block in request.hash_ids or ()}) == 3 * 4


def test_a_part_of_a_copy_has_a_part_of_the_requests() -> None:
    requests = trace(*map(float, range(1_000)))
    assert 350 < len(superposed(requests, 0.4, seed=0)) < 450
    assert 1_350 < len(superposed(requests, 1.4, seed=0)) < 1_450


def test_the_same_seed_gives_the_same_copies() -> None:
    requests = trace(*map(float, range(20)))
    assert superposed(requests, 1.5, seed=3) == superposed(requests, 1.5, seed=3)
    assert superposed(requests, 1.5, seed=3) != superposed(requests, 1.5, seed=4)


def test_prompts_without_hashes_stay_without() -> None:
    result = superposed([TraceRequest(0.0, 100, 10), TraceRequest(9.0, 100, 10)], 2, seed=0)
    assert [request.hash_ids for request in result] == [None] * 4
    assert len({request.prompt_token_ids for request in scaled_requests(result)}) == 4


def test_lengths_and_times_are_scaled_alike() -> None:
    (first, second) = scaled_requests(trace(0.0, 32.0))
    assert (first.arrival_time, second.arrival_time) == (0.0, 1.0)
    assert len(first.prompt_token_ids) == 32
    assert first.params.max_tokens == 2
