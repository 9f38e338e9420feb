"""What the real router makes of a real trace, against others and against the ideal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from app.router.index import ReplicaIndex
from app.simulation.news import NewsTimes
from app.simulation.requests import at_rate
from app.simulation.routing import RoutingSetup, figures_of, ideal_hit_ratio, replay, router_makers, setup_for
from engine import EngineRequest
from engine.kv_cache.kv_cache_manager import KVCacheManager
from tests.app.simulation.conftest import MakeFleet, check_ended, prompts, run_all

FRACTION = 0.25
OTHERS = ("round_robin", "power_of_two", "least_loaded", "session_hashing")


def scaled(cut: list[EngineRequest], load: float, **settings: Any) -> tuple[list[EngineRequest], RoutingSetup]:
    setup = setup_for(cut, cache_fraction=FRACTION, **settings)
    return at_rate(cut, load * setup.num_replicas * setup.prefill_rate), setup


def results(requests: list[EngineRequest], setup: RoutingSetup, *names: str) -> dict[str, dict[str, Any]]:
    makers = router_makers(requests, setup)
    found = {}
    for name in names or makers:
        fleet = replay(requests, setup, makers[name])
        check_ended(fleet, requests)
        found[name] = figures_of(fleet.records.values(), setup)
    return found


@pytest.mark.parametrize("load", [0.3, 0.8, 1.2])
def test_prefixes_are_found_and_first_tokens_come_soonest(cut: list[EngineRequest], load: float) -> None:
    requests, setup = scaled(cut, load, num_replicas=4)
    found = results(requests, setup)
    ours = found.pop("prefix_cache")
    assert set(found) == set(OTHERS)
    ideal = ideal_hit_ratio(requests, 4 * setup.num_kv_blocks)
    assert ours["hit_ratio"] >= 0.9 * ideal
    for other in found.values():
        assert ours["ttft_p50"] <= other["ttft_p50"]
        assert ours["ttft_p99"] < 0.9 * other["ttft_p99"]
    assert ours["imbalance"] < 1.1


def test_several_ingresses_do_nearly_as_well_as_one(cut: list[EngineRequest]) -> None:
    requests, setup = scaled(cut, 0.8, num_replicas=4, num_ingresses=3)
    found = results(requests, setup, "prefix_cache", "least_loaded")
    one = results(*scaled(cut, 0.8, num_replicas=4), "prefix_cache")["prefix_cache"]
    assert found["prefix_cache"]["hit_ratio"] > 0.8 * one["hit_ratio"]
    assert found["prefix_cache"]["ttft_p99"] < found["least_loaded"]["ttft_p99"]


def test_requests_that_can_never_run_are_told() -> None:
    requests = prompts([1], [2], at=[0.0, 5.0])
    nobody = replace(setup_for(requests, num_replicas=1, cache_fraction=1.0), num_replicas=0)
    with pytest.raises(RuntimeError, match="2 requests can never run"):
        replay(requests, nobody, router_makers(requests, nobody)["prefix_cache"])


def test_ideal_is_one_cache_that_all_share() -> None:
    requests = prompts([1, 2, 3], [1, 2, 4], [5, 6, 7])
    # The last token of a prompt is always computed, and with it its block.
    assert ideal_hit_ratio(requests, 64) == pytest.approx(2 / 9)
    assert ideal_hit_ratio(requests + prompts([1, 2, 3]), 64) == pytest.approx(4 / 12)
    assert ideal_hit_ratio(requests + prompts([1, 2, 3]), 3) == pytest.approx(2 / 12)  # evicted


def test_ideal_cache_keeps_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[KVCacheManager] = []

    def noted(*args: Any, **kwargs: Any) -> KVCacheManager:
        caches.append(KVCacheManager(*args, **kwargs))
        return caches[-1]

    monkeypatch.setattr("app.simulation.routing.KVCacheManager", noted)
    ideal_hit_ratio(prompts([1, 2, 3], [1, 2, 4]), 64)
    assert [cache.take_events() for cache in caches] == [[]]


def test_blocks_are_raised_to_what_the_longest_request_needs(cut: list[EngineRequest]) -> None:
    assert not setup_for(cut, num_replicas=4, cache_fraction=FRACTION).is_raised
    tiny = setup_for(cut, num_replicas=4, cache_fraction=0.001)
    assert tiny.is_raised
    requests = at_rate(cut[:50], tiny.prefill_rate)
    check_ended(replay(requests, tiny, router_makers(requests, tiny)["prefix_cache"]), requests)


def test_figures_are_those_of_the_records(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(1)
    requests = prompts([1, 2], [1, 3], at=[0.0, 1.0])
    run_all(loop, fleet, requests)
    setup = setup_for(requests, num_replicas=1, cache_fraction=1.0)
    figures = figures_of(fleet.records.values(), setup)
    times = [record.ttft for record in fleet.records.values()]
    assert figures["hit_ratio"] == 16 / 64
    assert figures["ttft_mean"] == figures["ttft_p50"] == pytest.approx(sum(times) / 2)
    assert figures["imbalance"] == 1.0
    assert figures["seconds"] == fleet.records["request-1"].finished_at
    assert figures["prefill_utilisation"] == pytest.approx(48 / (setup.prefill_rate * figures["seconds"]))


# ---- the real router between two pieces of news ----


def test_burst_of_different_prompts_is_spread(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(4, blocks=256, news=NewsTimes(delay_s=10.0))
    requests = prompts(*(list(range(100 * index, 100 * index + 8)) for index in range(40)))
    run_all(loop, fleet, requests)
    counts = Counter(record.replica_id for record in fleet.records.values())
    assert len(counts) == 4
    assert max(counts.values()) <= 13


def test_hot_prefix_spreads_to_a_second_replica(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(4, blocks=512, routers=[ReplicaIndex()])
    prefix = list(range(20))
    count = 300
    requests = prompts(
        *([*prefix, *range(1000 + 10 * index, 1005 + 10 * index)] for index in range(count)),
        at=[0.02 * index for index in range(count)],
    )
    run_all(loop, fleet, requests)
    records = fleet.records.values()
    assert len({record.replica_id for record in records}) == 4
    # Each replica computed the prefix once or twice, not for each prompt.
    cached = sum(record.num_cached_tokens for record in records)
    assert cached > 0.9 * 16 * len(prefix) * count
