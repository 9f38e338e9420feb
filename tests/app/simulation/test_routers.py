"""The routers that the prefix cache's is compared with."""

from __future__ import annotations

from collections import Counter

import pytest

from app.simulation.news import NewsTimes
from app.simulation.routers import LeastLoaded, PowerOfTwo, RoundRobin, Router, SessionHashing
from app.simulation.routing import common_blocks
from tests.app.simulation.conftest import MakeFleet, prompts, run_all


def homes(
    make_fleet: MakeFleet, replicas: int, router: Router, *blocks: list[int], at: float = 0.0
) -> list[str | None]:
    loop, fleet = make_fleet(replicas, routers=[router])
    requests = prompts(*blocks, at=at)
    run_all(loop, fleet, requests)
    return [fleet.records[request.request_id].replica_id for request in requests]


def test_round_robin_goes_around(make_fleet: MakeFleet) -> None:
    found = homes(make_fleet, 3, RoundRobin(0), *([index] for index in range(6)))
    assert found[:3] == found[3:]
    assert set(found) == {"replica-0", "replica-1", "replica-2"}


def test_least_loaded_spreads_a_burst_evenly(make_fleet: MakeFleet) -> None:
    found = homes(make_fleet, 4, LeastLoaded(0), *([index] for index in range(40)))
    assert set(Counter(found).values()) == {10}


def test_power_of_two_takes_the_less_loaded_of_two(make_fleet: MakeFleet) -> None:
    # Of two replicas both are always drawn.
    found = homes(make_fleet, 2, PowerOfTwo(0), *([index] for index in range(10)))
    assert Counter(found) == {"replica-0": 5, "replica-1": 5}
    many = Counter(homes(make_fleet, 8, PowerOfTwo(0), *([index] for index in range(80))))
    assert max(many.values()) > min(many.values())


def test_ongoing_requests_of_other_ingresses_count_once_they_are_reported(make_fleet: MakeFleet) -> None:
    routers = [LeastLoaded(0), LeastLoaded(1)]
    loop, fleet = make_fleet(2, routers=routers, news=NewsTimes(delay_s=0.0, quiet_s=0.001))
    requests = prompts([1], [2], [3], [4], at=[0.0, 0.0, 0.1, 0.1], output=50)
    for request in requests:
        fleet.submit(request)
    loop.run(until=0.09)
    for router in routers:
        assert sum(router.ongoing(replica_id) for replica_id in fleet.serving) == 2
    loop.run()
    assert [router.ongoing(replica_id) for router in routers for replica_id in fleet.serving] == [0] * 4


def test_session_keeps_its_replica_and_sessions_are_spread(make_fleet: MakeFleet) -> None:
    blocks = [[0, 10 + session, 100 * session + turn] for turn in range(3) for session in range(30)]
    requests = prompts(*blocks)
    common = common_blocks(requests)
    assert common == {requests[0].block_hashes[0]}
    found = homes(make_fleet, 4, SessionHashing(0, common), *blocks)
    assert found[:30] == found[30:60] == found[60:]
    assert set(found) == {f"replica-{index}" for index in range(4)}


@pytest.mark.parametrize("blocks", [[0], []])
def test_prompt_without_a_block_of_its_own_has_a_key_all_the_same(make_fleet: MakeFleet, blocks: list[int]) -> None:
    request = prompts(blocks or [7])[0]
    router = SessionHashing(0, frozenset(request.block_hashes) if blocks else frozenset())
    router.set_members(["a", "b"])
    router.begin("call", (request,))
    assert router.choose("call", ["a", "b"]) == router.choose("call", ["b", "a"])


def test_only_the_sessions_of_a_replica_that_goes_move() -> None:
    requests = prompts(*([index] for index in range(100)))
    router = SessionHashing(0, frozenset())
    first: dict[str, str] = {}
    for request in requests:
        router.begin(request.request_id, (request,))
        first[request.request_id] = router.choose(request.request_id, ["a", "b", "c", "d"])[0]
    for call_id, replica_id in first.items():
        after = router.choose(call_id, ["a", "b", "c"])[0]
        assert after == replica_id or replica_id == "d"
