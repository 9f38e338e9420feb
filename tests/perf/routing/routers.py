"""What the product's router is compared with: its transport and its bookkeeping, and another order of the replicas.

The orders are those of `app.simulation.routers`; here Ray asks for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica

from app.router.router import PrefixCacheRouter
from app.simulation.routers import fewer_of_two, fewest_first, first_turn, rendezvous, rotated, session_key
from engine.request import EngineRequest

Ongoing = Callable[[str], int]
"""Requests on a replica, of all ingresses, as well as this one knows."""


class _OrderedRouter(PrefixCacheRouter):
    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(**settings)
        self._random = random.Random()

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

        order = self._order(list(replicas), requests[0].block_hashes, ongoing)
        index.assign(requests[0].request_id, order[0])
        return [[replicas[each]] for each in order]

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        """Some of the replicas, best first."""
        raise NotImplementedError


class RoundRobinRouter(_OrderedRouter):
    """One after another."""

    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(**settings)
        self._turn = first_turn(self._random)

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        self._turn += 1
        return rotated(replica_ids, self._turn - 1)


class LeastLoadedRouter(_OrderedRouter):
    """The replica with the fewest ongoing requests."""

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        return fewest_first(replica_ids, ongoing, self._random)


class PowerOfTwoRouter(_OrderedRouter):
    """Of two random replicas the one with fewer ongoing requests."""

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        return fewer_of_two(replica_ids, ongoing, self._random)


class SessionHashingRouter(_OrderedRouter):
    """The same replica for all prompts of a session. In Mooncake's traces all have the first block in common."""

    def _order(self, replica_ids: list[str], block_hashes: Sequence[bytes], ongoing: Ongoing) -> list[str]:
        return rendezvous(session_key(block_hashes, block_hashes[:1]), replica_ids)


_HERE = "tests.perf.routing.routers"

ROUTERS = {
    "round_robin": f"{_HERE}:RoundRobinRouter",
    "power_of_two": f"{_HERE}:PowerOfTwoRouter",
    "least_loaded": f"{_HERE}:LeastLoadedRouter",
    "session_hashing": f"{_HERE}:SessionHashingRouter",
    "prefix_cache": "app.router.router:PrefixCacheRouter",
}
"""A router's name, as the simulation calls it, to the import path of its class."""
