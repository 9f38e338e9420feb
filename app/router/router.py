"""The request router of LLM deployments: calls pinned to one replica, and the cheapest replica for the others."""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.router.index import ReplicaIndex, replica_index
from app.router.states import RoutingSettings

logger = logging.getLogger("ray.serve")

PIN = "pinned_to"
"""Keyword argument of a call that must go to the replica of this id; the replica checks that it did."""

ROUTED_METHOD = "generate"
"""The method whose calls are placed by what they cost; its first argument are the requests."""


class PrefixCacheRouter(RequestRouter):
    """Ray's side of the ReplicaIndex, which decides. Runs on Ray's router thread in each process that holds a handle.

    It places each request by itself (no FIFOMixin): a call that is pinned must not be given another's replica.
    """

    _settings = RoutingSettings()
    _index: ReplicaIndex | None = None

    def initialize_state(self, **settings: Any) -> None:
        """Takes the router's arguments, those of RoutingSettings, from the deployment's configuration."""
        self._settings = RoutingSettings(**settings)

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
        order = self._replica_index().choose(pending.args[0][0].request_id, by_id)
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
            self._index.settings = self._settings
        return self._index
