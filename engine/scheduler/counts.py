"""What the scheduler tells the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool
from engine.outputs import EngineLoad
from engine.request import Request
from engine.scheduler.request_queue import RequestQueue


class SchedulerCounts(NamedTuple):
    """What happened since the last call of take_counts.

    Attributes:
        preemptions: times that a request lost its blocks.
        prefix_queried: tokens of requests that started for the first time and could use the prefix cache.
        prefix_hit: those of them that it had.
    """

    preemptions: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0


def load_of(running: Sequence[Request], waiting: RequestQueue, pool: BlockPool) -> EngineLoad:
    """How busy an engine is. O(running)."""
    missing = (request.num_wanted_tokens for request in running)
    return EngineLoad(
        running=len(running),
        waiting=len(waiting),
        queued_prefill_tokens=waiting.num_tokens + sum(count for count in missing if count > 1),
        kv_blocks_used=pool.num_used,
        kv_blocks_total=pool.num_blocks,
    )
