"""Whether the scheduler's bookkeeping agrees with itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.scheduled_batch import ScheduledBatch


def check_requests(
    requests: Mapping[str, Request],
    running: Sequence[Request],
    queue: RequestQueue,
    in_flight: Iterable[ScheduledBatch],
    kv: KVCacheManager,
) -> None:
    """Checks that every request is where its state says, with the tokens and blocks that it should have.

    Args:
        requests: all that have not ended, by id.
        running: in their order.

    Raises:
        AssertionError: something contradicts something else.
    """
    waiting = list(queue)
    assert len(waiting) == len(queue), "a request waits twice"
    assert sum(request.num_expected_tokens for request in waiting) == queue.num_tokens, "waiting tokens are miscounted"
    keys = [request.order for request in running]
    assert keys == sorted(keys), "running requests are out of order"
    assert {request.request_id: request for request in (*waiting, *running)} == requests, (
        "a request is neither waiting nor running, or it is both"
    )
    pending: Counter[int] = Counter()
    for batch in in_flight:
        for request, step in zip(batch.requests, batch.steps, strict=True):
            pending[id(request)] += 1 + len(step.spec_token_ids) if step.samples else 0
    for request in requests.values():
        assert request.num_pending_tokens == pending[id(request)], f"{request.request_id} has other tokens pending"
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request.request_id} waits"
        assert request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"
    assert {request.request_id for request in running} == kv.req_to_blocks.keys(), (
        "not exactly the running requests have blocks"
    )
    for request in running:
        assert request.is_running, f"{request.request_id} runs"
        assert request.num_wanted_tokens > 0, f"{request.request_id} has nothing to compute"
        blocks = kv.req_to_blocks[request.request_id]
        assert len(blocks) * kv.block_size >= request.num_computed_tokens, f"{request.request_id} lacks blocks"
        for index, block in enumerate(blocks):
            known_hash = block.block_hash in (None, *request.block_hashes[index : index + 1])
            assert known_hash, f"{request.request_id} has {block} with another content"
