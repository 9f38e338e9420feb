"""Where a simulated ingress sends its requests: the seam to the real `ReplicaIndex`, and what it is compared with."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from app.transport import StreamItem
from engine import BlockStored, EngineRequest

# ---- orders of replicas, best first ----


def rotated(replica_ids: Collection[str], turn: int) -> list[str]:
    """Round robin: one after another, by their ids."""
    order = sorted(replica_ids)
    first = turn % len(order)
    return order[first:] + order[:first]


def first_turn(rng: random.Random) -> int:
    """A random one: several ingresses do not go around in step."""
    return rng.randrange(1 << 16)


def fewest_first(replica_ids: Collection[str], ongoing: Callable[[str], int], rng: random.Random) -> list[str]:
    """By ongoing requests; equal ones in random order."""
    shuffled = rng.sample(sorted(replica_ids), len(replica_ids))
    return sorted(shuffled, key=ongoing)


def fewer_of_two(replica_ids: Collection[str], ongoing: Callable[[str], int], rng: random.Random) -> list[str]:
    """Two random ones by ongoing requests (Mitzenmacher 2001), as Ray Serve does by default."""
    return fewest_first(rng.sample(sorted(replica_ids), min(2, len(replica_ids))), ongoing, rng)


def rendezvous(key: bytes, replica_ids: Collection[str]) -> list[str]:
    """By the hash of a key and their ids: when one comes or goes, only its own keys move.

    Source: Thaler and Ravishankar 1998 (rendezvous hashing).
    """
    return sorted(replica_ids, key=lambda each: hashlib.sha256(key + each.encode()).digest(), reverse=True)


def session_key(block_hashes: Sequence[bytes], common: Collection[bytes]) -> bytes:
    """A prompt's first block that is not common to all kinds of prompts; its last one where all are."""
    own = (each for each in block_hashes if each not in common)
    return next(own, block_hashes[-1] if block_hashes else b"")


# ---- routers ----


class Router(Protocol):
    """What an ingress asks and tells; `app.router.index.ReplicaIndex` is one.

    A call is the children of one prompt, and its id that of its first request.
    """

    def set_members(self, replica_ids: Iterable[str], /) -> None:
        """Says which replicas take requests."""
        ...

    def begin(self, call_id: str, requests: Sequence[EngineRequest], /) -> None:
        """A call is about to be routed."""
        ...

    def choose(self, call_id: str, replica_ids: Collection[str], /) -> Sequence[str]:
        """Replica ids, best first; the call goes to the first one."""
        ...

    def assign(self, call_id: str, replica_id: str, /, *, accepted: bool) -> None:
        """A replica took the call."""
        ...

    def receive(self, replica_id: str, item: StreamItem, /) -> bool:
        """News of a replica arrived. True: it is to be told what was in the cache before them."""
        ...

    def restore_blocks(self, replica_id: str, seq: int, stored: Iterable[BlockStored], /) -> None:
        """What a replica had in its cache before its event number seq."""
        ...

    def end(self, call_id: str, request_ids: Iterable[str], /) -> None:
        """A call has ended, with all its requests, as far as this ingress knows."""
        ...

    def drop(self, replica_id: str, /) -> None:
        """A replica that is no member is gone."""
        ...


class Ongoing:
    """Counts the ongoing requests of each replica, as exactly as one ingress can.

    Those that the replica reported, of all ingresses, and those of this one which the report does not count yet.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._reported: dict[str, int] = {}
        self._unreported: dict[str, dict[str, int]] = {}
        self._calls: dict[str, int] = {}

    def set_members(self, replica_ids: Iterable[str]) -> None:
        for replica_id in replica_ids:
            self._unreported.setdefault(replica_id, {})

    def begin(self, call_id: str, requests: Sequence[EngineRequest]) -> None:
        self._calls[call_id] = len(requests)

    def assign(self, call_id: str, replica_id: str, *, accepted: bool) -> None:
        self._unreported[replica_id][call_id] = self._calls[call_id]

    def receive(self, replica_id: str, item: StreamItem) -> bool:
        self._reported[replica_id] = item.load.running + item.load.waiting
        for call_id in item.known:
            self._unreported[replica_id].pop(call_id, None)
        return False

    def restore_blocks(self, replica_id: str, seq: int, stored: Iterable[BlockStored]) -> None:
        pass

    def end(self, call_id: str, request_ids: Iterable[str]) -> None:
        del self._calls[call_id]

    def drop(self, replica_id: str) -> None:
        self._reported.pop(replica_id, None)
        self._unreported.pop(replica_id, None)

    def ongoing(self, replica_id: str) -> int:
        return self._reported.get(replica_id, 0) + sum(self._unreported[replica_id].values())


class RoundRobin(Ongoing):
    """One after another."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._turn = first_turn(self._random)

    def choose(self, call_id: str, replica_ids: Collection[str]) -> list[str]:
        self._turn += 1
        return rotated(replica_ids, self._turn - 1)


class PowerOfTwo(Ongoing):
    """Of two random replicas the one with fewer ongoing requests."""

    def choose(self, call_id: str, replica_ids: Collection[str]) -> list[str]:
        return fewer_of_two(replica_ids, self.ongoing, self._random)


class LeastLoaded(Ongoing):
    """The replica with the fewest ongoing requests."""

    def choose(self, call_id: str, replica_ids: Collection[str]) -> list[str]:
        return fewest_first(replica_ids, self.ongoing, self._random)


class SessionHashing(Ongoing):
    """The same replica for all prompts of a session, whatever the load: rendezvous hashing of the session's key."""

    def __init__(self, seed: int, common: Collection[bytes]) -> None:
        """
        Args:
            common: hashes of blocks that say nothing about the session, such as a system prompt's.
        """
        super().__init__(seed)
        self._common = common
        self._keys: dict[str, bytes] = {}

    def begin(self, call_id: str, requests: Sequence[EngineRequest]) -> None:
        super().begin(call_id, requests)
        self._keys[call_id] = session_key(requests[0].block_hashes, self._common)

    def choose(self, call_id: str, replica_ids: Collection[str]) -> list[str]:
        return rendezvous(self._keys[call_id], replica_ids)

    def end(self, call_id: str, request_ids: Iterable[str]) -> None:
        super().end(call_id, request_ids)
        del self._keys[call_id]
