"""Ray's own policy on a virtual clock decides as it does in Ray's controller."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from ray.serve import autoscaling_policy
from ray.serve._private import autoscaling_state
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig

from app.simulation import ray_default_policy
from app.simulation.ray_default_policy import RayDefaultPolicy

EPOCH = 1_000_000.0


def config(**options: object) -> AutoscalingConfig:
    return AutoscalingConfig(**{"min_replicas": 1, "max_replicas": 20, "target_ongoing_requests": 10, **options})


def run(policy: RayDefaultPolicy, seconds: float, replicas: int, requests: float, *, start: float = 0.0) -> list[int]:
    """The decisions of so long, a replica for each that is decided at once."""
    decisions = []
    for tick in range(int(seconds * 10)):
        ongoing = {f"r{index}": requests / replicas for index in range(replicas)}
        replicas = policy.decide(start + tick / 10, replicas, ongoing, 0)
        decisions.append(replicas)
    return decisions


class RaysController:
    """Ray's own object, told what a handle would tell it, at times that the test gives."""

    def __init__(self, settings: AutoscalingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(time=lambda: self.now, monotonic=time.monotonic)
        monkeypatch.setattr(autoscaling_state, "time", clock)
        monkeypatch.setattr(autoscaling_policy, "time", clock)
        deployment = DeploymentID(name="simulated")
        self._state = DeploymentAutoscalingState(deployment)
        info = DeploymentInfo(
            deployment_config=DeploymentConfig(autoscaling_config=settings),
            replica_config=ReplicaConfig.create(object),
            start_time_ms=0,
            deployer_job_id="",
        )
        self._state.register(info, 1)
        self._deployment = deployment

    def report(self, series: dict[str, list[TimeStampedValue]]) -> None:
        running = {self._replica(name).to_full_id_str(): points for name, points in series.items() if name != "queued"}
        self._state.record_request_metrics_for_handle(
            HandleMetricReport(
                deployment_id=self._deployment,
                handle_id="handle",
                actor_id="actor",
                handle_source=DeploymentHandleSource.UNKNOWN,
                queued_requests=series["queued"],
                metrics={RUNNING_REQUESTS_KEY: running},
                timestamp=self.now,
            )
        )

    def decide(self, now: float, target: int, replicas: list[str]) -> int:
        self.now = now
        self._state.update_running_replica_ids([self._replica(name) for name in replicas])
        return self._state.get_decision_num_replicas(target)

    def _replica(self, name: str) -> ReplicaID:
        return ReplicaID(unique_id=name, deployment_id=self._deployment)


@pytest.mark.parametrize(
    "options",
    [
        {"upscale_delay_s": 10.0, "downscale_delay_s": 40.0},
        {"upscale_delay_s": 0.0, "downscale_delay_s": 20.0, "upscaling_factor": 0.5},
    ],
)
def test_decides_what_rays_controller_decides(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(min_replicas=0, **options)
    policy, controller = RayDefaultPolicy(settings), RaysController(settings, monkeypatch)
    rng = random.Random(1)
    target, replicas, requests, changes = 2, ["r0", "r1"], 20.0, 0
    for tick in range(6_000):
        now = EPOCH + tick / 10
        if tick % 600 == 0:
            requests = rng.choice([0, 3, 25, 60, 180])
        if tick % 40 == 0:  # some time later the replicas are as many as they should be
            replicas = [f"r{index}" for index in range(target)]
        ongoing = {name: rng.randint(0, int(2 * requests / len(replicas))) for name in replicas}
        queued = 0 if replicas else int(requests)
        before = policy._sent
        decided = policy.decide(now, target, ongoing, queued)
        controller.now = now
        if policy._sent is not before:
            controller.report(policy._sent)
        assert controller.decide(now, target, replicas) == decided
        changes += decided != target
        target = decided
    assert changes > 5


def test_the_policy_function_that_decides_is_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        ray_default_policy.replica_queue_length_autoscaling_policy
        is autoscaling_policy.replica_queue_length_autoscaling_policy
    )
    asked = []

    def noting(context: object) -> tuple[float, dict[str, object]]:
        asked.append(context)
        return autoscaling_policy.replica_queue_length_autoscaling_policy(context)

    monkeypatch.setattr(ray_default_policy, "replica_queue_length_autoscaling_policy", noting)
    run(RayDefaultPolicy(config()), 1.0, replicas=1, requests=1)
    assert len(asked) == 10


def test_scales_up_to_what_the_requests_need_after_the_delay() -> None:
    decisions = run(RayDefaultPolicy(config(upscale_delay_s=5.0)), 20.0, replicas=1, requests=40)
    assert decisions[:49] == [1] * 49
    assert decisions[-1] == 4


def test_scales_down_only_once_it_was_too_many_for_the_delay() -> None:
    policy = RayDefaultPolicy(config(downscale_delay_s=30.0))
    decisions = run(policy, 60.0, replicas=4, requests=5)
    assert set(decisions[:299]) == {4}
    assert decisions[-1] == 1


def test_stays_within_bounds() -> None:
    settings = config(min_replicas=2, max_replicas=3, upscale_delay_s=0.0, downscale_delay_s=0.0)
    assert run(RayDefaultPolicy(settings), 60.0, replicas=2, requests=1_000)[-1] == 3
    assert run(RayDefaultPolicy(settings), 60.0, replicas=2, requests=0)[-1] == 2


def test_a_request_without_any_replica_starts_one_at_once() -> None:
    policy = RayDefaultPolicy(config(min_replicas=0))
    assert policy.decide(0.0, 0, {}, queued=0) == 0
    policy = RayDefaultPolicy(config(min_replicas=0))
    assert policy.decide(0.0, 0, {}, queued=3) == 1
