"""Ray's side of the router."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import PendingRequest

from app.router.index import ReplicaIndex
from app.router.router import PrefixCacheRouter
from tests.app.scripted_engine import request


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def call(method: str, *args: Any, **kwargs: Any) -> PendingRequest:
    metadata: Any = SimpleNamespace(call_method=method)
    return PendingRequest(list(args), kwargs, metadata, future=None)  # type: ignore[arg-type]


@pytest.fixture
def router() -> PrefixCacheRouter:
    """One that Ray has not connected to anything."""
    router = PrefixCacheRouter.__new__(PrefixCacheRouter)
    router._index = ReplicaIndex()
    router._index.set_members(["a", "b", "c"])
    return router


async def test_a_pinned_call_goes_to_its_replica_alone(router: PrefixCacheRouter) -> None:
    a, b = replica("a"), replica("b")
    assert await router.choose_replicas([a, b], call("outputs", pinned_to="b")) == [[b]]


async def test_a_call_pinned_to_a_replica_that_is_gone_can_go_anywhere_to_be_refused(router: PrefixCacheRouter) -> None:
    a, b = replica("a"), replica("b")
    assert await router.choose_replicas([a, b], call("outputs", pinned_to="gone")) == [[a, b]]


async def test_a_routed_call_counts_as_load_at_once(router: PrefixCacheRouter) -> None:
    assert router._index is not None
    replicas = [replica("a"), replica("b")]
    for i in range(10):
        router._index.begin(f"r{i}", [request(f"r{i}")])
        ranks = await router.choose_replicas(replicas, call("generate", (request(f"r{i}"),), "ingress"))
        assert [len(rank) for rank in ranks] == [1, 1]
    assert (router._index.in_flight("a"), router._index.in_flight("b")) == (5, 5)


async def test_where_ray_sent_a_call_overrules_the_choice(router: PrefixCacheRouter) -> None:
    assert router._index is not None
    router._index.begin("r", [request("r"), request("r2"), request("r3")])
    pending = call("generate", (request("r"),), "ingress")
    (chosen,) = (await router.choose_replicas([replica("a")], pending))[0]
    assert router._index.replica_of("r") is None, "it was chosen, but has not taken the call"
    router.on_request_routed(pending, replica("b").replica_id, None)
    assert chosen.replica_id.unique_id == "a"
    assert router._index.replica_of("r") == "b"
    assert (router._index.in_flight("a"), router._index.in_flight("b")) == (0, 3)
    assert [router._index._replicas[name].new_requests for name in "ab"] == [0, 3]


async def test_a_choice_that_fails_leaves_it_to_ray(router: PrefixCacheRouter) -> None:
    replicas = [replica("a"), replica("b")]
    nonsense = call("generate", "not a tuple of requests")
    assert await router.choose_replicas(replicas, nonsense) == [replicas]


async def test_a_call_that_no_replica_takes_is_retried_with_pauses(router: PrefixCacheRouter) -> None:
    pending = call("outputs", pinned_to="a")
    await router.choose_replicas([replica("a")], pending)
    assert pending.routing_context.should_backoff


def test_each_deployment_has_an_index_with_its_own_settings() -> None:
    routers = []
    for name, block_size in (("one", 16), ("two", 32)):
        router = PrefixCacheRouter.__new__(PrefixCacheRouter)
        router._deployment_id = SimpleNamespace(app_name="test-of-settings", name=name)  # type: ignore[assignment]
        router.initialize_state(block_size=block_size, max_queued_requests=4, num_ingresses=2)
        routers.append(router)
    first, second = [router._replica_index() for router in routers]
    assert first is not second
    assert (first.settings.block_size, second.settings.block_size) == (16, 32)
    assert routers[0]._replica_index() is first
