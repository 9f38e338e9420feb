"""What a request would cost on each replica, in prompt tokens.

Its wait there comes first: the tokens that are queued before it. To that comes what it would compute there though
another replica has it, at a weight above 1: that takes the replica's time from all who come after, and its blocks take
the place of others in the cache. What no replica has is to be computed wherever it goes, so that it counts only towards
spreading such work. All of it is more where a replica's steps take longer.

The weights were found by replaying traces against simulated fleets (`manta bench routing`); of those that do equally
well the lowest were taken.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from engine.outputs import EngineLoad
from engine.step_times import StepTimes

COPY_WEIGHT = 10.0
"""What a token that a replica lacks counts there while another has it, against a queued one."""

LEAST_COPY_WEIGHT = 1.5
"""What it counts at least, for a prefix that is used so much that it needs more copies."""

BUSY_COPY = 0.4
"""A prefix whose every copy is used for this share of what a replica gets is worth another one at a token's own cost;
for one that is used half as much a copy costs twice that."""

USES_PER_REPLICA = 64
"""Choices, for each replica, over which the uses of prefixes are counted."""

SPREAD_WEIGHT = 2.0
"""What each token of a prompt counts on a replica that was lately sent as much to compute as the mean, in proportion to
what it was sent. Caches then turn over equally fast, and several ingresses do not all run to one replica."""

LEAST_SENT, MOST_SENT = 0.5, 2.0
"""Bounds of that, or prompts would queue for a replica that has just started while others have nothing to do."""

MEMORY_PER_REPLICA = 16
"""Choices, for each replica, over which it is counted what was sent."""

OTHERS_SHARE = 0.3
"""What each other ingress is taken to have sent a replica unseen, against what this one has: they choose alike, but
their requests do not come at the same moments."""

SEQUENCE_TOKENS = 2.0
"""What a request counts, running or waiting, beside its queued tokens: its decoding takes a part of each step."""

SEAT_TOKENS = 256.0
"""What each request before it counts that has to end first, where a replica runs as many as it can."""

KV_PRESSURE_FROM = 0.9
"""Share of the KV blocks in use from which on a request may have to wait for others to end, or preempt them."""

PRESSURE_FACTOR = 16.0
"""How many times as much a request there counts once all blocks are in use."""

PRIOR_STEPS = 8.0
"""As many average steps count beside those that a replica has made, when its speed is compared with the others'."""

MOST_SLOW = 1.8
"""Bound of what slowness, from 1 on, does to spreading: below 1 / LEAST_SENT, so that a replica without work gets some
at last, and shows by its steps whether it is still slow."""

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

    def note(self, prefix: bytes | None, num_replicas: int) -> None:
        """A choice is made.

        Args:
            prefix: hash of the last block that any replica has of the prompt; None where none has any.
        """
        self._uses[prefix] += 1
        self._recent.append(prefix)
        span = USES_PER_REPLICA * num_replicas
        while len(self._recent) > span:
            old = self._recent.popleft()
            self._uses[old] -= 1
            if not self._uses[old]:
                del self._uses[old]

    def copy_weight(self, prefix: bytes | None, num_copies: int) -> float:
        """What a token counts on a replica that lacks this prefix while others have it.

        Args:
            num_copies: replicas that have it.
        """
        others = self._uses[prefix] - 1
        if prefix is None or others <= 0:
            return COPY_WEIGHT
        share = others / (USES_PER_REPLICA * num_copies)
        return min(COPY_WEIGHT, max(LEAST_COPY_WEIGHT, BUSY_COPY / share))


class SentWork:
    """The tokens that this process sent each replica to compute lately.

    A choice counts e times less after MEMORY_PER_REPLICA others for each replica.
    """

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}
        self._unit = 1.0

    def note(self, replica: int, num_tokens: int, num_replicas: int) -> None:
        """A choice was made."""
        # A growing unit instead of old sums that shrink: a choice changes one entry.
        self._unit *= 1.0 + 1.0 / (MEMORY_PER_REPLICA * num_replicas)
        if self._unit > 1e100:
            self._sent = {each: sent / self._unit for each, sent in self._sent.items()}
            self._unit = 1.0
        self._sent[replica] = self._sent.get(replica, 0.0) + num_tokens * self._unit

    def shares(self, replicas: Sequence[int]) -> list[float]:
        """Of each replica against their mean, within LEAST_SENT and MOST_SENT."""
        sent = [self._sent.get(replica, 0.0) for replica in replicas]
        mean = sum(sent) / len(sent) or 1.0
        least, most = LEAST_SENT * mean, MOST_SENT * mean
        # Conditions, as calls of min and max would take longer than all the rest.
        return [(least if each < least else most if each > most else each) / mean for each in sent]

    def drop(self, replica: int) -> None:
        self._sent.pop(replica, None)
