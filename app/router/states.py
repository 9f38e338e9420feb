"""What a process keeps of each replica, and of each of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.router.prefixes import CachedBlocks
from engine.outputs import EngineLoad


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """What a router is told by the deployment's configuration.

    Attributes:
        block_size: tokens of a KV block.
        max_queued_requests: from so many waiting requests on a replica is full.
        max_num_seqs: requests that run at a time.
        enable_prefix_caching: whether the replicas keep blocks at all.
        num_ingresses: processes that route to these replicas, each of which learns only later of the others' choices.
    """

    block_size: int = 16
    max_queued_requests: int = 256
    num_ingresses: int = 1
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True


@dataclass(slots=True, eq=False)
class ReplicaState:
    """One replica as this process sees it.

    Attributes:
        bit: its place in the prefix index.
        salt: of its ranks among replicas that are as good for a prompt.
        load: as the replica reported it last; None until it did.
        load_cost: what that means for a new request, in tokens.
        slowness: how long its steps take against the others'; spread_slowness is what of it counts for spreading.
        held: requests there, running or waiting, as it reported last.
        waiting: those that wait. A replica whose stream broke, and from which nothing has come since, is as
            good as full: Ray may be slow to see that it died.
        new_requests, new_tokens: that this process sent there and no reported load counts yet. The router's.
    """

    bit: int
    salt: int
    blocks: CachedBlocks
    load: EngineLoad | None = None
    load_cost: float = 0.0
    slowness: float = 1.0
    spread_slowness: float = 1.0
    held: int = 0
    waiting: float = 0
    new_requests: int = 0
    new_tokens: int = 0

    @property
    def requests(self) -> int:
        """Requests there, as well as it is known."""
        return self.held + self.new_requests


@dataclass(slots=True, eq=False)
class Call:
    """One `generate`; its id is that of its first request.

    Attributes:
        replica_id: where it was sent; set by the router, cleared by the transport when it was refused there.
        has_started: it has got a token where it was sent last.
        is_noted: whether the statistics of choices have it.
        counted_on, coming: where the router counts it as new, and the blocks that it expects there.
    """

    num_requests: int
    num_tokens: int
    block_hashes: Sequence[bytes]
    replica_id: str | None = None
    accepted: bool = False
    has_ended: bool = False
    has_started: bool = False
    is_noted: bool = False
    refused_by: set[str] = field(default_factory=set)
    counted_on: ReplicaState | None = None
    num_uncached: int = 0
    expected_on: ReplicaState | None = None
    coming: Sequence[bytes] = ()
