"""What a request would cost on each replica, in prompt tokens.

Its wait there comes first: the tokens that are queued before it. To that comes what it would compute there, at a weight
above 1: those tokens take the replica's time from all who come after, and their blocks take the place of others in its
cache. All of it is longer where a replica's steps are.

The weights were found by replaying traces against simulated fleets (`manta bench routing`); of those that do equally
well the lowest were taken.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from engine.outputs import EngineLoad
from engine.step_times import StepTimes

UNCACHED_WEIGHT = 8.0
"""What a token that no replica has counts against a queued one, and at most one that another replica has already."""

LEAST_COPY_WEIGHT = 1.5
"""What the latter counts at least."""

BUSY_COPY = 0.4
"""A prefix whose every copy is used for this share of what a replica gets is worth another one at a token's own cost;
for one that is used half as much a copy costs twice that."""

USES_PER_REPLICA = 64
"""Choices, for each replica, over which the uses of prefixes are counted."""

CHURN_WEIGHT = 0.5
"""How much dearer new blocks are where a cache takes in twice as many as the others: what it holds is lost sooner."""

LEAST_CHURN = 0.8
"""A cache that takes in less than this share of the mean counts as if it took in so much, or prompts would queue for a
replica that has just started while others have nothing to do."""

WORTHY_HITS = 0.25
"""Where a smaller share of the prompts' tokens is found anywhere, what caches hold is worth less, and churn with it."""

HITS_MEMORY = 512
"""Choices over which that share is taken."""

SEQUENCE_TOKENS = 2.0
"""What a request counts, running or waiting, beside its queued tokens: its decoding takes a part of each step."""

KV_PRESSURE_FROM = 0.9
"""Share of the KV blocks in use from which on a request may have to wait for others to end, or preempt them."""

PRESSURE_FACTOR = 16.0
"""How many times as much a request there counts once all blocks are in use."""

PRIOR_STEPS = 8.0
"""As many average steps count beside those that a replica has made, when its speed is compared with the others'."""

NOISE = 1.25
"""Replicas of one kind differ by less: they are taken to be equal, or all work would go to one that was lucky."""


def load_cost(load: EngineLoad) -> float:
    """What lies before a new request on a replica that reported this load."""
    used = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
    excess = max(0.0, used - KV_PRESSURE_FROM) / (1.0 - KV_PRESSURE_FROM)
    sequences = load.running + load.waiting
    return load.queued_prefill_tokens + sequences * SEQUENCE_TOKENS * (1.0 + PRESSURE_FACTOR * excess)


def slowness(times: StepTimes, fleet: StepTimes) -> float:
    """How long a replica's steps take against what steps of as many tokens take in all replicas together; 1 is as long.

    Args:
        fleet: the sums over all replicas, this one included.
    """
    if not times.steps or not fleet.seconds:
        return 1.0
    overhead, per_token = fleet.fit()
    prior = PRIOR_STEPS * fleet.seconds / fleet.steps
    ratio = (times.seconds + prior) / (overhead * times.steps + per_token * times.tokens + prior)
    return 1.0 if 1.0 / NOISE < ratio < NOISE else ratio


class PrefixUses:
    """How often prefixes were matched lately, so that one that many prompts share can have as many copies as it needs.

    A prefix stands for what a copy of it would be used for: in a conversation for its next turn alone, in a prompt that
    all requests begin with for most of what a replica gets.
    """

    def __init__(self) -> None:
        self._recent: deque[bytes | None] = deque()
        self._uses: Counter[bytes | None] = Counter()

    def copy_weight(self, prefix: bytes | None, num_copies: int, num_replicas: int) -> float:
        """Notes a choice; what a token counts on a replica that lacks this prefix while others have it.

        Args:
            prefix: hash of the last block that any replica has of the prompt; None where none has any.
            num_copies: replicas that have it.
        """
        before = self._uses[prefix]
        self._uses[prefix] += 1
        self._recent.append(prefix)
        span = USES_PER_REPLICA * num_replicas
        while len(self._recent) > span:
            old = self._recent.popleft()
            self._uses[old] -= 1
            if not self._uses[old]:
                del self._uses[old]
        if prefix is None or not before:
            return UNCACHED_WEIGHT
        share = before / (USES_PER_REPLICA * num_copies)
        return min(UNCACHED_WEIGHT, max(LEAST_COPY_WEIGHT, BUSY_COPY / share))


class Churn:
    """How many blocks each cache has taken in lately, against the others.

    What was taken in counts e times less once all caches together have taken in as many blocks as they hold: by then
    most of it is gone.
    """

    def __init__(self) -> None:
        self._stored: dict[int, float] = {}
        self._unit = 1.0
        self._total = 0.0
        self._num_tokens = self._num_found = 0.0

    def note(self, replica: int, num_stored: int, num_blocks_of_all: int) -> None:
        """A replica has stored so many blocks; all together have room for so many."""
        amount = num_stored * self._unit
        self._stored[replica] = self._stored.get(replica, 0.0) + amount
        self._total += amount
        self._unit *= math.exp(num_stored / max(1, num_blocks_of_all))
        if self._unit > 1e100:
            self._stored = {each: stored / self._unit for each, stored in self._stored.items()}
            self._total, self._unit = sum(self._stored.values()), 1.0

    def note_prompt(self, num_tokens: int, num_found: int) -> None:
        """A prompt came, of which some replica has so many tokens."""
        kept = 1.0 - 1.0 / HITS_MEMORY
        self._num_tokens = self._num_tokens * kept + num_tokens
        self._num_found = self._num_found * kept + num_found

    def factors(self, num_replicas: int) -> Callable[[int], float]:
        """What new blocks cost on a replica: 1 at the mean churn, a little less below it, more up to twice it."""
        if not self._total or not self._num_found:
            return lambda _: 1.0
        stored, scale = self._stored.get, num_replicas / self._total
        weight = CHURN_WEIGHT * min(1.0, self._num_found / self._num_tokens / WORTHY_HITS)

        def factor(replica: int) -> float:
            ratio = stored(replica, 0.0) * scale
            if ratio < LEAST_CHURN:
                ratio = LEAST_CHURN
            return 1.0 + weight * ((ratio if ratio < 2.0 else 2.0) - 1.0)

        return factor

    def drop(self, replica: int) -> None:
        self._total -= self._stored.pop(replica, 0.0)
