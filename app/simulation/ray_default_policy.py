"""Ray Serve's own autoscaling policy on a virtual clock: Ray's functions, fed with numbers as Ray feeds them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from ray.serve._private.autoscaling_metrics_merge import merge_and_aggregate_arrays
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
from ray.serve._private.metrics_utils import InMemoryMetricsStore
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

QUEUED = "queued"


class RayDefaultPolicy:
    """What Ray Serve does where nobody says anything else: so many replicas that each has target_ongoing_requests.

    A deployment handle notes how many requests wait and how many each replica has (every
    `RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR * look_back_period_s`, 6 s), and sends what it noted within the
    look-back period to the controller (every `metrics_interval_s`, 10 s). The controller decides on the mean of these
    over time, by the policy function, then by scaling factors, delays and bounds. All arithmetic is Ray's; only its
    order stands here again, because Ray's own objects read the machine's clock. One handle, which is one ingress.

    Source: ray/serve/_private/router.py (RouterMetricsManager), autoscaling_state.py (DeploymentAutoscalingState) and
    ray/serve/autoscaling_policy.py of Ray 2.60.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._noted = InMemoryMetricsStore()
        self._sent: dict[Hashable, list[Any]] = {}
        self._next_note = self._next_send = -math.inf
        self._state: dict[str, Any] = {}

    def decide(self, now: float, target: int, ongoing: Mapping[str, int], queued: int) -> int:
        """How many replicas there are to be. Called in order of time, every tenth of a second or so.

        Args:
            now: seconds.
            target: what it said last.
            ongoing: requests that each replica has which takes new ones.
            queued: requests that wait for a replica.
        """
        self._note(now, ongoing, queued)
        context = self._context(now, target, list(ongoing))
        desired, state = replica_queue_length_autoscaling_policy(context)
        if not ongoing and context.total_num_requests > 0:
            return self._bounded(math.ceil(desired))  # from zero there is no delay, and its state stays
        scaled = _apply_scaling_factors(desired, len(ongoing), self._config)
        if not ongoing and scaled > 0:
            return self._bounded(scaled)
        decided, delays = _apply_delay_logic(max(0, scaled), target, self._config, dict(self._state), _now=now)
        self._state = {**state, **delays}
        return self._bounded(decided)

    def _note(self, now: float, ongoing: Mapping[str, int], queued: int) -> None:
        """The handle's part: what it notes and sends when it is time."""
        config = self._config
        if now >= self._next_note:
            every = config.look_back_period_s * RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
            self._next_note = now + min(every, config.metrics_interval_s)
            counts: dict[Hashable, float] = {QUEUED: queued}
            counts.update(ongoing.items())
            self._noted.add_metrics_point(counts, now)
            self._noted.prune_keys_and_compact_data(now - config.look_back_period_s)
        if now >= self._next_send:
            self._next_send = now + config.metrics_interval_s
            self._noted.prune_keys_and_compact_data(now - config.look_back_period_s)
            self._sent = {name: list(points) for name, points in self._noted.data.items()}

    def _total_requests(self, now: float, replicas: list[str]) -> float:
        """The controller's part: the mean over time of all that replicas which still run were said to have."""
        series = [points for name in (*replicas, QUEUED) if (points := self._sent.get(name))]
        ends = np.cumsum([0, *(len(points) for points in series)])
        flat = [point for points in series for point in points]
        times = np.array([point.timestamp for point in flat], dtype=np.float64)
        values = np.array([point.value for point in flat], dtype=np.float64)
        return merge_and_aggregate_arrays(times, values, ends, now, self._config.aggregation_function)

    def _context(self, now: float, target: int, replicas: list[str]) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=DeploymentID(name="simulated"),
            deployment_name="simulated",
            app_name="simulated",
            current_num_replicas=len(replicas),
            target_num_replicas=target,
            running_replicas=[],
            total_num_requests=lambda: self._total_requests(now, replicas),
            total_queued_requests=None,
            aggregated_metrics=None,
            raw_metrics=None,
            capacity_adjusted_min_replicas=self._config.min_replicas,
            capacity_adjusted_max_replicas=self._config.max_replicas,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now,
            config=self._config,
        )

    def _bounded(self, replicas: int) -> int:
        return max(self._config.min_replicas, min(self._config.max_replicas, replicas))
