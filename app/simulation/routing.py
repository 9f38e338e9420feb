"""Requests through a fleet of fixed size, once with each router, and what that comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.router.index import ReplicaIndex
from app.router.states import RoutingSettings
from app.simulation.event_loop import EventLoop
from app.simulation.fleet import Fleet, Record
from app.simulation.news import NewsTimes
from app.simulation.requests import BLOCK_SIZE, longest, num_distinct_blocks, num_prompt_tokens
from app.simulation.routers import LeastLoaded, PowerOfTwo, RoundRobin, Router, SessionHashing
from app.simulation.step_cost import H200, LLAMA_8B, StepCost
from engine import EngineConfig, EngineRequest, root_hash
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.request import Request

COMMON_SHARE = 0.1
"""A block that more than this share of all prompts have says nothing about the session."""


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """A fleet.

    Attributes:
        cost: of a step.
        num_kv_blocks: of each replica.
        is_raised: they are more than the replica's share, since the longest request needs so many.
        max_model_len: in tokens.
        seed: of the routers' random choices.
    """

    num_replicas: int
    num_ingresses: int
    cost: StepCost
    num_kv_blocks: int
    is_raised: bool
    max_model_len: int
    news: NewsTimes = field(default_factory=NewsTimes)
    seed: int = 0

    @property
    def config(self) -> EngineConfig:
        """Of each replica's engine: the defaults, but for its KV blocks."""
        return EngineConfig(model=LLAMA_8B.name, block_size=BLOCK_SIZE, num_kv_blocks=self.num_kv_blocks)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens/s that one replica computes in full steps."""
        return self.cost.prefill_rate(self.config.max_num_batched_tokens)

    def described(self) -> dict[str, Any]:
        """What was simulated, for a report."""
        config = self.config
        return {
            "model": config.model,
            "replicas": self.num_replicas,
            "ingresses": self.num_ingresses,
            "kv_blocks_per_replica": self.num_kv_blocks,
            "kv_blocks_raised_to_longest_request": self.is_raised,
            "block_size": config.block_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "step_s": self.cost.step_s,
            "token_s": self.cost.token_s,
            "block_s": self.cost.block_s,
            "prefill_tokens_per_s": self.prefill_rate,
            "news_delay_s": self.news.delay_s,
        }


def setup_for(
    requests: Sequence[EngineRequest],
    *,
    num_replicas: int,
    cache_fraction: float,
    num_ingresses: int = 1,
    cost: StepCost = H200,
    seed: int = 0,
) -> RoutingSetup:
    """Replicas that together have KV blocks for a share of the requests' distinct blocks; each for the longest one."""
    max_model_len = longest(requests) + 1
    needed = -(-max_model_len // BLOCK_SIZE)
    share = int(cache_fraction * num_distinct_blocks(requests) / num_replicas)
    return RoutingSetup(num_replicas, num_ingresses, cost, max(needed, share), share < needed, max_model_len, seed=seed)


def router_makers(requests: Iterable[EngineRequest], setup: RoutingSetup) -> dict[str, Callable[[int], Router]]:
    """What makes the router of the i-th ingress, by the router's name."""
    common = common_blocks(requests)
    settings = RoutingSettings(
        block_size=BLOCK_SIZE, num_ingresses=setup.num_ingresses, max_num_seqs=setup.config.max_num_seqs
    )
    seed = setup.seed * setup.num_ingresses

    return {
        "round_robin": lambda index: RoundRobin(seed + index),
        "power_of_two": lambda index: PowerOfTwo(seed + index),
        "least_loaded": lambda index: LeastLoaded(seed + index),
        "session_hashing": lambda index: SessionHashing(seed + index, common),
        "prefix_cache": lambda index: ReplicaIndex(settings),
    }


def common_blocks(requests: Iterable[EngineRequest]) -> frozenset[bytes]:
    """Hashes of the blocks that more than COMMON_SHARE of the prompts have."""
    prompts = list(requests)
    counts = Counter(block_hash for request in prompts for block_hash in request.block_hashes)
    return frozenset(block_hash for block_hash, count in counts.items() if count > COMMON_SHARE * len(prompts))


def replay(
    requests: Sequence[EngineRequest],
    setup: RoutingSetup,
    router: Callable[[int], Router],
    *,
    on_end: Callable[[int], object] = lambda count: None,
) -> Fleet:
    """Lets all requests, by arrival, run to their ends. Returns the fleet afterwards.

    Args:
        on_end: told now and then of how many requests have ended since it was told last.

    Raises:
        RuntimeError: a request was lost.
    """
    loop = EventLoop()
    fleet = Fleet(
        loop,
        config=setup.config,
        max_model_len=setup.max_model_len,
        cost=setup.cost,
        routers=[router(index) for index in range(setup.num_ingresses)],
        news=setup.news,
    )
    for _ in range(setup.num_replicas):
        fleet.add_replica()
    for request in requests:
        fleet.submit(request)
    told = fleet.num_unfinished
    period = max(0.1, requests[-1].arrival_time / 1000)
    while fleet.num_unfinished:
        if not loop.run(loop.now + period) and fleet.num_unfinished:
            raise RuntimeError(f"{fleet.num_unfinished} requests can never run: {fleet.num_waiting} have no replica")
        on_end(told - fleet.num_unfinished)
        told = fleet.num_unfinished
    loop.run()
    return fleet


def figures_of(records: Collection[Record], setup: RoutingSetup) -> dict[str, Any]:
    """What a replay came to.

    hit_ratio: prompt tokens that came from a cache, of all. ttft_…: seconds to the first token; mean, p50, p90, p99.
    imbalance: prompt tokens computed by the replica that computed most, over the mean. prefill_utilisation: prompt
    tokens computed, over what all replicas could have computed in full steps from the first arrival to the last end.
    """
    times = [record.ttft for record in records if record.ttft is not None]
    prompt = sum(len(record.request.prompt_token_ids) for record in records)
    cached = sum(record.num_cached_tokens for record in records)
    computed: Counter[str | None] = Counter()
    for record in records:
        computed[record.replica_id] += len(record.request.prompt_token_ids) - record.num_cached_tokens
    seconds = max(record.finished_at or 0.0 for record in records) - min(record.arrival for record in records)
    p50, p90, p99 = np.percentile(times, (50, 90, 99))
    return {
        "hit_ratio": cached / prompt,
        "ttft_mean": float(np.mean(times)),
        "ttft_p50": float(p50),
        "ttft_p90": float(p90),
        "ttft_p99": float(p99),
        "imbalance": max(computed.values()) * setup.num_replicas / computed.total(),
        "prefill_utilisation": computed.total() / (setup.num_replicas * setup.prefill_rate * seconds),
        "seconds": seconds,
    }


def ideal_hit_ratio(requests: Sequence[EngineRequest], num_blocks: int) -> float:
    """The hit ratio of one cache that all share, with requests one after another in the order of their arrival.

    Args:
        num_blocks: of the cache; enough for the longest prompt.
    """
    cache = KVCacheManager(num_blocks, block_size=BLOCK_SIZE, root=root_hash(LLAMA_8B, BLOCK_SIZE))
    cached = 0
    for spec in requests:
        request = Request.of(spec, spec.arrival_time)
        cache.prepare(request)
        blocks = cache.match_prefix(request).blocks
        request.num_cached_tokens = len(blocks) * BLOCK_SIZE
        cached += request.num_cached_tokens
        cache.allocate_slots(request, request.num_tokens - request.num_cached_tokens, blocks)
        cache.store_blocks(request, request.num_cached_tokens, request.num_tokens)
        cache.free(request)
        cache.take_events()  # or they would be kept
    return cached / num_prompt_tokens(requests)
