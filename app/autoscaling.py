"""How many replicas a model needs: the autoscaling policy.

`decide` is a pure function of what the replicas report and of the time, so that it runs in Ray Serve's controller and
on a virtual clock alike. `AutoscalingPolicy` is how Ray calls it.

Each thing that a replica can run out of gives a demand in replicas: how many of them it would keep busy, if they could
be used to the full. The greatest counts.

- **tokens**: those that requests bring to be computed each second, and those of queued prompts, which are to be worked
  off within queue_drain_s, over what a replica computes in full steps.
- **sequences**: requests, running and waiting, over max_num_seqs.
- **KV blocks**: those that running requests hold and that queued prompts will, over those of a replica.
- **time per output token**: a step takes a + w * its tokens, where a is what it takes with hardly anything in it. Steps
  that take the target have the share 1 - a / target of their time for tokens; all tokens of a second take rate * w.

What is to be expected of that demand is its mean and some standard deviations more: a load that swings needs more in
reserve than one that is steady, and a small fleet relatively more than a large one (square-root staffing: Halfin and
Whitt, Heavy-traffic limits for queues with many exponential servers, 1981). Comfortable are as many replicas as have
what is expected when target_utilization of them is used, and as many as the demand needs right now. More are started
at once, to as many as are comfortable, when there are fewer than the demand needs or hardly as many as is expected;
between the two thresholds a load that is steady changes nothing. Fewer remain when more were not needed at any moment
of downscale_delay_s. Whoever does not report is taken to need what there is: it can be a reason to stay, never one to
shrink.

First tokens may be late though all of that fits, say where requests come in bursts. Then one replica is added at a time
for as long as most of the wait is for others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from app.autoscaling_stats import RATE_WINDOW_S, ReplicaStats
from engine.step_times import NO_STEPS, pooled

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaID
    from ray.serve.config import AutoscalingContext

logger = logging.getLogger("ray.serve.autoscaling")

STALE_S = 10.0
"""Reports come every second. One that no other has followed for so long says how a replica was, not how it is."""

MEAN_S = 30.0
"""The memory of the demand's mean: shorter than a replica takes to start."""

DEVIATIONS = 2.25
"""So many standard deviations above its mean a demand is still expected. In replayed traces fixed reserves took a tenth
more replica-hours for as many requests in time."""

FEW_REQUESTS = 2
"""So many say what a step takes at least."""

ROUNDING = 1e-9
"""What keeps a whole number of replicas from being rounded up to the next one."""


@dataclass(frozen=True, slots=True)
class Goals:
    """What is aimed at, and what a replica is given to do it with.

    Attributes:
        ttft_target_s, tpot_target_s: the time to first token and per output token that are good enough.
        target_utilization: the share of a replica that is to be used; the rest is for what was not foreseen.
        queue_drain_s: the time in which queued prompts are to be worked off.
        downscale_delay_s: how long a replica must not have been needed before it goes.
        max_num_seqs, max_num_batched_tokens, block_size: the engine's.
        window_s: of the replicas' rates; latencies are believed only so long after the number of replicas changed.
        mean_s: the memory of the demand's mean, unless downscale_delay_s is shorter, which is that of its variance.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    ttft_target_s: float
    tpot_target_s: float
    target_utilization: float
    queue_drain_s: float
    downscale_delay_s: float
    window_s: float = RATE_WINDOW_S
    mean_s: float = MEAN_S


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas of a model at one time.

    Attributes:
        target: how many there are to be; some may still be starting.
        serving: how many take requests.
        stats: of those that serve, as far as they have ever reported.
        num_silent: of those that serve, how many have no report or an old one.
        queued: requests that wait at ingresses, for want of a replica.
    """

    target: int
    serving: int
    stats: Sequence[ReplicaStats]
    num_silent: int = 0
    queued: float = 0.0
    min_replicas: int = 1
    max_replicas: int = 1


class Speed(NamedTuple):
    """What steps take, as far as it is known. Both are 0 until they are.

    Attributes:
        full_step_s: one with max_num_batched_tokens.
        least_step_s: one with hardly anything in it.
    """

    full_step_s: float = 0.0
    least_step_s: float = 0.0


class Usual(NamedTuple):
    """A demand's mean and variance, in replicas, as exponentially weighted moments at one time.

    Source: T. Finch, Incremental calculation of weighted mean and variance, 2009, with one memory for each.
    """

    mean: float = 0.0
    variance: float = 0.0
    at: float = -math.inf

    def after(self, demand: float, now: float, *, mean_s: float, variance_s: float) -> Usual:
        """With what has been demanded since the last time. The first demand is the mean, without a variance."""
        seconds = max(0.0, now - self.at)
        mean = self.mean + _share_of_new(seconds, mean_s) * (demand - self.mean)
        variance = self.variance + _share_of_new(seconds, variance_s) * ((demand - mean) ** 2 - self.variance)
        return Usual(mean, variance, now)

    @property
    def expected(self) -> float:
        return self.mean + DEVIATIONS * math.sqrt(self.variance)


def _share_of_new(seconds: float, memory_s: float) -> float:
    return -math.expm1(-seconds / memory_s) if memory_s else 1.0


class State(NamedTuple):
    """What one decision passes on to the next.

    Attributes:
        needs: (time, replicas) pairs, both rising towards the front: what was needed at each time and has not been
            exceeded since; the first is the most in the last downscale_delay_s.
        decided: how many there were to be; -1 before the first decision.
        serving, since: how many replicas served at the last decision, and since when it has been as many.
    """

    needs: tuple[tuple[float, int], ...] = ()
    decided: int = -1
    serving: int = -1
    since: float = 0.0
    speed: Speed = Speed()
    usual: Usual = Usual()


class Demand(NamedTuple):
    """Of one thing: how many replicas it would keep busy, and the figures behind that."""

    replicas: float
    reason: str


class Decision(NamedTuple):
    """How many replicas there are to be, for the next decision its state, and why, where that is a change."""

    replicas: int
    state: State
    reason: str


def measured_speed(
    stats: Sequence[ReplicaStats], max_num_seqs: int, max_num_batched_tokens: int, before: Speed
) -> Speed:
    """What the replicas' last steps say, of all of them together, and where they say nothing what was known before.

    A line through steps tells what it takes to compute a prompt only if there were prompts in them: where the average
    token was computed in a step that is larger than one of decodes alone can be. And its start is what an empty step
    takes only on a replica with hardly a request: sequences cost what they read as well as what they compute.
    """
    full_step_s, least_step_s = before
    times = pooled(s.step_times for s in stats) if stats else NO_STEPS
    if times.tokens_squared > max_num_seqs * times.tokens:
        overhead_s, token_s = times.fit()
        full_step_s = overhead_s + token_s * max_num_batched_tokens
    starts_s = [s.step_times.fit()[0] for s in stats if 0 < s.running <= FEW_REQUESTS]
    return Speed(full_step_s, min((start_s for start_s in [least_step_s, *starts_s] if start_s > 0), default=0.0))


def demands(fleet: Fleet, goals: Goals, speed: Speed) -> list[Demand]:
    """What the load needs of each thing that a replica has."""
    stats = fleet.stats
    rate = sum(s.token_rate for s in stats)
    queued_tokens = sum(s.queued_prefill_tokens for s in stats)
    tokens = (rate + queued_tokens / goals.queue_drain_s) * speed.full_step_s / goals.max_num_batched_tokens

    # What waits at the ingresses is a mean over seconds: some of it may be in the replicas by now.
    # Where the replicas are full it is not.
    requests = sum(s.requests for s in stats)
    is_full = requests >= goals.max_num_seqs * len(stats)
    requests = requests + fleet.queued if is_full else max(requests, fleet.queued)

    blocks = sum(
        (s.kv_blocks_used + s.queued_prefill_tokens / goals.block_size) / s.kv_blocks_total
        for s in stats
        if s.kv_blocks_total
    )

    decoding = [s for s in stats if s.running and s.decoding and s.steps]
    steps_s = [s.step_seconds / s.steps for s in decoding]
    decodes = min(_decode_demand(stats, steps_s, rate, goals, speed), sum(s.running for s in decoding))
    found = [
        Demand(
            tokens, f"tokens: {rate:.0f} a second, {queued_tokens:.0f} queued, {speed.full_step_s:.4f} s a full step"
        ),
        Demand(requests / goals.max_num_seqs, f"sequences: {requests:.0f}, {goals.max_num_seqs} a replica"),
        Demand(blocks, f"KV blocks: {blocks:.2f} replicas full"),
        Demand(decodes, f"time per output token: {max(steps_s, default=0.0):.4f} s, {goals.tpot_target_s:g} aimed at"),
    ]
    return [each for each in found if not math.isnan(each.replicas)]  # figures that no engine has, but a report can


def _decode_demand(
    stats: Sequence[ReplicaStats], steps_s: Sequence[float], rate: float, goals: Goals, speed: Speed
) -> float:
    """Replicas that compute all tokens in steps of tpot_target_s.

    Such a step has tpot_target_s - least_step_s for its tokens. As long as that is not known of a step with hardly
    anything in it, all of a step's time is taken to be its tokens'.
    """
    if not speed.least_step_s:
        return sum(steps_s) / goals.tpot_target_s
    share = 1.0 - speed.least_step_s / goals.tpot_target_s
    times = pooled(s.step_times for s in stats)
    if share <= 0 or not steps_s or not times.tokens:
        return 0.0  # a target that even an all but empty step misses is none that more replicas can reach
    token_s = max(0.0, times.seconds - speed.least_step_s * times.steps) / times.tokens
    return rate * token_s / share


def are_late(stats: Sequence[ReplicaStats], ttft_target_s: float) -> bool:
    """Whether first tokens come later than they should for others' sake: more replicas make no prompt shorter."""
    ttft_seconds = sum(s.ttft_seconds for s in stats)
    is_slow = ttft_seconds > ttft_target_s * sum(s.first_tokens for s in stats)
    return is_slow and sum(s.queue_seconds for s in stats) > ttft_seconds / 2


def decide(fleet: Fleet, goals: Goals, state: State, now: float) -> Decision:
    """How many replicas there are to be.

    Args:
        state: of the decision before; `State()` for the first one.
        now: in seconds, of any clock that is not set back.
    """
    low, high = fleet.min_replicas, fleet.max_replicas
    target = min(max(fleet.target, low), high)
    since = state.since if fleet.serving == state.serving else now

    speed = measured_speed(fleet.stats, goals.max_num_seqs, goals.max_num_batched_tokens, state.speed)
    most = max(demands(fleet, goals, speed))
    demand = min(most.replicas, high)
    variance_s = goals.downscale_delay_s
    usual = state.usual.after(demand, now, mean_s=min(goals.mean_s, variance_s), variance_s=variance_s)
    expected = min(usual.expected, high)
    is_idle = not fleet.queued and not any(s.active for s in fleet.stats)
    busy = max(demand, expected / goals.target_utilization)
    comfortable = 0 if is_idle else max(1, math.ceil(busy - ROUNDING))
    pressed = demand > target or expected > target * (1 + goals.target_utilization) / 2
    reason = most.reason
    if not pressed and are_late(fleet.stats, goals.ttft_target_s):
        # What has just been added has had no time yet to show.
        pressed = fleet.serving >= target and now - since >= goals.window_s
        comfortable = max(comfortable, target + int(pressed))
        reason = f"time to first token: above {goals.ttft_target_s:g} s"

    needed = min(max(comfortable, low), high)
    # Where somebody else has changed the number, say Ray for the first request of a model that has no replica, it is as
    # if this policy had found that need.
    if fleet.num_silent or fleet.target != state.decided:
        needed = max(needed, target)
    needs = [(at, count) for at, count in state.needs if now - at < goals.downscale_delay_s and count > needed]
    needs.append((now, needed))

    replicas = target
    if needed > target and pressed:
        replicas = needed
    elif needs[0][1] < target:
        # Serve lets only one replica go to none.
        replicas = needs[0][1] if target == 1 else max(1, needs[0][1])
        reason = f"no more was needed for {goals.downscale_delay_s:g} s"
    reason += f"; demand {most.replicas:.2f}, {usual.expected:.2f} expected"
    return Decision(replicas, State(tuple(needs), replicas, fleet.serving, since, speed, usual), reason)


class AutoscalingPolicy:
    """Calls `decide` for Ray Serve's controller, some ten times a second. Keeps nothing itself.

    Args:
        log_level: the service's; the controller has one of its own.
        goals: the fields of Goals.
    """

    def __init__(self, *, log_level: str, **goals: Any) -> None:
        self._goals = Goals(**goals)
        logger.setLevel(log_level)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state for the next call. What goes wrong in here changes no number."""
        try:
            now = time.time() if context.current_time is None else context.current_time
            state = context.policy_state.get("scaling", State())
            fleet, seen = fleet_of(context, context.policy_state.get("seen", {}), now)
            decision = decide(fleet, self._goals, state, now)
        except Exception:
            if not context.policy_state.get("failed"):
                logger.exception("autoscaling_failed deployment=%s", context.deployment_name)
            return context.target_num_replicas, context.policy_state | {"failed": True}
        before, name = context.target_num_replicas, context.deployment_name
        if state.decided not in (-1, before):
            _log_change(
                name, state.decided, before, "set by Serve, as for the first request of a model without replicas"
            )
        if decision.replicas != before:
            _log_change(name, before, decision.replicas, decision.reason)
        return decision.replicas, {"scaling": decision.state, "seen": seen}


def _log_change(deployment: str, before: int, target: int, reason: str) -> None:
    logger.info("autoscaling deployment=%s replicas=%d target=%d reason=%s", deployment, before, target, reason)


class Seen(NamedTuple):
    """The last report of a replica: its time by that node's clock, and since when it has been there by ours."""

    stamp: float
    at: float


def fleet_of(
    context: AutoscalingContext, seen: Mapping[ReplicaID, Seen], now: float
) -> tuple[Fleet, dict[ReplicaID, Seen]]:
    """What Ray knows of a deployment's replicas, and of each that has ever reported, what of that was seen and when.

    Args:
        seen: what this returned at the call before.
    """
    metrics = context.raw_metrics or {}
    stats, seen_now = [], {}
    for replica_id in context.running_replicas:
        series = {name: metrics.get(name, {}).get(replica_id) for name in ReplicaStats._fields}
        latest = {name: points[-1] for name, points in series.items() if points}
        report = ReplicaStats.parse({name: point.value for name, point in latest.items()})
        if report is None:
            continue
        stats.append(report)
        stamp = min(point.timestamp for point in latest.values())
        before = seen.get(replica_id)
        seen_now[replica_id] = before if before is not None and before.stamp == stamp else Seen(stamp, now)
    num_fresh = sum(now - each.at <= STALE_S for each in seen_now.values())
    queued = context.total_queued_requests or 0.0
    fleet = Fleet(
        target=context.target_num_replicas,
        serving=len(context.running_replicas),
        stats=stats,
        num_silent=len(context.running_replicas) - num_fresh,
        queued=queued if math.isfinite(queued) else 0.0,
        min_replicas=context.capacity_adjusted_min_replicas,
        max_replicas=context.capacity_adjusted_max_replicas,
    )
    return fleet, seen_now
