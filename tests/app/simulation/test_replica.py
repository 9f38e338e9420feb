"""A simulated replica's times are those that its constants say."""

from __future__ import annotations

import pytest

from app.simulation.step_cost import H200
from tests.app.simulation.conftest import SLOW, MakeFleet, prompts, run_all


def test_request_alone_takes_what_the_constants_say(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet()
    run_all(loop, fleet, prompts([1, 2, 3], output=3))
    record = fleet.records["request-0"]
    # 48 tokens in 3 blocks; then a token each in the fourth block.
    prefill, decode = 0.01 + 48 * 0.001 + 3 * 0.0001, 0.01 + 0.001 + 4 * 0.0001
    assert record.ttft == pytest.approx(prefill)
    assert record.finished_at == pytest.approx(prefill + 2 * decode)


def test_prompt_longer_than_a_step_takes_several(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(max_num_batched_tokens=32, max_num_seqs=8)
    run_all(loop, fleet, prompts([1, 2, 3]))
    assert fleet.records["request-0"].ttft == pytest.approx(2 * 0.01 + 48 * 0.001 + (2 + 3) * 0.0001)


def test_cached_prefix_takes_no_time(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet()
    run_all(loop, fleet, prompts([1, 2, 3], [1, 2, 4], at=[0.0, 1.0]))
    record = fleet.records["request-1"]
    assert record.num_cached_tokens == 32
    assert record.ttft == pytest.approx(0.01 + 16 * 0.001 + 3 * 0.0001)


def test_requests_that_come_during_a_step_wait_for_its_end(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet()
    run_all(loop, fleet, prompts([1], [2], [3], at=[0.0, 0.001, 0.002]))
    first, second, third = (fleet.records[f"request-{index}"] for index in range(3))
    step = 0.01 + 16 * 0.001 + 0.0001
    assert first.first_token_at == pytest.approx(step)
    both = step + 0.01 + 32 * 0.001 + 2 * 0.0001
    assert second.first_token_at == third.first_token_at == pytest.approx(both)


def test_requests_of_one_moment_share_a_step(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet()
    run_all(loop, fleet, prompts([1], [2]))
    step = 0.01 + 32 * 0.001 + 2 * 0.0001
    assert [record.ttft for record in fleet.records.values()] == pytest.approx([step, step])


def test_replica_may_be_slower_than_the_others(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(0)
    fleet.add_replica(cost=SLOW)
    run_all(loop, fleet, prompts([1]))
    assert fleet.records["request-0"].ttft == pytest.approx(3 * (0.01 + 16 * 0.001 + 0.0001))


def test_h200_class_is_that_of_an_8b_model() -> None:
    assert H200.block_s == pytest.approx(2 * 1024**2 / 4e12)
    assert H200.prefill_rate(2048) == pytest.approx(2048 / (0.005 + 2048 / 50_000))
