"""Requests through a fleet whose size a policy decides, and what that comes to.

Times are those of the trace, in seconds; the fleet runs in the scaled world, whose time goes by SCALE times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from app.router.index import ReplicaIndex
from app.router.states import RoutingSettings
from app.simulation.demand import ReplicaClass
from app.simulation.event_loop import EventLoop
from app.simulation.fleet import Fleet, Member, Record
from app.simulation.news import NewsTimes
from app.simulation.requests import BLOCK_SIZE, SCALE, longest
from app.simulation.scaling_policies import FleetView, ScalingPolicy
from app.simulation.step_cost import LLAMA_8B
from engine import EngineConfig, EngineRequest

DECISION_S = 0.5
"""A policy is asked once in so many seconds. Ray asks ten times a second, about what changes with each step; in the
scaled world the shortest of these take a third of this."""

TIMELINE_S = 10.0
"""Between two points of a run's timeline."""

STALLED_S = 3600.0
"""Where nothing has happened for so long, nothing will: a policy may wait before it starts a replica, but less."""


@dataclass(frozen=True, slots=True)
class ScalingSetup:
    """What a policy is to manage.

    Attributes:
        num_kv_blocks: of each replica.
        startup_s: from the decision that a replica is to be there to where it takes requests.
        initial_replicas: there when the first request comes.
        ttft_target_s, tpot_target_s: a request that is as quick, to its first token and on average between two tokens,
            meets its service level objective.
    """

    replica: ReplicaClass
    num_kv_blocks: int
    max_model_len: int
    startup_s: float
    initial_replicas: int
    ttft_target_s: float
    tpot_target_s: float

    @property
    def config(self) -> EngineConfig:
        """Of each replica's engine."""
        return EngineConfig(
            model=LLAMA_8B.name,
            block_size=BLOCK_SIZE,
            num_kv_blocks=self.num_kv_blocks,
            max_num_batched_tokens=self.replica.max_num_batched_tokens,
        )


class Point(NamedTuple):
    """A moment of a run: seconds, replicas that were to be there, those that took requests, and requests there."""

    seconds: float
    target: int
    serving: int
    ongoing: int


class Run(NamedTuple):
    """A fleet at the end of all requests.

    Attributes:
        seconds: that this took.
        scale_events: changes of the target.
    """

    members: Collection[Member]
    records: Collection[Record]
    seconds: float
    scale_events: int
    timeline: Sequence[Point]


def setup_for(
    requests: Iterable[EngineRequest],
    replica: ReplicaClass,
    *,
    startup_s: float,
    initial_replicas: int,
    ttft_target_s: float,
    tpot_target_s: float,
) -> ScalingSetup:
    """Replicas whose KV blocks are those of their class, or as many more as the longest request needs."""
    max_model_len = longest(requests) + 1
    num_kv_blocks = max(replica.num_kv_blocks, -(-max_model_len // BLOCK_SIZE))
    return ScalingSetup(
        replica, num_kv_blocks, max_model_len, startup_s, initial_replicas, ttft_target_s, tpot_target_s
    )


def run(
    requests: Iterable[EngineRequest],
    setup: ScalingSetup,
    policy: ScalingPolicy,
    *,
    on_end: Callable[[int], object] = lambda count: None,
) -> Run:
    """Lets all requests run to their ends, while the policy decides on the fleet's size.

    Args:
        on_end: told now and then of how many requests have ended since it was told last.

    Raises:
        RuntimeError: the policy starts no replica for requests that wait, or one was lost.
    """
    loop = EventLoop()
    times = NewsTimes()
    settings = RoutingSettings(block_size=BLOCK_SIZE, max_num_seqs=setup.config.max_num_seqs)
    fleet = Fleet(
        loop,
        config=setup.config,
        max_model_len=setup.max_model_len,
        cost=setup.replica.cost,
        routers=[ReplicaIndex(settings)],
        news=NewsTimes(times.delay_s / SCALE, times.quiet_s / SCALE, times.gather_s / SCALE),
    )
    for _ in range(setup.initial_replicas):
        fleet.add_replica()
    for request in requests:
        fleet.submit(request)
    target, scale_events, told = setup.initial_replicas, 0, fleet.num_unfinished
    timeline: list[Point] = []
    ticks, stalled_at = 0, 0.0
    while fleet.num_unfinished:
        now = ticks * DECISION_S
        if loop.run(now / SCALE):
            stalled_at = now
        elif now - stalled_at > STALLED_S:
            raise RuntimeError(f"{fleet.num_unfinished} requests can never run: {fleet.num_waiting} have no replica")
        ongoing = {replica_id: fleet.ongoing[replica_id] for replica_id in fleet.serving}
        cores = {replica_id: fleet.replicas[replica_id].core for replica_id in fleet.serving}
        decided = policy(FleetView(now, target, cores, ongoing, fleet.num_waiting))
        scale_events += decided != target
        target = decided
        _resize(fleet, target, setup.startup_s / SCALE)
        if ticks % (TIMELINE_S / DECISION_S) == 0:
            timeline.append(Point(now, target, len(ongoing), sum(ongoing.values())))
            on_end(told - fleet.num_unfinished)
            told = fleet.num_unfinished
        ticks += 1
    on_end(told)
    return Run(fleet.members.values(), fleet.records.values(), loop.now * SCALE, scale_events, timeline)


def _resize(fleet: Fleet, target: int, startup_s: float) -> None:
    """Starts replicas or lets some drain: as in Ray, first those that are still starting, then the youngest."""
    surplus = len(fleet.starting) + len(fleet.serving) - target
    for _ in range(-surplus):
        fleet.add_replica(startup_s=startup_s)
    oldest_first = [*fleet.serving, *fleet.starting]
    for name in oldest_first[len(oldest_first) - max(0, surplus) :]:
        fleet.drain(name)


def figures_of(result: Run, setup: ScalingSetup) -> dict[str, Any]:
    """What a run came to.

    slo_attainment: the share of all requests that met both targets; ttft_attainment and tpot_attainment, of each of
    the two. replica_hours: from where each replica was asked for to where it was gone, its start-up and its draining
    included. scale_events: changes of the number that was to be there; mean_replicas, max_replicas: of those that there
    were, in whatever state. ttft_…, tpot_…: seconds; p50, p99.
    """
    ttft, tpot = np.array([_latencies(record) for record in result.records]).T
    quick, steady = ttft <= setup.ttft_target_s, tpot <= setup.tpot_target_s
    spans = [(m.added_at * SCALE, result.seconds if m.gone_at is None else m.gone_at * SCALE) for m in result.members]
    replica_s = sum(end - start for start, end in spans)
    return {
        "slo_attainment": float(np.mean(quick & steady)),
        "replica_hours": replica_s / 3600,
        "scale_events": result.scale_events,
        "ttft_attainment": float(np.mean(quick)),
        "tpot_attainment": float(np.mean(steady)),
        "mean_replicas": replica_s / result.seconds,
        "max_replicas": max(sum(start <= at < end for start, end in spans) for at, _ in spans),
        **{f"ttft_p{point}": float(np.percentile(ttft, point)) for point in (50, 99)},
        **{f"tpot_p{point}": float(np.percentile(tpot, point)) for point in (50, 99)},
    }


def _latencies(record: Record) -> tuple[float, float]:
    """Time to first token and mean time per output token, which is 0 where there was but one.

    A token stands for SCALE of the trace's, which come in SCALE times the time.
    """
    assert record.ttft is not None, "a request was lost"
    assert record.finished_at is not None, "a request was lost"
    assert record.first_token_at is not None, "a request was lost"
    intervals = record.num_output_tokens - 1
    tpot = (record.finished_at - record.first_token_at) / intervals if intervals else 0.0
    return record.ttft * SCALE, tpot
