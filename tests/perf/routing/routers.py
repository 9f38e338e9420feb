"""What the product's router is compared with: its transport and its bookkeeping, and another order of the replicas.

As `app.simulation.routers` has them; here Ray calls them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from ray.serve.request_router import PendingRequest, RunningReplica

from app.router.router import PrefixCacheRouter
from engine.request import EngineRequest

Ongoing = Callable[[str], int]
"""Requests on a replica, of all ingresses, as well as this one knows."""


class _OrderedRouter(PrefixCacheRouter):
    def _choose(self, candidates: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        ranks = super()._choose(candidates, pending)
        if len(ranks) < 2:
            return ranks  # it is pinned, or no `generate`, or there is no choice
        replicas = {rank[0].replica_id.unique_id: rank[0] for rank in ranks}
        requests: Sequence[EngineRequest] = pending.args[0]
        index, preferred = self._replica_index(), next(iter(replicas))

        def ongoing(replica_id: str) -> int:
            # The index has just counted this call where it would have sent it.
            counted = len(requests) if replica_id == preferred else 0
            return index._replicas[replica_id].requests - counted

        order = self._order(sorted(replicas), requests[0].block_hashes, ongoing)
        index.assign(requests[0].request_id, order[0])
        return [[replicas[each]] for each in order]

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        """Some of the replicas, best first."""
        raise NotImplementedError


class RoundRobinRouter(_OrderedRouter):
    """One after another."""

    _turn = 0

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        turn = self._turn % len(replica_ids)
        self._turn += 1
        return replica_ids[turn:] + replica_ids[:turn]


class LeastLoadedRouter(_OrderedRouter):
    """The replica with the fewest ongoing requests; equal ones in random order."""

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        return sorted(random.sample(replica_ids, len(replica_ids)), key=ongoing)


class PowerOfTwoRouter(_OrderedRouter):
    """Of two random replicas the one with fewer ongoing requests (Mitzenmacher 2001), as Ray Serve does by default."""

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        return sorted(random.sample(replica_ids, 2), key=ongoing)


class SessionHashingRouter(_OrderedRouter):
    """The same replica for all prompts of a session, by rendezvous hashing (Thaler and Ravishankar 1998).

    The second block of a prompt stands for its session: in Mooncake's traces all have the first one in common.
    """

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        key = b"".join(block_hashes[:2][-1:])
        return sorted(replica_ids, key=lambda each: hashlib.sha256(key + each.encode()).digest(), reverse=True)


_HERE = "tests.perf.routing.routers"

ROUTERS = {
    "round_robin": f"{_HERE}:RoundRobinRouter",
    "power_of_two": f"{_HERE}:PowerOfTwoRouter",
    "least_loaded": f"{_HERE}:LeastLoadedRouter",
    "session_hashing": f"{_HERE}:SessionHashingRouter",
    "prefix_cache": "app.router.router:PrefixCacheRouter",
}
"""A router's name, as the simulation calls it, to the import path of its class."""
