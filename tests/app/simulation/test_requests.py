"""A trace's requests in the scaled world."""

from __future__ import annotations

import pytest

from app.simulation.requests import (
    at_rate,
    longest,
    num_distinct_blocks,
    num_prompt_tokens,
    simulated_requests,
)
from app.traces import TraceRequest
from engine import EngineRequest
from tests.app.simulation.conftest import prompts


def test_prompts_share_the_blocks_that_the_trace_says() -> None:
    first, second, third = prompts([5, 6, 7], [5, 6, 8], [6, 7])
    assert len(first.prompt_token_ids) == 48
    assert first.block_hashes[:2] == second.block_hashes[:2]
    assert first.block_hashes[2] != second.block_hashes[2]
    assert not set(first.block_hashes) & set(third.block_hashes)  # the same block behind another one


def test_lengths_are_divided_by_32() -> None:
    rows = [TraceRequest(0.0, 700, 800, (1, 2)), TraceRequest(1.0, 640, 5), TraceRequest(2.0, 3, 5)]
    requests = simulated_requests(rows)
    assert [len(request.prompt_token_ids) for request in requests] == [32, 20, 1]
    assert [request.params.max_tokens for request in requests] == [25, 1, 1]
    assert longest(requests) == 32 + 25


def test_prompts_without_hash_ids_have_nothing_in_common() -> None:
    requests = simulated_requests([TraceRequest(float(index), 1024, 32) for index in range(10)])
    assert num_distinct_blocks(requests) == sum(len(request.block_hashes) for request in requests) == 20


def test_hash_ids_may_be_large() -> None:
    a, b = prompts([2**60, 1], [2**60, 2])
    assert a.block_hashes[0] == b.block_hashes[0]


def test_arrivals_are_sorted_and_begin_at_zero() -> None:
    requests = prompts([1], [2], [3], at=[30.0, 10.0, 20.0])
    assert [request.arrival_time for request in requests] == [0.0, 10.0, 20.0]


def test_times_are_stretched_to_a_rate_with_their_bursts() -> None:
    requests = at_rate(prompts([1], [2], [3], [4], at=[0.0, 0.0, 3.0, 6.0]), tokens_per_s=32.0)
    assert [request.arrival_time for request in requests] == pytest.approx([0.0, 0.0, 1.0, 2.0])
    assert num_prompt_tokens(requests) / requests[-1].arrival_time == pytest.approx(32.0)


def test_one_moment_stays_one() -> None:
    assert [request.arrival_time for request in at_rate(prompts([1], [2]), 10.0)] == [0.0, 0.0]


def test_cut_has_prefixes_in_common(cut: list[EngineRequest]) -> None:
    blocks = sum(len(request.block_hashes) for request in cut)
    assert len(cut) > 900
    assert num_distinct_blocks(cut) < 0.6 * blocks
