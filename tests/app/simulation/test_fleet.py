"""Replicas of a simulated fleet come and go, and no request is lost."""

from __future__ import annotations

import gc
import weakref

import pytest

from app.router.index import ReplicaIndex
from app.simulation.fleet import MemberState
from app.simulation.news import NewsTimes
from app.simulation.routers import RoundRobin
from tests.app.simulation.conftest import SLOW, MakeFleet, prompts, run_all

STEP = 0.01 + 16 * 0.001 + 0.0001


def test_requests_wait_at_the_ingress_for_the_first_replica(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(0)
    (request,) = prompts([1])
    fleet.submit(request)
    fleet.add_replica(startup_s=5.0)
    loop.run(until=4.0)
    assert (fleet.num_waiting, fleet.num_unfinished) == (1, 1)
    assert fleet.members["replica-0"].state is MemberState.STARTING
    loop.run()
    record = fleet.records[request.request_id]
    assert record.routed_at == fleet.members["replica-0"].serving_at == 5.0
    assert record.ttft == pytest.approx(5.0 + STEP)


def test_drained_replica_finishes_its_requests_and_gets_no_more(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(2, routers=[RoundRobin(0)])
    requests = prompts([1], [2], [3], [4], at=[0.0, 0.0, 0.02, 0.02], output=10)
    loop.at(0.01, lambda: fleet.drain("replica-0"))
    run_all(loop, fleet, requests)
    homes = [fleet.records[request.request_id].replica_id for request in requests]
    assert sorted(homes[:2]) == ["replica-0", "replica-1"]
    assert homes[2:] == ["replica-1", "replica-1"]
    drained = fleet.members["replica-0"]
    assert drained.state is MemberState.GONE
    assert drained.drained_at == 0.01
    assert drained.gone_at == fleet.records[f"request-{homes.index('replica-0')}"].finished_at


def test_idle_replica_goes_at_once(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(1)
    loop.at(1.0, lambda: fleet.drain("replica-0"))
    loop.run()
    assert fleet.members["replica-0"].gone_at == 1.0
    assert fleet.serving == []


def test_replica_that_is_starting_is_drained_without_having_served(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(0)
    fleet.add_replica(startup_s=5.0)
    loop.at(1.0, lambda: fleet.drain("replica-0"))
    loop.run()
    member = fleet.members["replica-0"]
    assert (member.state, member.serving_at, member.gone_at) == (MemberState.GONE, None, 1.0)
    assert fleet.serving == []


def test_replica_that_is_gone_is_given_back(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(2)
    run_all(loop, fleet, prompts([1], [2]))
    cores = [weakref.ref(replica.core) for replica in fleet.replicas.values()]
    fleet.drain("replica-0")
    loop.run()
    gc.collect()
    assert [core() is None for core in cores] == [True, False]
    assert list(fleet.members) == ["replica-0", "replica-1"]


def test_ongoing_requests_count_until_the_ingress_knows_of_their_end(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(1, news=NewsTimes(delay_s=1.0))
    for request in prompts([1], [2]):
        fleet.submit(request)
    loop.run(until=0.5)
    assert (fleet.num_unfinished, fleet.ongoing["replica-0"]) == (0, 2)
    loop.run()
    assert fleet.ongoing["replica-0"] == 0


def test_router_forgets_a_replica_that_is_gone(make_fleet: MakeFleet) -> None:
    index = ReplicaIndex()
    loop, fleet = make_fleet(2, routers=[index])
    run_all(loop, fleet, prompts([1, 2], [3, 4]))
    held = [each for each in fleet.members if index.cached_blocks(each)]
    assert held
    for replica_id in held:
        fleet.drain(replica_id)
    loop.run()
    assert not any(index.cached_blocks(each) for each in held)


def test_new_replica_gets_work_at_once(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(2)
    loop.at(0.05, fleet.add_replica)
    # Each step of theirs is full of others' prompts by then.
    busy = [list(range(100 * index, 100 * index + 20)) for index in range(20)]
    requests = prompts(*busy, [9001], [9002], at=[0.0] * 20 + [0.06, 0.06])
    run_all(loop, fleet, requests)
    homes = {fleet.records[f"request-{index}"].replica_id for index in (20, 21)}
    assert homes == {"replica-2"}


def test_slow_replica_gets_less(make_fleet: MakeFleet) -> None:
    loop, fleet = make_fleet(3)
    slow = fleet.add_replica(cost=SLOW)
    count = 400
    requests = prompts(*([index] for index in range(count)), at=[index * 0.009 for index in range(count)])
    run_all(loop, fleet, requests)
    sent = sum(record.replica_id == slow for record in fleet.records.values())
    assert 0 < sent < 0.6 * count / 4
