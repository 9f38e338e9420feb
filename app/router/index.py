"""What this process knows of each deployment's replicas: the one process-wide registry of the application.

A request router is made by Ray inside each process that holds a handle, from a class that Ray pickles by value, so
the router and the transport that sits beside it cannot share a module's globals: they meet here instead.

Two threads come here. Ray's router thread owns who is a member and where a call goes; the event loop of the process's
transport owns everything else (loads, KV blocks, which calls there are). A lock in each index keeps them apart; it is
never held while code of others runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine.outputs import EngineLoad

_indexes: dict[tuple[str, str], ReplicaIndex] = {}
_indexes_lock = threading.Lock()


def replica_index(app_name: str, deployment_name: str) -> ReplicaIndex:
    """The index of a deployment in this process."""
    with _indexes_lock:
        return _indexes.setdefault((app_name, deployment_name), ReplicaIndex())


class CachedBlocks:
    """The hashes of the blocks in one replica's prefix cache, kept up to date by its events.

    Every event has a number. A reader that finds a gap, its first event included, asks for a snapshot and goes on
    collecting events meanwhile. Events that are in the snapshot already may be applied again: the last event of a
    block decides.
    """

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self._next_seq: int | None = None
        self._awaiting_snapshot = False
        self._held_back: list[tuple[int, Sequence[KVEvent]]] = []

    def apply(self, seq: int, events: Sequence[KVEvent]) -> bool:
        """Takes in events, the first of which is number seq. True: something is missing, fetch a snapshot."""
        gap = seq != self._next_seq
        self._next_seq = seq + len(events)
        if gap and not self._awaiting_snapshot:
            self._awaiting_snapshot = True
            self._held_back = [(seq, events)]
            return True
        if self._awaiting_snapshot:
            self._held_back.append((seq, events))
        else:
            for event in events:
                self._apply_one(event)
        return False

    def restore(self, seq: int, stored: Iterable[BlockStored]) -> None:
        """Starts again from a snapshot that has every event below seq in it."""
        self.hashes = {block_hash for event in stored for block_hash in event.block_hashes}
        for first, events in self._held_back:
            for event in events[max(0, seq - first) :]:
                self._apply_one(event)
        self._held_back = []
        self._awaiting_snapshot = False

    def forget(self) -> None:
        """Whatever is known is old: the next event asks for a snapshot."""
        self._next_seq = None
        self._awaiting_snapshot = False
        self._held_back = []

    def _apply_one(self, event: KVEvent) -> None:
        match event:
            case BlockStored(block_hashes):
                self.hashes.update(block_hashes)
            case BlockRemoved(block_hashes):
                self.hashes.difference_update(block_hashes)
            case AllBlocksCleared():
                self.hashes.clear()


@dataclass(slots=True)
class ReplicaState:
    """One replica as this process sees it.

    Attributes:
        load: as the replica reported it last; None until it did.
        in_flight: requests that this process has there.
        is_lost: its stream broke, and nothing has come from it since.
    """

    load: EngineLoad | None = None
    in_flight: int = 0
    is_lost: bool = False
    blocks: CachedBlocks = field(default_factory=CachedBlocks)

    @property
    def requests(self) -> int:
        """Requests there, as well as it is known: the report covers other processes and lags by a step, our own
        count is exact and covers us alone."""
        reported = self.load.running + self.load.waiting if self.load else 0
        return max(reported, self.in_flight)

    @property
    def waiting(self) -> float:
        """Requests that wait there. A replica that is lost is as good as full: Ray may be slow to see that it died."""
        if self.is_lost:
            return math.inf
        return self.load.waiting if self.load else 0


@dataclass(slots=True)
class _Call:
    num_requests: int
    replica_id: str | None = None
    accepted: bool = False
    refused_by: set[str] = field(default_factory=set)


class ReplicaIndex:
    """The replicas of one deployment, and which of them this process's calls went to. Thread-safe.

    A call is one `generate`; its id is that of its first request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: frozenset[str] = frozenset()
        self._replicas: dict[str, ReplicaState] = {}
        self._calls: dict[str, _Call] = {}
        self._listeners: list[Callable[[], None]] = []

    # ---- called by the router, on its thread ----

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """Says which replicas take requests. One that leaves is remembered while calls of ours run on it."""
        with self._lock:
            members = frozenset(replica_ids)
            changed = members != self._members
            self._members = members
            for replica_id in members:
                self._replicas.setdefault(replica_id, ReplicaState())
            self._drop_strangers()
            listeners = list(self._listeners)
        if changed:
            for listener in listeners:
                listener()

    def assign(self, call_id: str, replica_id: str, *, accepted: bool = False) -> None:
        """Notes where a call goes; a later word for the same call replaces this one. Unknown calls are ignored.

        Args:
            accepted: the replica has taken it; before that it may die or refuse, and the call goes elsewhere.
        """
        with self._lock:
            call = self._calls.get(call_id)
            if call is None:
                return
            call.accepted = accepted
            if call.replica_id == replica_id:
                return
            self._release(call)
            call.replica_id = replica_id
            self._replicas.setdefault(replica_id, ReplicaState()).in_flight += call.num_requests

    def candidates(self, replica_ids: Collection[str]) -> list[tuple[str, int, float]]:
        """(id, requests, waiting requests) of each of the replicas."""
        with self._lock:
            states = [(replica_id, self._replicas.get(replica_id)) for replica_id in replica_ids]
            return [(i, state.requests, state.waiting) if state else (i, 0, 0) for i, state in states]

    def refusals(self, call_id: str) -> frozenset[str]:
        """The replicas that refused a call."""
        with self._lock:
            call = self._calls.get(call_id)
            return frozenset(call.refused_by) if call else frozenset()

    # ---- called by the transport, on its loop ----

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls listener, on the router's thread, after each change of the members. Returns what ends that."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    @property
    def members(self) -> frozenset[str]:
        return self._members

    def begin(self, call_id: str, num_requests: int) -> None:
        """Notes a call that is about to be routed."""
        with self._lock:
            self._calls[call_id] = _Call(num_requests)

    def refuse(self, call_id: str) -> bool:
        """Notes that the replica which was given a call refused it. True: there is one that has not."""
        with self._lock:
            call = self._calls.get(call_id)
            if call is None or call.replica_id is None or not call.accepted:
                return False
            call.refused_by.add(call.replica_id)
            self._release(call)
            call.replica_id, call.accepted = None, False
            return not self._members <= call.refused_by

    def end(self, call_id: str) -> None:
        """Forgets a call."""
        with self._lock:
            call = self._calls.pop(call_id, None)
            if call is not None:
                self._release(call)
                self._drop_strangers()

    def replica_of(self, call_id: str) -> str | None:
        """The replica that took a call; None until one has."""
        with self._lock:
            call = self._calls.get(call_id)
            return call.replica_id if call and call.accepted else None

    def in_flight(self, replica_id: str) -> int:
        with self._lock:
            state = self._replicas.get(replica_id)
            return state.in_flight if state else 0

    def record_load(self, replica_id: str, load: EngineLoad) -> None:
        with self._lock:
            if replica_id in self._replicas:
                self._replicas[replica_id].load = load
                self._replicas[replica_id].is_lost = False

    def lose(self, replica_id: str) -> None:
        """After its stream broke: what was known of it is old."""
        with self._lock:
            if replica_id in self._replicas:
                self._replicas[replica_id].is_lost = True
                self._replicas[replica_id].blocks.forget()

    def apply_events(self, replica_id: str, seq: int, events: Sequence[KVEvent]) -> bool:
        """See CachedBlocks.apply."""
        with self._lock:
            state = self._replicas.get(replica_id)
            return state.blocks.apply(seq, events) if state else False

    def restore_blocks(self, replica_id: str, seq: int, stored: Iterable[BlockStored]) -> None:
        """See CachedBlocks.restore."""
        with self._lock:
            if replica_id in self._replicas:
                self._replicas[replica_id].blocks.restore(seq, stored)

    def forget_blocks(self, replica_id: str) -> None:
        """After a snapshot that failed; see CachedBlocks.forget."""
        with self._lock:
            if replica_id in self._replicas:
                self._replicas[replica_id].blocks.forget()

    def cached_blocks(self, replica_id: str) -> frozenset[bytes]:
        with self._lock:
            state = self._replicas.get(replica_id)
            return frozenset(state.blocks.hashes) if state else frozenset()

    # ---- with the lock held ----

    def _release(self, call: _Call) -> None:
        if call.replica_id is not None and call.replica_id in self._replicas:
            self._replicas[call.replica_id].in_flight -= call.num_requests

    def _drop_strangers(self) -> None:
        gone = [i for i, s in self._replicas.items() if i not in self._members and s.in_flight <= 0]
        for replica_id in gone:
            del self._replicas[replica_id]
