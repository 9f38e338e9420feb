"""How many replicas the policy wants, on a clock of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.autoscaling import Decision, Fleet, Goals, State, decide
from app.autoscaling_stats import ReplicaStats
from engine.step_times import StepTimes

GOALS = Goals(
    max_num_seqs=16,
    max_num_batched_tokens=1000,
    block_size=16,
    ttft_target_s=2.0,
    tpot_target_s=0.05,
    target_utilization=0.8,
    queue_drain_s=10.0,
    downscale_delay_s=60.0,
    window_s=30.0,
)
"""With STEPS a replica computes 10,000 tokens a second in full steps."""


def step_times(*steps: tuple[int, float]) -> dict[str, float]:
    """As a report has them, of so many tokens and seconds each, again and again."""
    times = StepTimes()
    for tokens, seconds in steps * 50:
        times = times.after(tokens, seconds)
    return dict(zip(ReplicaStats._fields[-5:], times, strict=True))


STEPS = step_times((10, 0.0208), (500, 0.06), (1000, 0.1))
NO_STEPS = dict.fromkeys(STEPS, 0.0)


def stats(**given: float) -> ReplicaStats:
    """A replica that has had nothing to do for a while, but for what is given."""
    idle = dict.fromkeys(ReplicaStats._fields, 0.0) | {"kv_blocks_total": 1000.0} | STEPS
    replica = ReplicaStats.parse(idle | given)
    assert replica is not None
    return replica


def fleet(target: int, replicas: Sequence[ReplicaStats], **given: Any) -> Fleet:
    options: dict[str, Any] = {"serving": len(replicas), "min_replicas": 1, "max_replicas": 32} | given
    return Fleet(target=target, stats=replicas, **options)


START_S = 1_000_000.0


class Clock:
    """Decides again and again, and does what was decided at once."""

    def __init__(self, target: int = 1, min_replicas: int = 1, max_replicas: int = 32, goals: Goals = GOALS) -> None:
        self.target = target
        self.now = START_S
        self.changes: list[int] = []
        self._bounds = {"min_replicas": min_replicas, "max_replicas": max_replicas}
        self._goals = goals
        self._state = State()

    def step(self, *replicas: ReplicaStats, seconds: float = 1.0, **given: Any) -> Decision:
        self.now += seconds
        decision = decide(fleet(self.target, replicas, **self._bounds | given), self._goals, self._state, self.now)
        self._state = decision.state
        if decision.replicas != self.target:
            self.changes.append(decision.replicas)
        self.target = decision.replicas
        return decision

    def share(self, seconds: int, **load: float) -> None:
        """A load that does not change, shared evenly by the replicas."""
        for _ in range(seconds):
            each = {name: value / max(1, self.target) for name, value in load.items()}
            self.step(*[stats(active=1, **each)] * self.target)


@pytest.mark.parametrize(
    ("load", "replicas", "reason"),
    [
        # 20,000 tokens a second are the work of 2 replicas, and of 2.5 at 80 %.
        ({"token_rate": 20_000}, 3, "tokens: 20000 a second"),
        # 300,000 tokens in 10 s are 30,000 a second.
        ({"queued_prefill_tokens": 300_000, "kv_blocks_total": 1e9}, 4, "tokens: 0 a second, 300000 queued"),
        ({"running": 16, "waiting": 48}, 5, "sequences: 64"),
        ({"running": 16, "kv_blocks_used": 990, "queued_prefill_tokens": 16_000}, 3, "KV blocks: 1.99"),
        # What an empty step takes is not known: these take 1.6 times the 50 ms that are aimed at.
        ({"running": 8, "decoding": 1} | step_times((0, 0.02), (1500, 0.14)), 3, "time per output token: 0.0801 s"),
    ],
)
def test_each_thing_that_runs_out_asks_for_what_it_needs_at_once(
    load: dict[str, float], replicas: int, reason: str
) -> None:
    decision = decide(fleet(1, [stats(active=1, **load)]), GOALS, State(), 0.0)
    assert (decision.replicas, decision.reason[: len(reason)]) == (replicas, reason)


def test_replicas_that_are_starting_count() -> None:
    burst = [stats(active=1, running=16, waiting=48)]
    assert decide(fleet(5, burst), GOALS, State(), 0.0).replicas == 5


def test_a_replica_that_has_measured_nothing_counts_with_the_others_speed() -> None:
    fresh = stats(active=1, token_rate=20_000, **NO_STEPS)
    assert decide(fleet(2, [fresh, stats()]), GOALS, State(), 0.0).replicas == 3


def test_a_fleet_that_has_measured_nothing_goes_by_its_sequences() -> None:
    fresh = stats(active=1, running=16, waiting=16, token_rate=9e9, **NO_STEPS)
    assert decide(fleet(1, [fresh]), GOALS, State(), 0.0).replicas == 3


def test_a_target_that_no_number_of_replicas_reaches_asks_for_none() -> None:
    clock = Clock(target=2)
    clock.step(stats(active=1, running=1, decoding=1, **step_times((1, 0.1))), stats())
    slow = stats(active=1, running=8, decoding=1, **step_times((10, 0.3)))
    clock.step(slow, slow)
    assert clock.changes == []


def test_the_time_per_output_token_asks_for_no_more_replicas_than_there_are_sequences() -> None:
    slow = stats(active=1, running=3, decoding=1, **step_times((3, 1.0)))
    assert decide(fleet(1, [slow]), GOALS, State(), 0.0).replicas == 4


def test_what_an_all_but_empty_step_takes_is_not_the_loads_fault() -> None:
    clock = Clock(target=2)
    clock.step(stats(active=1, running=1, decoding=1, **step_times((1, 0.04))), stats())
    # 4 of the 10 ms that there are to share, where there were 44 of 50 if steps took no time of their own.
    decoding = stats(active=1, running=8, decoding=1, token_rate=8 / 0.044, **step_times((8, 0.044)))
    clock.step(decoding, decoding)
    assert clock.changes == []


def test_a_replica_that_somebody_else_started_gets_the_whole_delay() -> None:
    goals = replace(GOALS, downscale_delay_s=60.0)
    clock = Clock(target=0, min_replicas=0, goals=goals)
    clock.step(seconds=100)
    clock.target = 1  # by Ray, for a request whose client then gave up
    for _ in range(59):
        clock.step()
    assert clock.target == 1
    for _ in range(3):
        clock.step()
    assert clock.target == 0


def test_what_waits_at_ingresses_while_the_replicas_are_full_asks_for_more() -> None:
    full = stats(active=1, running=16)
    assert decide(fleet(1, [full], queued=16.0), GOALS, State(), 0.0).replicas == 3
    assert decide(fleet(1, [stats(active=1, running=15)], queued=15.0), GOALS, State(), 0.0).replicas == 2


def test_slow_steps_ask_for_what_computes_the_same_tokens_in_time() -> None:
    clock = Clock()
    clock.step(stats(active=1, running=1, decoding=1, **step_times((1, 0.02))))
    # Of 80 ms a step 60 are for 12 tokens; 50 ms a step leave 30, for 6 tokens: 150 tokens/s take 1.25 replicas.
    slow = stats(active=1, running=12, decoding=1, token_rate=12 / 0.08, **step_times((12, 0.08)))
    decision = clock.step(slow)
    assert (decision.replicas, decision.reason[:21]) == (2, "time per output token")


def test_steps_of_decodes_alone_say_nothing_of_prompts() -> None:
    """A sequence costs a step more than a token of a prompt does: it reads all its keys and values."""
    decodes = step_times((4, 0.024), (16, 0.036))
    clock = Clock(target=1)
    clock.step(stats(active=1, running=8, queued_prefill_tokens=20_000, kv_blocks_total=9e9, **decodes))
    assert clock.changes == []
    clock.step(stats(active=1))
    clock.step(stats(active=1, running=8, queued_prefill_tokens=200_000, kv_blocks_total=9e9, **decodes))
    assert clock.changes == [2], "by the speed that was measured when there were prompts"


def test_steps_without_a_second_token_have_no_time_per_output_token() -> None:
    prefilling = stats(active=1, running=1, **step_times((0, 0.02), (1500, 0.14)))
    assert decide(fleet(1, [prefilling]), GOALS, State(), 0.0).replicas == 1


def test_a_load_that_swings_gets_more_in_reserve_than_a_steady_one() -> None:
    steady, swinging = Clock(), Clock()
    for _ in range(60):
        steady.share(10, token_rate=20_000)
        swinging.share(5, token_rate=15_000)
        swinging.share(5, token_rate=25_000)
    # Half a replica is the standard deviation: (2 + 2.25 / 2) / 0.8, and a little for the mean, which follows.
    assert (steady.target, swinging.target) == (3, 4)


def test_a_large_fleet_needs_relatively_less_in_reserve() -> None:
    """Sixteen such loads at once, that do not swing together, swing four times as far."""
    few, many = Clock(), Clock(max_replicas=100)
    for _ in range(60):
        for sign in (-1, 1):
            few.share(5, token_rate=20_000 + sign * 7_000)
            many.share(5, token_rate=16 * 20_000 + sign * 4 * 7_000)
    assert few.target == 5
    assert many.target == 48


def test_a_replica_goes_after_the_delay_in_which_it_was_never_needed() -> None:
    clock = Clock(target=4)
    clock.share(59, token_rate=8_000)
    assert clock.target == 4
    clock.share(2, token_rate=8_000)
    assert clock.changes == [1]


def test_one_moment_of_need_starts_the_delay_anew() -> None:
    clock = Clock(target=4)
    clock.share(50, token_rate=1000)
    clock.share(1, token_rate=24_000)
    clock.share(59, token_rate=1000)
    assert clock.changes == [3], "which is what that moment needed"
    clock.share(1, token_rate=1000)
    assert clock.changes == [3, 2], "for a load that has shown what it can do"
    clock.share(120, token_rate=1000)
    assert clock.changes == [3, 2, 1]


def test_fewer_replicas_stay_only_if_they_would_have_room() -> None:
    clock = Clock(target=3)
    # 2 replicas could do it, but then with 95 % of what they can.
    clock.share(300, token_rate=19_000)
    assert clock.changes == []


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_a_short_delay_is_not_outlasted_by_the_memory_of_a_burst(delay_s: float) -> None:
    clock = Clock(goals=replace(GOALS, downscale_delay_s=delay_s))
    clock.share(20, token_rate=80_000)
    assert clock.target == 10
    clock.share(20, token_rate=1000)
    assert clock.target == 1


def test_without_requests_the_last_replica_goes_and_with_one_it_comes_back() -> None:
    clock = Clock(target=3, min_replicas=0)
    for _ in range(62):
        clock.step(*[stats(token_rate=500)] * clock.target)
    assert clock.changes == [1, 0], "Serve lets only one replica go to none"
    clock.step(queued=1)
    assert clock.target == 1
    for _ in range(100):
        clock.step(queued=1, serving=0)
    assert clock.target == 1


def test_what_waits_for_the_first_replica_says_how_many_it_takes() -> None:
    clock = Clock(target=0, min_replicas=0)
    clock.step(queued=64)
    assert clock.target == 5


def test_a_request_now_and_then_keeps_the_last_replica() -> None:
    clock = Clock(target=1, min_replicas=0)
    for second in range(600):
        clock.step(stats(active=float(second % 40 == 0)))
    assert clock.changes == []


@pytest.mark.parametrize("num_silent", [1, 3])
def test_silent_replicas_hold_what_there_is_and_do_not_stop_what_is_needed(num_silent: int) -> None:
    clock = Clock(target=3)
    for _ in range(200):
        clock.step(*[stats()] * (3 - num_silent), serving=3, num_silent=num_silent)
    assert clock.changes == []
    if num_silent < 3:
        clock.step(stats(active=1, running=16, waiting=100), serving=3, num_silent=num_silent)
        assert clock.target == 8


def test_late_first_tokens_add_one_replica_at_a_time() -> None:
    late = stats(active=1, running=1, first_tokens=1, ttft_seconds=5.0, queue_seconds=4.0)
    clock = Clock(target=2)
    clock.step(late, late)
    clock.step(late, late, seconds=29.0)
    assert clock.changes == []
    clock.step(late, late)
    assert clock.changes == [3]
    # It starts, and for a window of its own nobody can know what it changed.
    for _ in range(100):
        clock.step(late, late)
    for _ in range(30):
        clock.step(late, late, late)
    assert clock.changes == [3]
    clock.step(late, late, late)
    assert clock.changes == [3, 4]


def test_late_first_tokens_settle_what_lies_between_the_thresholds() -> None:
    """2.6 busy replicas are too many for 3 at 80 %, but not so many that a fourth must come."""
    clock = Clock(target=3)
    late = {"first_tokens": 6.0, "ttft_seconds": 30.0, "queue_seconds": 24.0}
    clock.share(100, token_rate=26_000)
    assert clock.changes == []
    clock.share(1, token_rate=26_000, **late)
    assert clock.changes == [4]


def test_one_late_first_token_does_not_outweigh_many_that_are_in_time() -> None:
    late = stats(active=1, first_tokens=1, ttft_seconds=5.0, queue_seconds=4.0)
    quick = stats(active=1, first_tokens=99, ttft_seconds=50.0, queue_seconds=30.0)
    clock = Clock(target=2)
    for _ in range(100):
        clock.step(late, quick)
    assert [change for change in clock.changes if change > 2] == []


def test_first_tokens_that_are_late_for_their_own_length_add_nothing() -> None:
    long_prompts = stats(active=1, running=1, first_tokens=1, ttft_seconds=50.0, queue_seconds=4.0)
    clock = Clock(target=2)
    for _ in range(100):
        clock.step(long_prompts, long_prompts)
    assert [change for change in clock.changes if change > 2] == []


def test_late_first_tokens_keep_what_there_is() -> None:
    clock = Clock(target=2, max_replicas=2)
    for _ in range(200):
        clock.step(*[stats(active=1, first_tokens=1, ttft_seconds=5.0, queue_seconds=4.0)] * 2)
    assert clock.changes == []


LOADS = st.fixed_dictionaries(
    {
        "token_rate": st.floats(0, 200_000),
        "queued_prefill_tokens": st.floats(0, 200_000),
        "running": st.floats(0, 300),
        "waiting": st.floats(0, 300),
        "kv_blocks_used": st.floats(0, 5000),
    }
)


@settings(deadline=None)
@given(load=LOADS, start=st.integers(1, 32))
def test_a_steady_load_changes_the_number_once_at_most(load: dict[str, float], start: int) -> None:
    clock = Clock(target=start)
    clock.share(150, **load)
    assert len(clock.changes) <= 1
    assert decide(fleet(clock.target, [stats()] * clock.target), GOALS, State(), 0.0).replicas == clock.target


@settings(deadline=None, max_examples=30)
@given(loads=st.lists(LOADS, min_size=1, max_size=3), period=st.integers(1, 19))
def test_a_load_that_swings_faster_than_the_delay_changes_nothing_once_it_is_known(
    loads: list[dict[str, float]], period: int
) -> None:
    clock = Clock(target=1)
    while clock.now < START_S + 20 * GOALS.downscale_delay_s:
        for load in loads:
            clock.share(period, **load)
    clock.changes.clear()
    for load in loads * 8:
        clock.share(period, **load)
    assert clock.changes == []


REPLICAS = st.lists(
    st.tuples(*[st.floats(0, 1e12)] * len(ReplicaStats._fields)).map(lambda values: ReplicaStats(*values)), max_size=6
)


@settings(deadline=None)
@given(
    rounds=st.lists(st.tuples(REPLICAS, st.integers(0, 5), st.floats(0, 1e6)), min_size=1, max_size=5),
    bounds=st.tuples(st.integers(0, 9), st.integers(1, 9)).map(sorted),
    target=st.integers(0, 20),
)
def test_the_number_stays_within_its_bounds(
    rounds: list[tuple[list[ReplicaStats], int, float]], bounds: list[int], target: int
) -> None:
    low, high = bounds
    clock = Clock(target, low, high)
    for replicas, num_silent, queued in rounds:
        clock.step(*replicas, serving=len(replicas) + num_silent, num_silent=num_silent, queued=queued, seconds=40.0)
        assert low <= clock.target <= high
