"""What decides on the size of a simulated fleet: Manta's policy, Ray Serve's, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ray.serve.config import AutoscalingConfig

from app.autoscaling import MEAN_S, Goals, State, decide
from app.autoscaling import Fleet as Replicas
from app.autoscaling_stats import RATE_WINDOW_S, Counts, ReplicaStats, StatsRecorder
from app.simulation.ray_default_policy import RayDefaultPolicy
from app.simulation.requests import SCALE
from engine import EngineCore

REPORT_S = 1.0
"""Replicas report to Manta's policy once in so many seconds, and what they report takes as long to get there."""


class FleetView(NamedTuple):
    """What a policy may look at.

    Attributes:
        now: seconds since the trace began, those of the trace.
        target: what was decided last.
        cores: of the replicas that take requests, by id.
        ongoing: how many requests each of these has, as its ingress knows.
        queued: requests that wait at the ingress, since no replica takes any.
    """

    now: float
    target: int
    cores: Mapping[str, EngineCore]
    ongoing: Mapping[str, int]
    queued: int


ScalingPolicy = Callable[[FleetView], int]
"""Called in order of time; how many replicas there are to be."""


def fixed(replicas: int) -> ScalingPolicy:
    return lambda view: replicas


def ray_default(config: AutoscalingConfig) -> ScalingPolicy:
    """Ray Serve's own policy."""
    policy = RayDefaultPolicy(config)
    return lambda view: policy.decide(view.now, view.target, view.ongoing, view.queued)


class MantaPolicy:
    """`app.autoscaling.decide` on what the simulated replicas report of themselves.

    It lives in the scaled world, as they do: there seconds are SCALE times as long, and rates and the times of steps
    are what they are.
    """

    def __init__(self, goals: Goals, *, min_replicas: int, max_replicas: int) -> None:
        """
        Args:
            goals: with the seconds of the trace.
        """
        self._goals = replace(
            goals,
            ttft_target_s=goals.ttft_target_s / SCALE,
            queue_drain_s=goals.queue_drain_s / SCALE,
            downscale_delay_s=goals.downscale_delay_s / SCALE,
            window_s=RATE_WINDOW_S / SCALE,
            mean_s=MEAN_S / SCALE,
        )
        self._min_replicas = min_replicas
        self._max_replicas = max_replicas
        self._recorders: dict[str, StatsRecorder] = {}
        self._reports: dict[str, ReplicaStats | None] = {}
        self._under_way: dict[str, ReplicaStats | None] = {}
        self._next_report = 0.0
        self._state = State()

    def __call__(self, view: FleetView) -> int:
        now = view.now / SCALE
        if view.now >= self._next_report:
            self._next_report = view.now + REPORT_S
            self._reports, self._under_way = self._under_way, {}
            self._recorders = {name: self._recorders.get(name) or _new_recorder() for name in view.cores}
            for replica_id, core in view.cores.items():
                values = self._recorders[replica_id].record(now, core.load(), Counts.of(core.metrics.registry))
                self._under_way[replica_id] = ReplicaStats.parse(values)
        stats = [report for replica_id in view.cores if (report := self._reports.get(replica_id)) is not None]
        replicas = Replicas(
            target=view.target,
            serving=len(view.cores),
            stats=stats,
            num_silent=len(view.cores) - len(stats),
            queued=view.queued,
            min_replicas=self._min_replicas,
            max_replicas=self._max_replicas,
        )
        decision = decide(replicas, self._goals, self._state, now)
        self._state = decision.state
        return decision.replicas


def _new_recorder() -> StatsRecorder:
    return StatsRecorder(RATE_WINDOW_S / SCALE)
