"""Routing over HTTP: the routers that ours is compared with, and what becomes of the figures. Nothing is started here.

tests/app/router/test_replay.py plays it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from ray.serve.request_router import PendingRequest

from app.cli.bench.client import Answer
from app.router.index import ReplicaIndex
from app.router.router import PrefixCacheRouter
from app.simulation.requests import simulated_requests
from app.simulation.routers import SessionHashing
from app.simulation.routing import common_blocks
from app.traces import TraceRequest, read_trace
from engine.request import EngineRequest
from tests.perf.routing.replay import CUT, summarise, within
from tests.perf.routing.routers import LeastLoadedRouter, PowerOfTwoRouter, RoundRobinRouter, SessionHashingRouter
from tests.perf.routing.turn import VOCABULARY, Turn, prompt_of

R = TypeVar("R", bound=PrefixCacheRouter)


def unconnected(kind: type[R], replicas: int = 3) -> R:
    """A router that Ray has not connected to anything."""
    router = kind.__new__(kind)
    router._index = ReplicaIndex()
    router._index.set_members(names(replicas))
    router.initialize_state()
    return router


def names(count: int) -> list[str]:
    return [f"replica-{number}" for number in range(count)]


def requests(*hash_ids: tuple[int, ...]) -> list[EngineRequest]:
    trace = [TraceRequest(second, 512 * len(ids), 32, ids) for second, ids in enumerate(hash_ids)]
    return simulated_requests(trace)


async def routed(router: PrefixCacheRouter, request: EngineRequest, count: int = 3, **kwargs: Any) -> list[str]:
    """The replicas that Ray would try, in this order."""
    assert router._index is not None
    router._index.begin(request.request_id, [request])
    replicas: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=each)) for each in names(count)]
    metadata: Any = SimpleNamespace(call_method="generate")
    pending = PendingRequest([(request,), "ingress"], kwargs, metadata, future=None)  # type: ignore[arg-type]
    return [rank[0].replica_id.unique_id for rank in await router.choose_replicas(replicas, pending)]


async def test_round_robin_goes_around_whatever_the_prompts() -> None:
    router = unconnected(RoundRobinRouter)
    firsts = [(await routed(router, each))[0] for each in requests(*[(0, 1)] * 6)]
    assert firsts[:3] == firsts[3:]
    assert set(firsts) == set(names(3))


async def test_round_robin_of_several_ingresses_does_not_go_around_in_step() -> None:
    (request,) = requests((0, 1))
    assert {(await routed(unconnected(RoundRobinRouter), request))[0] for _ in range(30)} == set(names(3))


async def test_least_loaded_fills_the_replica_with_fewest_requests() -> None:
    router = unconnected(LeastLoadedRouter)
    given = requests(*[(0, 1)] * 7)
    firsts = [(await routed(router, each))[0] for each in given]
    assert sorted(Counter(firsts).values()) == [2, 2, 3]
    assert router._index is not None
    for request, replica in zip(given, firsts, strict=True):
        if replica == "replica-1":
            router._index.end(request.request_id, [request.request_id])
    (last,) = requests((5,))
    assert (await routed(router, last))[0] == "replica-1"


async def test_power_of_two_never_takes_the_busiest() -> None:
    router = unconnected(PowerOfTwoRouter)
    assert router._index is not None
    for number, request in enumerate(requests(*[(0, 1)] * 9)):
        router._index.begin(request.request_id, [request])
        router._index.assign(request.request_id, names(3)[min(number, 2)], accepted=True)
    for number, (request,) in enumerate([requests((number,)) for number in range(20)]):
        order = await routed(router, request)
        assert len(order) == 2
        assert order[0] != "replica-2", number
        router._index.end(request.request_id, [request.request_id])


async def test_session_hashing_keeps_a_session_on_its_replica_and_spreads_sessions() -> None:
    router = unconnected(SessionHashingRouter)
    sessions = range(1, 30)
    given = requests(*[(0, each) for each in sessions], *[(0, each, 1000 + each) for each in sessions])
    firsts = [(await routed(router, each))[0] for each in given]
    assert firsts[: len(sessions)] == firsts[len(sessions) :]
    assert set(firsts) == set(names(3))


async def test_sessions_of_the_trace_go_where_the_simulation_sends_them() -> None:
    trace = simulated_requests(read_trace(CUT))
    router, simulated = unconnected(SessionHashingRouter), SessionHashing(0, common_blocks(trace))
    for request in trace[:100]:
        simulated.begin(request.request_id, [request])
        assert await routed(router, request) == simulated.choose(request.request_id, names(3))


@pytest.mark.parametrize("kind", [RoundRobinRouter, LeastLoadedRouter, PowerOfTwoRouter, SessionHashingRouter])
async def test_a_call_counts_where_it_goes_and_nowhere_else(kind: type[PrefixCacheRouter]) -> None:
    router = unconnected(kind)
    assert router._index is not None
    for request in requests((0, 1), (0, 1), (0, 2), (3,)):
        before = {each: router._index.in_flight(each) for each in names(3)}
        first = (await routed(router, request))[0]
        after = {each: router._index.in_flight(each) for each in names(3)}
        assert after == before | {first: before[first] + 1}


async def test_a_pinned_call_keeps_its_replica() -> None:
    router = unconnected(RoundRobinRouter)
    (request,) = requests((0,))
    assert await routed(router, request, pinned_to="replica-2") == ["replica-2"]


def test_prompts_share_what_the_trace_says_though_the_vocabulary_is_smaller() -> None:
    one, two, three = requests((7, 8), (7, 9), (8,))
    assert prompt_of(one)[:16] == prompt_of(two)[:16]
    assert prompt_of(one)[16:] == prompt_of(three) != prompt_of(two)[16:]
    alike = [prompt_of(replace(one, prompt_token_ids=(number,) * 16)) for number in (1, VOCABULARY + 1)]
    assert alike[0] != alike[1]
    assert max(map(max, alike)) < VOCABULARY


def test_requests_beyond_the_models_context_are_left_out_and_counted() -> None:
    given = requests(tuple(range(100)), (0, 1), (0, 2))
    fitting, num_left_out = within(given, 64)
    assert num_left_out == 1
    assert [len(each.prompt_token_ids) for each in fitting] == [32, 32]
    assert [each.arrival_time for each in fitting] == [0.0, 1.0]


def test_figures_are_of_all_requests_and_medians_of_turns() -> None:
    def answer(seconds: float, prompt: int, cached: int) -> Answer:
        return Answer(1.0, 9.0, (1.0 + seconds, 8.0), prompt, 2, None, cached)

    figures = Turn([answer(0.5, 300, 100), answer(1.5, 100, 100)], [150, 50]).figures
    assert figures["hit_ratio"] == 0.5
    assert figures["ttft_p50"] == 1.0
    assert figures["imbalance"] == 1.5
    turns = [figures | {"hit_ratio": value} for value in (0.1, 0.9, 0.3)]
    assert summarise({"ours": turns})["ours"] == figures | {"hit_ratio": 0.3}
