"""Where a request goes, and what a process knows of its replicas."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.request_router import PendingRequest

from app.router.index import CachedBlocks, ReplicaIndex
from app.router.router import LoadRouter, rank_by_load
from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine.outputs import EngineLoad
from tests.app.scripted_engine import request


def busy(running: int, waiting: int = 0) -> EngineLoad:
    return EngineLoad(running, waiting, 0, 0, 100)


# ---- ranking ----


def test_of_two_replicas_the_less_loaded_comes_first() -> None:
    for seed in range(20):
        assert rank_by_load([("a", 5, 0), ("b", 3, 0)], 10, random.Random(seed).sample) == ["b", "a"]


def test_equal_replicas_share_the_requests() -> None:
    rng = random.Random(0)
    first = [rank_by_load([("a", 2, 0), ("b", 2, 0), ("c", 2, 0)], 10, rng.sample)[0] for _ in range(300)]
    assert all(60 < first.count(name) < 140 for name in "abc")


def test_a_replica_with_a_full_queue_comes_last_whatever_its_load() -> None:
    for seed in range(20):
        order = rank_by_load([("full", 1, 4), ("a", 90, 3), ("b", 80, 0)], 4, random.Random(seed).sample)
        assert order == ["b", "a", "full"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 5),
    st.integers(0, 1000),
)
def test_every_replica_is_ranked_once_and_a_full_one_first_only_if_all_are(
    loads: list[tuple[int, int]], max_waiting: int, seed: int
) -> None:
    candidates = [(str(i), requests, waiting) for i, (requests, waiting) in enumerate(loads)]
    order = rank_by_load(candidates, max_waiting, random.Random(seed).sample)
    assert sorted(order) == sorted(c[0] for c in candidates)
    full = {c[0] for c in candidates if c[2] >= max(max_waiting, 1)}
    assert order[0] not in full or len(full) == len(candidates)


# ---- the router ----


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def call(method: str, *args: Any, **kwargs: Any) -> PendingRequest:
    metadata: Any = SimpleNamespace(call_method=method)
    return PendingRequest(list(args), kwargs, metadata, future=None)  # type: ignore[arg-type]


@pytest.fixture
def router() -> LoadRouter:
    """One that Ray has not connected to anything."""
    router = LoadRouter.__new__(LoadRouter)
    router._index = ReplicaIndex()
    router.initialize_state(max_queued_requests=4)
    router._index.set_members(["a", "b", "c"])
    return router


async def test_a_pinned_call_goes_to_its_replica_alone(router: LoadRouter) -> None:
    a, b = replica("a"), replica("b")
    assert await router.choose_replicas([a, b], call("outputs", pinned_to="b")) == [[b]]


async def test_a_call_pinned_to_a_replica_that_is_gone_can_go_anywhere_to_be_refused(router: LoadRouter) -> None:
    a, b = replica("a"), replica("b")
    assert await router.choose_replicas([a, b], call("outputs", pinned_to="gone")) == [[a, b]]


async def test_a_routed_call_counts_as_load_at_once(router: LoadRouter) -> None:
    assert router._index is not None
    replicas = [replica("a"), replica("b")]
    for i in range(10):
        router._index.begin(f"r{i}", 1)
        ranks = await router.choose_replicas(replicas, call("generate", (request(f"r{i}"),), "ingress"))
        assert [len(rank) for rank in ranks] == [1, 1]
    assert (router._index.in_flight("a"), router._index.in_flight("b")) == (5, 5)


async def test_where_ray_sent_a_call_overrules_the_choice(router: LoadRouter) -> None:
    assert router._index is not None
    router._index.begin("r", 3)
    pending = call("generate", (request("r"),), "ingress")
    (chosen,) = (await router.choose_replicas([replica("a")], pending))[0]
    assert router._index.replica_of("r") is None, "it was chosen, but has not taken the call"
    router.on_request_routed(pending, replica("b").replica_id, None)
    assert chosen.replica_id.unique_id == "a"
    assert router._index.replica_of("r") == "b"
    assert (router._index.in_flight("a"), router._index.in_flight("b")) == (0, 3)


async def test_replicas_that_refused_a_call_are_left_out_while_there_are_others(router: LoadRouter) -> None:
    index = router._index
    assert index is not None
    replicas = [replica("a"), replica("b")]
    index.set_members(["a", "b"])
    pending = call("generate", (request("r"),), "ingress")
    index.begin("r", 1)
    router.on_request_routed(pending, replicas[0].replica_id, None)
    assert index.refuse("r"), "b is left"
    assert (index.in_flight("a"), index.replica_of("r")) == (0, None)
    for _ in range(10):
        assert await router.choose_replicas(replicas, pending) == [[replicas[1]]]
    assert not index.refuse("r"), "it is given to b, which has not answered"
    router.on_request_routed(pending, replicas[1].replica_id, None)
    assert not index.refuse("r"), "nobody is left"
    assert len(await router.choose_replicas(replicas, pending)) == 2


async def test_a_choice_that_fails_leaves_it_to_ray(router: LoadRouter) -> None:
    replicas = [replica("a"), replica("b")]
    nonsense = call("generate", "not a tuple of requests")
    assert await router.choose_replicas(replicas, nonsense) == [replicas]


async def test_a_call_that_no_replica_takes_is_retried_with_pauses(router: LoadRouter) -> None:
    pending = call("outputs", pinned_to="a")
    await router.choose_replicas([replica("a")], pending)
    assert pending.routing_context.should_backoff


# ---- the index ----


def test_requests_on_a_replica_are_what_it_reports_or_what_we_sent() -> None:
    index = ReplicaIndex()
    index.set_members(["a"])
    index.begin("x", 4)
    index.assign("x", "a")
    assert index.candidates(["a"]) == [("a", 4, 0)]
    index.record_load("a", busy(6, 2))
    assert index.candidates(["a"]) == [("a", 8, 2)]
    index.record_load("a", busy(0))
    assert index.candidates(["a"]) == [("a", 4, 0)]
    index.end("x")
    assert index.candidates(["a"]) == [("a", 0, 0)]


def test_a_replica_that_left_is_remembered_until_its_calls_end() -> None:
    index = ReplicaIndex()
    index.set_members(["a", "b"])
    index.begin("x", 1)
    index.assign("x", "a")
    index.record_load("b", busy(1))
    index.set_members([])
    assert index.in_flight("a") == 1
    assert index.candidates(["b"]) == [("b", 0, 0)]
    index.end("x")
    assert index.in_flight("a") == 0


def test_a_call_that_ended_before_it_was_routed_leaves_nothing_behind() -> None:
    index = ReplicaIndex()
    index.set_members(["a"])
    index.begin("x", 1)
    index.end("x")
    index.assign("x", "a")
    assert (index.in_flight("a"), index.replica_of("x")) == (0, None)


def test_listeners_hear_changes_of_members_alone() -> None:
    index = ReplicaIndex()
    heard: list[frozenset[str]] = []
    unsubscribe = index.subscribe(lambda: heard.append(index.members))
    index.set_members(["a"])
    index.set_members(["a"])
    index.set_members(["a", "b"])
    unsubscribe()
    index.set_members([])
    assert heard == [{"a"}, {"a", "b"}]


@st.composite
def kv_events(draw: st.DrawFn) -> list[KVEvent]:
    block = st.integers(0, 5).map(lambda i: bytes([i]))
    blocks = st.lists(block, min_size=1, max_size=3).map(tuple)
    one = st.one_of(blocks.map(lambda b: BlockStored(b, None)), blocks.map(BlockRemoved), st.just(AllBlocksCleared()))
    return draw(st.lists(one, max_size=30))


def contents(events: list[KVEvent]) -> set[bytes]:
    blocks = CachedBlocks()
    blocks._next_seq = 0
    assert not blocks.apply(0, events)
    return blocks.hashes


@given(kv_events(), st.data())
def test_blocks_are_right_after_any_gap_and_late_snapshot(events: list[KVEvent], data: st.DataObject) -> None:
    """A reader that starts, or loses messages, anywhere; a snapshot taken later than the number it bears."""
    blocks = CachedBlocks()
    pending_snapshot: tuple[int, set[bytes]] | None = None
    i = 0
    while i < len(events):
        size = data.draw(st.integers(1, 4))
        part = events[i : i + size]
        lost = data.draw(st.booleans()) and pending_snapshot is None
        if not lost and blocks.apply(i, part):
            taken_at = data.draw(st.integers(i, min(i + size, len(events))))
            pending_snapshot = (data.draw(st.integers(i, taken_at)), contents(events[:taken_at]))
        i += len(part)
        if pending_snapshot is not None and data.draw(st.booleans()):
            seq, hashes = pending_snapshot
            blocks.restore(seq, [BlockStored(tuple(sorted(hashes)), None)])
            pending_snapshot = None
    if blocks.apply(len(events), []):
        pending_snapshot = (len(events), contents(events))
    if pending_snapshot is not None:
        seq, hashes = pending_snapshot
        blocks.restore(seq, [BlockStored(tuple(sorted(hashes)), None)])
    assert blocks.hashes == contents(events)
