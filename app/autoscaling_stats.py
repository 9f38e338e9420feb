"""What a replica reports to the autoscaling policy, and how it comes by it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Self

from prometheus_client import CollectorRegistry

from engine.outputs import EngineLoad
from engine.step_times import StepTimes

RATE_WINDOW_S = 10.0
"""The time over which rates and mean latencies are taken. Over 30 s a wave of load is noticed later: replayed traces
needed more replicas for as many requests in time."""


class ReplicaStats(NamedTuple):
    """One replica, as it reports itself. All values are finite and 0 or more.

    Attributes:
        running, waiting: requests.
        queued_prefill_tokens: prompt tokens that they still have to compute.
        kv_blocks_used, kv_blocks_total: blocks that running requests hold, and all there are.
        token_rate: tokens a second that its requests brought to be computed over the last window, without those that
            the prefix cache had; those of outputs as they come.
        active: 1 where it had a request since the report before, else 0.
        decoding: 1 where tokens that are not a request's first were generated over the last window, else 0.
        first_tokens: how many there were over the last window, and the sums over them of
        ttft_seconds: the time from a request's arrival to that token,
        queue_seconds: the part of that in which the request waited for its turn.
        steps, step_tokens, step_seconds, step_tokens_squared, step_tokens_seconds: see StepTimes.
    """

    running: float
    waiting: float
    queued_prefill_tokens: float
    kv_blocks_used: float
    kv_blocks_total: float
    token_rate: float
    active: float
    decoding: float
    first_tokens: float
    ttft_seconds: float
    queue_seconds: float
    steps: float
    step_tokens: float
    step_seconds: float
    step_tokens_squared: float
    step_tokens_seconds: float

    @classmethod
    def parse(cls, values: Mapping[str, float]) -> Self | None:
        """The stats of a report; None where one is missing or is no number that it can be."""
        try:
            stats = cls(**{name: float(values[name]) for name in cls._fields})
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return stats if all(0 <= value < math.inf for value in stats) else None

    @property
    def requests(self) -> float:
        return self.running + self.waiting

    @property
    def step_times(self) -> StepTimes:
        return StepTimes(
            self.steps, self.step_tokens, self.step_seconds, self.step_tokens_squared, self.step_tokens_seconds
        )


class Counts(NamedTuple):
    """What an engine has done since its start.

    Attributes:
        computed_tokens: of all steps.
        generated_tokens: of all requests.
        first_tokens: requests that got their first token, and the sums over them of
        ttft_seconds: the time from their arrival to it,
        queue_seconds: the part of that in which they waited for their turn.
    """

    computed_tokens: float = 0.0
    generated_tokens: float = 0.0
    first_tokens: float = 0.0
    ttft_seconds: float = 0.0
    queue_seconds: float = 0.0

    @classmethod
    def of(cls, registry: CollectorRegistry) -> Self:
        """From an engine's metrics."""
        values = {sample.name: sample.value for family in registry.collect() for sample in family.samples}

        def value(name: str) -> float:
            return values.get(f"manta_{name}", 0.0)

        return cls(
            computed_tokens=value("computed_tokens_total"),
            generated_tokens=value("generated_tokens_total"),
            first_tokens=value("time_to_first_token_seconds_count"),
            ttft_seconds=value("time_to_first_token_seconds_sum"),
            queue_seconds=value("queue_time_seconds_sum"),
        )


class StatsRecorder:
    """Makes a replica's reports. One for each replica, called at regular times.

    Its rates are linear in what the engine has done: what was done before its first report was nothing, so that the
    rates of a fleet add up to the rate of its load whichever replica had it, a new one included.
    """

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._received = 0
        self._history: deque[tuple[float, Counts, float]] = deque()

    def record(self, now: float, load: EngineLoad, counts: Counts) -> dict[str, float]:
        """The report, as `ReplicaStats.parse` takes it.

        Args:
            now: in seconds, never set back.
        """
        brought = counts.computed_tokens + load.queued_prefill_tokens
        history = self._history
        if not history:
            history.append((-math.inf, Counts(), 0.0))
        history.append((now, counts, brought))
        while len(history) > 2 and history[1][0] <= now - self._window_s:
            history.popleft()
        then, before, brought_before = history[0]
        seconds = self._window_s if then == -math.inf else now - then
        first_tokens = counts.first_tokens - before.first_tokens
        generated = counts.generated_tokens - before.generated_tokens
        active = load.received != self._received or load.running + load.waiting > 0
        self._received = load.received
        stats = ReplicaStats(
            load.running,
            load.waiting,
            load.queued_prefill_tokens,
            load.kv_blocks_used,
            load.kv_blocks_total,
            token_rate=(brought - brought_before) / seconds,
            active=active,
            decoding=generated > first_tokens,
            first_tokens=first_tokens,
            ttft_seconds=counts.ttft_seconds - before.ttft_seconds,
            queue_seconds=counts.queue_seconds - before.queue_seconds,
            **dict(zip(ReplicaStats._fields[-5:], load.step_times, strict=True)),
        )
        # Ray accepts floats alone, and a wrong type in the first report ends all reports.
        return {name: max(0.0, float(value)) for name, value in stats._asdict().items()}
