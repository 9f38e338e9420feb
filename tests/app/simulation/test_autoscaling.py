"""Fleets whose size a policy decides: what is counted, on cases that are added up by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from ray.serve.config import AutoscalingConfig

from app.autoscaling_config import Autoscaling
from app.simulation.autoscaling import STALLED_S, Run, ScalingSetup, figures_of, run, setup_for
from app.simulation.demand import ReplicaClass
from app.simulation.fleet import MemberState
from app.simulation.requests import SCALE
from app.simulation.scaling_policies import FleetView, MantaPolicy, ScalingPolicy, fixed, ray_default
from app.simulation.step_cost import StepCost
from engine import EngineRequest
from tests.app.simulation.conftest import prompts

CLASS = ReplicaClass("test", StepCost(step_s=0.01, token_s=0.001, block_s=0.0), 64, max_num_batched_tokens=256)


def setup(
    requests: Sequence[EngineRequest], replicas: int = 1, *, startup_s: float = 60.0, ttft: float = 5.0
) -> ScalingSetup:
    return setup_for(
        requests, CLASS, startup_s=startup_s, initial_replicas=replicas, ttft_target_s=ttft, tpot_target_s=0.05
    )


def steps(*changes: tuple[float, int]) -> ScalingPolicy:
    """So many replicas from so many seconds on."""
    return lambda view: [count for since, count in changes if view.now >= since][-1]


def spread(seconds: float, count: int, output: int = 8) -> list[EngineRequest]:
    """Requests of one block each over so many seconds of the trace."""
    times = [seconds * index / count / SCALE for index in range(count)]
    return prompts(*([index] for index in range(count)), at=times, output=output)


TWO = (0.0, 10.0)
"""Arrivals of two requests in the scaled world: the second one comes at 320 s."""


def ended_well(result: Run, requests: Sequence[EngineRequest]) -> bool:
    wanted = {request.request_id: request.params.max_tokens for request in requests}
    return {record.request.request_id: record.num_output_tokens for record in result.records} == wanted


def test_a_request_alone_takes_what_the_constants_say() -> None:
    requests = prompts([1, 2], output=3)  # 32 tokens
    made = setup(requests)
    figures = figures_of(run(requests, made, fixed(1)), made)
    assert figures["ttft_p50"] == pytest.approx(SCALE * (0.01 + 32 * 0.001))
    assert figures["tpot_p50"] == pytest.approx(0.011)
    assert figures["slo_attainment"] == 1
    assert figures["scale_events"] == 0


def test_replica_hours_of_a_fixed_fleet_are_its_size_times_the_run() -> None:
    requests = prompts([1], [2], at=TWO)
    made = setup(requests, 3)
    result = run(requests, made, fixed(3))
    figures = figures_of(result, made)
    end = SCALE * (10.0 + 0.01 + 16 * 0.001)
    assert result.seconds == pytest.approx(end, abs=0.5)  # it is seen at the next decision
    assert figures["replica_hours"] == pytest.approx(3 * result.seconds / 3600)
    assert figures["mean_replicas"] == pytest.approx(3)
    assert figures["max_replicas"] == 3


def test_a_replica_is_paid_for_from_when_it_was_asked_for_to_when_it_is_gone() -> None:
    requests = prompts([1], [2], at=TWO)
    made = setup(requests)
    result = run(requests, made, steps((0, 1), (100, 2), (250, 1)))
    first, second = result.members
    assert first.gone_at is None
    assert [t * SCALE for t in (second.added_at, second.serving_at or 0, second.gone_at or 0)] == [100, 160, 250]
    figures = figures_of(result, made)
    assert figures["replica_hours"] == pytest.approx((result.seconds + 150) / 3600)
    assert figures["scale_events"] == 2
    assert figures["max_replicas"] == 2


def test_one_that_is_not_up_yet_goes_first_and_at_once() -> None:
    requests = prompts([1], [2], at=TWO)
    result = run(requests, setup(requests), steps((0, 1), (100, 2), (130, 1)))
    _, second = result.members
    assert second.serving_at is None
    assert second.gone_at == 130 / SCALE


def test_a_request_misses_its_objective_by_either_target() -> None:
    # Two at once: the second prompt waits for nothing, but both share a step of 10 + 2 * 16 ms.
    requests = prompts([1], [2], output=4)
    together = SCALE * (0.01 + 32 * 0.001)
    quick, late = setup(requests, ttft=together + 0.01), setup(requests, ttft=together - 0.01)
    result = run(requests, quick, fixed(1))
    assert figures_of(result, quick)["slo_attainment"] == 1
    missed = figures_of(result, late)
    assert (missed["slo_attainment"], missed["ttft_attainment"], missed["tpot_attainment"]) == (0, 0, 1)


def test_scaling_down_under_load_loses_no_request_and_pays_for_the_draining() -> None:
    requests = spread(400.0, 200, output=60)
    made = setup(requests, 3, startup_s=10.0)
    result = run(requests, made, steps((0, 3), (150, 1), (250, 3), (300, 2)))
    assert ended_well(result, requests)
    gone = [member for member in result.members if member.state is MemberState.GONE]
    assert len(gone) == 3
    drained = [(member.gone_at or 0) - (member.drained_at or 0) for member in gone]
    assert max(drained) > 0
    assert sum(record.replica_id is not None for record in result.records) == 200


def test_policies_see_what_serves_and_how_much_it_has() -> None:
    seen: list[FleetView] = []

    def looking(view: FleetView) -> int:
        seen.append(view)
        return 2

    requests = spread(200.0, 50, output=60)
    run(requests, setup(requests, 1), looking)
    assert [list(view.cores) for view in seen[:121:120]] == [["replica-0"], ["replica-0", "replica-1"]]
    assert any(sum(view.ongoing.values()) > 0 for view in seen)
    for view in seen:
        assert view.cores.keys() == view.ongoing.keys()
        assert sum(view.ongoing.values()) <= 50
    assert [view.now for view in seen[:4]] == [0.0, 0.5, 1.0, 1.5]


def test_requests_wait_where_there_is_no_replica_until_one_is_up() -> None:
    requests = spread(10.0, 5)
    made = setup(requests, 1, startup_s=60.0)
    result = run(requests, made, steps((0, 0), (20, 1)))
    assert ended_well(result, requests)
    ttfts = [SCALE * (record.ttft or 0) for record in result.records if record.arrival > 0]
    assert min(ttfts) > 60


def test_requests_that_never_get_a_replica_are_told() -> None:
    requests = prompts([1], [2], at=TWO)
    with pytest.raises(RuntimeError, match="2 requests can never run"):
        run(requests, setup(requests, 0), fixed(0))


def test_a_policy_may_take_its_time() -> None:
    requests = prompts([1])
    result = run(requests, setup(requests, 0), steps((0, 0), (STALLED_S, 1)))
    assert ended_well(result, requests)


def busy_then_quiet() -> list[EngineRequest]:
    """Some 1.5 replicas' worth for 300 s, then hardly anything for as long."""
    times = [*(index / 3 for index in range(900)), *(300 + 15 * index for index in range(20))]
    return prompts(*([index] for index in range(920)), at=[time / SCALE for time in times], output=16)


def _manta(made: ScalingSetup) -> ScalingPolicy:
    config = Autoscaling(max_replicas=6, ttft_target_s=5.0, tpot_target_s=0.05, downscale_delay_s=60.0)
    return MantaPolicy(config.goals(made.config), min_replicas=1, max_replicas=6)


def _ray(made: ScalingSetup) -> ScalingPolicy:
    return ray_default(
        AutoscalingConfig(
            min_replicas=1, max_replicas=6, target_ongoing_requests=8, upscale_delay_s=0, downscale_delay_s=60
        )
    )


@pytest.mark.parametrize("policy", [_manta, _ray])
def test_both_policies_grow_with_the_load_and_shrink_after_it(policy: Callable[[ScalingSetup], ScalingPolicy]) -> None:
    requests = busy_then_quiet()
    made = setup(requests, 1, startup_s=30.0)
    result = run(requests, made, policy(made))
    assert ended_well(result, requests)
    figures = figures_of(result, made)
    assert figures["max_replicas"] >= 2
    assert result.timeline[-1].target == 1
    assert figures["scale_events"] >= 2


@pytest.mark.parametrize("policy", [_manta, _ray])
def test_the_same_requests_give_the_same_figures(policy: Callable[[ScalingSetup], ScalingPolicy]) -> None:
    requests = spread(300.0, 600, output=16)
    made = setup(requests, 1, startup_s=30.0)
    figures = [figures_of(run(requests, made, policy(made)), made) for _ in range(2)]
    assert figures[0] == figures[1]
