"""The request router of LLM deployments: calls pinned to one replica, and the least loaded replica for the others."""

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.router.index import ReplicaIndex, replica_index

logger = logging.getLogger("ray.serve")

PIN = "pinned_to"
"""Keyword argument of a call that must go to the replica of this id; the replica checks that it did."""

ROUTED_METHOD = "generate"
"""The method whose calls are placed by load; its first argument are the requests."""


def rank_by_load(
    candidates: Sequence[tuple[str, int, float]], max_waiting: int, choose: Callable[[list[Any], int], list[Any]]
) -> list[str]:
    """Replica ids in the order in which to try them.

    Two of the replicas that still take waiting requests are drawn and the one with fewer requests comes first (power
    of two choices, Mitzenmacher 2001: several routers with equal and slightly old news do not all run to the same
    replica); the others follow by their number of requests, full ones last.

    Args:
        candidates: (id, requests, waiting requests) of each.
        max_waiting: from this many waiting requests on a replica is full.
        choose: random.sample, or what stands for it.
    """

    def cost(candidate: tuple[str, int, float]) -> tuple[bool, int]:
        return candidate[2] >= max(max_waiting, 1), candidate[1]

    shuffled = choose(list(candidates), len(candidates))
    open_ones = [c for c in shuffled if not cost(c)[0]] or shuffled
    first = min(open_ones[:2], key=cost, default=None)
    rest = sorted((c for c in shuffled if c is not first), key=cost)
    return [c[0] for c in ([first, *rest] if first else rest)]


class LoadRouter(RequestRouter):
    """Runs on Ray's router thread in every process that holds a handle; its knowledge is in the replica index.

    It places each request by itself (no FIFOMixin): a call that is pinned must not be given another's replica.
    """

    _max_waiting = 0
    _index: ReplicaIndex | None = None

    def initialize_state(self, max_queued_requests: int = 0, **_: Any) -> None:
        """Takes the router's arguments from the deployment's configuration."""
        self._max_waiting = max_queued_requests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order of preference, one a rank, so that Ray's own queue lengths do not overrule it."""
        if pending_request is None:
            return [candidate_replicas]
        # Without this Ray asks again without a pause for as long as no replica takes the request.
        pending_request.routing_context.should_backoff = True
        try:
            return self._choose(candidate_replicas, pending_request)
        except Exception:
            # Ray would leave the request waiting for ever; its own queue lengths are a fair second choice.
            logger.exception("choose_replicas_failed")
            return [candidate_replicas]

    def _choose(self, candidates: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        pin = pending.kwargs.get(PIN)
        if pin in by_id:
            return [[by_id[pin]]]
        if pin is not None or pending.metadata.call_method != ROUTED_METHOD:
            # A pinned replica that is gone does not come back: another one refuses the call, which then ends.
            return [candidates]
        index = self._replica_index()
        call_id = pending.args[0][0].request_id
        untried = by_id.keys() - index.refusals(call_id)
        order = rank_by_load(index.candidates(untried or by_id.keys()), self._max_waiting, random.sample)
        index.assign(call_id, order[0])
        return [[by_id[replica_id]] for replica_id in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Tells the index which replica took the request: the first choice or another."""
        if pending_request.metadata.call_method == ROUTED_METHOD and PIN not in pending_request.kwargs:
            request_id = pending_request.args[0][0].request_id
            self._replica_index().assign(request_id, replica_id.unique_id, accepted=True)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's word on who takes requests."""
        super().update_replicas(replicas)
        self._publish_members()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray's word on a replica that died, before the controller says so."""
        super().on_replica_actor_died(replica_id)
        self._publish_members()

    def _publish_members(self) -> None:
        self._replica_index().set_members(replica_id.unique_id for replica_id in self.curr_replicas)

    def _replica_index(self) -> ReplicaIndex:
        if self._index is None:
            self._index = replica_index(self._deployment_id.app_name, self._deployment_id.name)
        return self._index
