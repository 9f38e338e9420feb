"""What a request would cost on each replica, in prompt tokens."""

from __future__ import annotations

from engine.outputs import EngineLoad
from engine.step_times import StepTimes

UNCACHED_WEIGHT = 2.0
"""What a token that the prefix cache lacks counts against one that is queued already: it takes the replica's time from
all who come after, and its blocks take the place of others' in the cache."""

SEQUENCE_TOKENS = 8.0
"""What a request counts, running or waiting, beside its queued tokens: its decoding takes a part of each step."""

KV_PRESSURE_FROM = 0.9
"""Share of the KV blocks in use from which on a request may have to wait for others to end, or preempt them."""

PRIOR_STEPS = 8.0
"""As many average steps count beside those that a replica has made, when its speed is compared with the others'."""

NOISE = 1.25
"""Replicas of one kind differ by less: they are taken to be equal, or all work would go to one that was lucky."""


def load_cost(load: EngineLoad) -> float:
    """What lies before a new request on a replica that reported this load."""
    used = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    excess = max(0.0, used - KV_PRESSURE_FROM) / (1.0 - KV_PRESSURE_FROM)
    sequences = load.running + load.waiting
    return load.queued_prefill_tokens + sequences * SEQUENCE_TOKENS * (1.0 + 8.0 * excess)


def slowness(times: StepTimes, fleet: StepTimes) -> float:
    """How long a replica's steps take against what steps of as many tokens take in all replicas together; 1 is as long.

    Args:
        fleet: the sums over all replicas, this one included.
    """
    overhead, per_token = fleet.fit()
    if not times.steps or not fleet.seconds:
        return 1.0
    prior = PRIOR_STEPS * fleet.seconds / fleet.steps
    ratio = (times.seconds + prior) / (overhead * times.steps + per_token * times.tokens + prior)
    return 1.0 if 1.0 / NOISE < ratio < NOISE else ratio
