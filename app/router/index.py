"""What this process knows of each deployment's replicas: the one process-wide registry of the application.

A request router is made by Ray inside each process that holds a handle, from a class that Ray pickles by value, so
the router and the transport that sits beside it cannot share a module's globals: they meet here instead.

Two threads come here, and neither ever waits for the other: there is no lock. Ray's router thread decides who is a
member and where a call goes, and counts what is on its way to a replica. The event loop of the process's transport
writes everything else: which calls there are, what replicas report. What the router has to know of a call's progress
it finds in a queue before its next decision.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256

from app.router.cost import (
    MOST_SLOW,
    OTHERS_SHARE,
    SEAT_TOKENS,
    SEQUENCE_TOKENS,
    SPREAD_WEIGHT,
    PrefixUses,
    SentWork,
    load_cost,
    slowness,
)
from app.router.prefixes import PrefixIndex
from app.router.states import Call, ReplicaState, RoutingSettings
from app.transport import StreamItem
from engine.kv_cache.events import BlockStored
from engine.outputs import EngineLoad
from engine.request import EngineRequest
from engine.step_times import NO_STEPS, pooled

logger = logging.getLogger("ray.serve")

MIXER, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""Knuth's multiplicative hash: 64 bits, of which the high ones depend on all of those that go in."""

FULL = 1e15
"""What a replica costs that takes no more requests: more than any that does."""

_indexes: dict[tuple[str, str], ReplicaIndex] = {}


def replica_index(app_name: str, deployment_name: str) -> ReplicaIndex:
    """The index of a deployment in this process."""
    key = (app_name, deployment_name)
    # Of two threads that come at once, both get what the first one set.
    return _indexes.get(key) or _indexes.setdefault(key, ReplicaIndex())


class ReplicaIndex:
    """The replicas of one deployment, what they hold and how busy they are, and where this process's calls went.

    It needs no Ray: the router and the transport call it in a service, a simulation in theirs.
    """

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self.settings = settings or RoutingSettings()
        self.members: frozenset[str] = frozenset()
        self.prefixes = PrefixIndex()
        self._replicas: dict[str, ReplicaState] = {}
        self._free_bits: deque[int] = deque()
        self._num_bits = 0
        self._calls: dict[str, Call] = {}
        self._unstarted: dict[str, Call] = {}
        # For the router: calls that a load counts now, that have got a token, that were refused or have ended.
        self._known: deque[Call] = deque()
        self._started: deque[Call] = deque()
        self._listeners: list[Callable[[], None]] = []
        self._has_failed = False
        self._uses = PrefixUses()
        self._sent = SentWork()
        self._fleet_times = NO_STEPS
        self._reports_to_pool = 0

    # ---- called by the router, on its thread ----

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """Says which replicas take requests. One that leaves is remembered until the transport drops it."""
        members = frozenset(replica_ids)
        changed, self.members = members != self.members, members
        for replica_id in members:
            self._state(replica_id)
        if changed:
            for listener in list(self._listeners):
                listener()

    def choose(self, call_id: str, replica_ids: Collection[str]) -> list[str]:
        """Replica ids in the order in which to try them; the call counts on the first one from now on.

        Those that are cheapest for it come first (see `app.router.cost`), full ones last, and those that refused it not
        at all while there are others.
        """
        self._take_in_progress()
        call = self._calls.get(call_id) or Call(1, 0, (), has_ended=True)
        self._settle(call)  # Ray asks again where no replica took it
        states = {each: self._state(each) for each in replica_ids if each not in call.refused_by} or {
            each: self._state(each) for each in replica_ids
        }
        try:
            depths = self._depths(call, states.values())
            order = self._by_cost(call, states, depths, len(replica_ids))
        except Exception:
            if not self._has_failed:
                logger.exception("prefix_routing_failed fallback=load; said once")
            self._has_failed = True
            depths, order = {}, self._by_load(states)
        first = states[order[0]]
        if not call.is_noted:
            num_uncached = call.num_tokens - depths.get(first.bit, 0) * self.settings.block_size
            self._sent.note(first.bit, num_uncached, len(replica_ids))
            call.is_noted = True
        self._send(call, order[0], first, depths.get(first.bit, 0))
        return order

    def assign(self, call_id: str, replica_id: str, *, accepted: bool = False) -> None:
        """Notes where a call goes; a later word for the same call replaces this one. Unknown calls are ignored.

        Args:
            accepted: the replica has taken it; before that it may die or refuse, and the call goes elsewhere.
        """
        self._take_in_progress()
        call = self._calls.get(call_id)
        if call is None:
            return
        if call.replica_id != replica_id:
            # Ray chose it; what it has of the prompt is not worth a search.
            self._send(call, replica_id, self._state(replica_id), 0)
        call.accepted = accepted

    # ---- called by the transport, on its loop ----

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls listener, on the router's thread, after each change of the members. Returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def begin(self, call_id: str, requests: Sequence[EngineRequest]) -> None:
        """Notes a call that is about to be routed: the children of one prompt."""
        first = requests[0]
        # Prompt logprobs are of tokens that are computed, so that such a prompt finds nothing in a cache.
        finds_prefixes = self.settings.enable_prefix_caching and first.params.prompt_logprobs is None
        hashes = first.block_hashes if finds_prefixes else ()
        num_tokens = len(first.prompt_token_ids) + len(first.output_token_ids)
        call = Call(len(requests), num_tokens, hashes)
        self._calls[call_id] = call
        for request in requests:
            self._unstarted[request.request_id] = call

    def receive(self, replica_id: str, item: StreamItem) -> bool:
        """Takes in what a replica tells. True: KV events are missing, fetch a snapshot."""
        state = self._replicas.get(replica_id)
        if state is None:
            return False
        for output in item.outputs:
            call = self._unstarted.pop(output.request_id, None)
            if call is not None:
                call.has_started = True
                # A block that was found is told by no event, and may have been forgotten here.
                state.blocks.hold(call.block_hashes[: output.num_cached_tokens // self.settings.block_size])
                self.prefixes.touch(call.block_hashes)
                self._started.append(call)
        for call_id in item.known:
            if (call := self._calls.get(call_id)) is not None:
                self._known.append(call)
        self._record_load(state, item.load)
        # After what was found: an item of several steps can also say that it was removed since.
        return state.blocks.apply(item.kv_seq, item.kv_events)

    def refuse(self, call_id: str) -> bool:
        """Notes that the replica which was given a call refused it. True: there is one that has not."""
        call = self._calls.get(call_id)
        if call is None or call.replica_id is None or not call.accepted:
            return False
        call.refused_by.add(call.replica_id)
        call.replica_id, call.accepted, call.has_started = None, False, False
        self._started.append(call)
        return not self.members <= call.refused_by

    def end(self, call_id: str, request_ids: Iterable[str] = ()) -> None:
        """Forgets a call and its requests."""
        call = self._calls.pop(call_id, None)
        if call is not None:
            call.has_ended = True
            self.prefixes.touch(call.block_hashes)
            self._started.append(call)
        for request_id in request_ids:
            self._unstarted.pop(request_id, None)

    def replica_of(self, call_id: str) -> str | None:
        """The replica that took a call; None until one has."""
        call = self._calls.get(call_id)
        return call.replica_id if call and call.accepted else None

    def in_flight(self, replica_id: str) -> int:
        """Requests that this process has there. O(calls)."""
        return sum(call.num_requests for call in self._calls.values() if call.replica_id == replica_id)

    @property
    def known(self) -> frozenset[str]:
        """Members, and replicas that were some until they are dropped."""
        return frozenset(self._replicas)

    def lose(self, replica_id: str) -> None:
        """After its stream broke: what was known of it is old."""
        if state := self._replicas.get(replica_id):
            state.waiting = math.inf
            state.blocks.forget()

    def drop(self, replica_id: str) -> None:
        """Forgets a replica that takes no more requests, and what it held."""
        if replica_id not in self.members and (state := self._replicas.pop(replica_id, None)):
            self.prefixes.drop(state.bit)
            # What they would have left there is not to be found at the next one with this bit.
            self._started += [call for call in self._calls.values() if call.expected_on is state]
            self._free_bits.append(state.bit)

    def restore_blocks(self, replica_id: str, seq: int, stored: Iterable[BlockStored]) -> None:
        """See CachedBlocks.restore."""
        if state := self._replicas.get(replica_id):
            state.blocks.restore(seq, stored)

    def forget_blocks(self, replica_id: str) -> None:
        """After a snapshot that failed; see CachedBlocks.forget."""
        if state := self._replicas.get(replica_id):
            state.blocks.forget()

    def cached_blocks(self, replica_id: str) -> frozenset[bytes]:
        """What a replica is known to hold."""
        state = self._replicas.get(replica_id)
        return frozenset(state.blocks.hashes) if state else frozenset()

    def _record_load(self, state: ReplicaState, load: EngineLoad) -> None:
        state.load, state.waiting, state.load_cost = load, load.waiting, load_cost(load)
        state.held = load.running + load.waiting
        self._reports_to_pool -= 1
        if self._reports_to_pool <= 0:
            loads = [each.load for each in list(self._replicas.values()) if each.load is not None]
            self._fleet_times = pooled(each.step_times for each in loads)
            self._reports_to_pool = len(loads)
        state.slowness = slowness(load.step_times, self._fleet_times)
        state.spread_slowness = min(max(state.slowness, 1.0), MOST_SLOW)

    # ---- a decision ----

    def _depths(self, call: Call, states: Iterable[ReplicaState]) -> dict[int, int]:
        """How many of the prompt's blocks each replica has or will have, by its bit; nothing of those without any."""
        replicas = 0
        for state in states:
            replicas |= state.bit
        return self.prefixes.match(call.block_hashes, replicas)

    def _by_cost(
        self, call: Call, states: dict[str, ReplicaState], depths: dict[int, int], num_replicas: int
    ) -> list[str]:
        """The cheapest first.

        Where several cost the same, the prompt's hash decides: ingresses that know nothing send the same new prefix to
        the same place, and different ones everywhere.
        """
        size, deepest = self.settings.block_size, max(depths.values(), default=0)
        num_copies = sum(each == deepest for each in depths.values())
        prefix = call.block_hashes[deepest - 1] if deepest else None
        if not call.is_noted:
            self._uses.note(prefix, num_replicas)
        copy_weight = size * self._uses.copy_weight(prefix, num_copies)
        spread_weight = SPREAD_WEIGHT * call.num_tokens
        unseen = 1.0 + OTHERS_SHARE * (self.settings.num_ingresses - 1)
        full, seats = max(self.settings.max_queued_requests, 1), self.settings.max_num_seqs - call.num_requests
        depth_of, sent = depths.get, self._sent.shares([state.bit for state in states.values()])
        costs: list[tuple[float, str]] = []
        for (replica_id, state), share in zip(states.items(), sent, strict=True):
            cost = state.load_cost + copy_weight * (deepest - depth_of(state.bit, 0))
            if state.new_requests:
                cost += unseen * (state.new_tokens + SEQUENCE_TOKENS * state.new_requests)
            if (before := state.held + state.new_requests - seats) > 0:
                cost += SEAT_TOKENS * before
            cost = cost * state.slowness + spread_weight * share * state.spread_slowness
            costs.append((cost if state.waiting < full else cost + FULL, replica_id))
        costs.sort()
        order = [each[1] for each in costs]
        ties = sum(each[0] == costs[0][0] for each in costs)
        if ties > 1:
            key = _rank_key(call.block_hashes, deepest)
            order[:ties] = sorted(order[:ties], key=lambda each: (key ^ states[each].salt) * MIXER & MASK)
        return order

    def _by_load(self, states: dict[str, ReplicaState]) -> list[str]:
        full = max(self.settings.max_queued_requests, 1)
        loads = [(s.waiting >= full, s.requests, random.random(), replica_id) for replica_id, s in states.items()]
        return [each[3] for each in sorted(loads)]

    def _send(self, call: Call, replica_id: str, state: ReplicaState, depth: int) -> None:
        """Counts a call, and the blocks that it will leave, on a replica and no other.

        Args:
            depth: the blocks of its prompt that are there.
        """
        self._settle(call)
        call.replica_id = replica_id
        if call.has_ended or call.has_started:
            return
        call.counted_on, call.num_uncached = state, max(1, call.num_tokens - depth * self.settings.block_size)
        state.new_requests += call.num_requests
        state.new_tokens += call.num_uncached
        call.expected_on, call.coming = state, call.block_hashes[depth:]
        self.prefixes.expect(state.bit, call.coming)

    def _take_in_progress(self) -> None:
        while self._known:
            self._uncount(self._known.popleft())
        while self._started:
            self._settle(self._started.popleft())

    def _settle(self, call: Call) -> None:
        self._uncount(call)
        if call.expected_on is not None:
            self.prefixes.arrived(call.expected_on.bit, call.coming)
            call.expected_on = None

    def _uncount(self, call: Call) -> None:
        if call.counted_on is not None:
            call.counted_on.new_requests -= call.num_requests
            call.counted_on.new_tokens -= call.num_uncached
            call.counted_on = None

    def _state(self, replica_id: str) -> ReplicaState:
        state = self._replicas.get(replica_id)
        if state is None:
            if self._free_bits:
                bit = self._free_bits.popleft()
            else:
                bit = 1 << self._num_bits
                self._num_bits += 1
            self._sent.drop(bit)
            salt = _number(sha256(replica_id.encode()).digest())
            state = self._replicas[replica_id] = ReplicaState(bit, salt, self.prefixes.blocks_of(bit))
        return state


def _rank_key(block_hashes: Sequence[bytes], depth: int) -> int:
    """What stands for a prompt among equal replicas: its first block that none of them has."""
    if not block_hashes:
        return random.getrandbits(64)
    return _number(block_hashes[min(depth, len(block_hashes) - 1)])


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
