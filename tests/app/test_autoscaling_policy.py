"""The autoscaling policy as Ray calls it, and what replicas report to it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from app.autoscaling import AutoscalingPolicy
from app.autoscaling_config import Autoscaling
from app.autoscaling_stats import Counts, ReplicaStats, StatsRecorder
from app.main import autoscaling_config
from engine.config import EngineConfig
from engine.llm import LLM
from engine.outputs import EngineLoad
from engine.sampling_params import SamplingParams
from tests.app.test_autoscaling import GOALS, stats

ANY = st.floats(allow_nan=True, allow_infinity=True) | st.integers() | st.none() | st.text(max_size=2)


def context(target: int, running: Sequence[ReplicaID], raw: Any, state: dict[str, Any], **given: Any) -> Any:
    options: dict[str, Any] = {
        "deployment_id": DeploymentID("model-demo"),
        "deployment_name": "model-demo",
        "app_name": "app",
        "current_num_replicas": len(running),
        "target_num_replicas": target,
        "running_replicas": list(running),
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": None,
        "raw_metrics": raw,
        "capacity_adjusted_min_replicas": 0,
        "capacity_adjusted_max_replicas": 8,
        "policy_state": state,
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": 0.0,
        "config": None,
    }
    return AutoscalingContext(**options | given)


def policy() -> AutoscalingPolicy:
    return AutoscalingPolicy(log_level="INFO", **asdict(GOALS))


def replica_ids(number: int) -> list[ReplicaID]:
    return [ReplicaID(str(i), DeploymentID("model-demo")) for i in range(number)]


def raw_metrics(*reports: dict[str, Any], at: float = 0.0) -> dict[str, dict[ReplicaID, list[TimeStampedValue]]]:
    """As Ray has them, of the replicas of replica_ids."""
    metrics: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    for replica_id, report in zip(replica_ids(len(reports)), reports, strict=True):
        for name, value in report.items():
            metrics.setdefault(name, {})[replica_id] = [TimeStampedValue(at, value)]
    return metrics


@settings(deadline=None)
@given(
    reports=st.lists(st.dictionaries(st.sampled_from(ReplicaStats._fields), ANY, max_size=14), min_size=1, max_size=4),
    at=st.floats(-1e9, 1e9),
    queued=st.floats(),
    target=st.integers(0, 8),
)
def test_broken_reports_raise_nothing_and_take_no_replica_away(
    reports: list[dict[str, Any]], at: float, queued: float, target: int
) -> None:
    running, raw = replica_ids(len(reports)), raw_metrics(*reports, at=at)
    scaler, state, wanted = policy(), {}, target
    for now in range(0, 300, 20):
        given_to = context(wanted, running, raw, state, current_time=float(now), total_queued_requests=queued)
        wanted, state = scaler(given_to)
        assert isinstance(wanted, int)
        assert target <= wanted <= 8
        assert not state.get("failed")


@settings(deadline=None)
@given(value=ANY)
def test_one_value_that_is_none_makes_a_report_none(value: Any) -> None:
    report = stats(active=1, running=16, waiting=400)._asdict()
    parsed = ReplicaStats.parse(report | {"kv_blocks_used": value})
    assert parsed is None or parsed == ReplicaStats(**report | {"kv_blocks_used": float(value)})


@pytest.mark.parametrize("clock_s", [-3600.0, 0.0, 3600.0])
def test_an_old_report_is_none_to_scale_down_by(clock_s: float) -> None:
    """Whatever the clock of the replica's node says."""
    running = replica_ids(2)
    scaler, state = policy(), {}
    wanted = []
    for now in range(200):
        raw = raw_metrics(stats()._asdict(), stats()._asdict(), at=clock_s + min(now, 20))
        replicas, state = scaler(context(2, running, raw, state, current_time=float(now)))
        wanted.append(replicas)
    assert wanted == [2] * 200
    for now in range(200, 261):
        raw = raw_metrics(stats()._asdict(), stats()._asdict(), at=clock_s + now)
        replicas, state = scaler(context(replicas, running, raw, state, current_time=float(now)))
    assert replicas == 0, "idle for downscale_delay_s, by new reports"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What goes to Serve's log, whose level is the controller's; it passes nothing on to the root."""
    serve_log = logging.getLogger("ray.serve")
    level = serve_log.level
    serve_log.addHandler(caplog.handler)
    serve_log.setLevel(logging.WARNING)
    yield caplog
    serve_log.removeHandler(caplog.handler)
    serve_log.setLevel(level)


def test_a_fault_of_the_policy_changes_nothing_and_is_logged_once(log: pytest.LogCaptureFixture) -> None:
    scaler, state = policy(), {"scaling": "nonsense"}
    for _ in range(3):
        wanted, state = scaler(context(3, replica_ids(1), {}, state))
        assert wanted == 3
    assert [r.getMessage() for r in log.records] == ["autoscaling_failed deployment=model-demo"]


def test_a_change_is_logged_once_with_its_reason(log: pytest.LogCaptureFixture) -> None:
    running, raw = replica_ids(1), raw_metrics(stats(active=1, running=16, waiting=16)._asdict())
    scaler = policy()
    wanted, state = scaler(context(1, running, raw, {}))
    wanted, state = scaler(context(wanted, running, raw, state))
    scaler(context(5, running, raw, state))
    assert [r.getMessage() for r in log.records] == [
        "autoscaling deployment=model-demo replicas=1 target=3 reason=sequences: 32, 16 a replica; "
        "demand 2.00, 2.00 expected",
        "autoscaling deployment=model-demo replicas=3 target=5 reason=set by Serve, as for the first request of a "
        "model without replicas",
    ]


# ---- a replica's reports ----


def load(received: int = 0, *, running: int = 0, queued_prefill_tokens: int = 0) -> EngineLoad:
    return EngineLoad(running, 0, queued_prefill_tokens, 0, 100, received)


def recorded(recorder: StatsRecorder, now: float, load: EngineLoad, counts: Counts) -> ReplicaStats:
    report = recorder.record(now, load, counts)
    assert all(type(value) is float for value in report.values()), "Ray would take no other report"
    parsed = ReplicaStats.parse(report)
    assert parsed is not None
    return parsed


def test_an_idle_replica_reports_that_it_is_idle() -> None:
    recorder = StatsRecorder()
    report = recorded(recorder, 5.0, load(), Counts())
    assert report == ReplicaStats(**dict.fromkeys(ReplicaStats._fields, 0.0) | {"kv_blocks_total": 100.0})


def test_a_request_that_came_and_went_between_two_reports_is_seen() -> None:
    recorder = StatsRecorder()
    active = [recorded(recorder, now, load(n), Counts()).active for now, n in enumerate((0, 1, 1, 2))]
    assert active == [0, 1, 0, 1]


def test_the_rate_counts_what_waits_as_well_as_what_was_done() -> None:
    recorder = StatsRecorder(window_s=10.0)
    recorded(recorder, 0.0, load(), Counts())
    recorded(recorder, 5.0, load(2, queued_prefill_tokens=300), Counts())
    later = recorded(recorder, 10.0, load(2, queued_prefill_tokens=100), Counts(200.0, 50.0))
    assert later.token_rate == (100 + 200) / 10


def test_rates_end_with_the_window() -> None:
    recorder = StatsRecorder(window_s=10.0)
    counts = Counts(400.0, 100.0, 4.0, 2.0, 1.0)
    reports = [recorded(recorder, float(now), load(4), counts) for now in range(12)]
    assert [r.token_rate for r in reports] == [40.0] * 10 + [0.0] * 2
    told = [(r.first_tokens, r.ttft_seconds, r.queue_seconds, r.decoding) for r in (reports[0], reports[-1])]
    assert told == [(4, 2.0, 1.0, 1), (0, 0, 0, 0)]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=40, max_size=40), min_size=2, max_size=3))
def test_the_rates_of_replicas_add_up_to_the_rate_of_their_load(tokens: list[list[int]]) -> None:
    """Whichever of them has it, and whenever it was started."""
    together, each = StatsRecorder(window_s=10.0), [StatsRecorder(window_s=10.0) for _ in tokens]
    started = [0, *(7 * (i + 1) for i in range(len(tokens) - 1))]
    done = [0] * len(tokens)
    for second in range(40):
        rate = 0.0
        for i, recorder in enumerate(each):
            if second >= started[i]:
                done[i] += tokens[i][second]
                rate += recorded(recorder, float(second), load(), Counts(float(done[i]))).token_rate
        assert rate == pytest.approx(recorded(together, float(second), load(), Counts(float(sum(done)))).token_rate)


@pytest.mark.parametrize("cached", [True, False])
def test_what_an_engine_did_is_read_from_its_metrics(tiny_folder: Path, cached: bool) -> None:
    llm = LLM(str(tiny_folder), load_format="dummy", num_kv_blocks=64, block_size=16, enable_prefix_caching=cached)
    prompt = {"prompt_token_ids": list(range(40))}
    for _ in range(2):
        llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    counts = Counts.of(llm.core.metrics.registry)
    prefill = 40 + (8 if cached else 40)
    assert counts.computed_tokens == prefill + 2 * 2, "two blocks of the second prompt were there; last tokens are not"
    assert (counts.generated_tokens, counts.first_tokens) == (6, 2)
    assert 0 < counts.queue_seconds < counts.ttft_seconds


@pytest.mark.parametrize(("limit", "seats"), [(None, 64), (8, 8), (500, 64)])
def test_a_replica_has_no_more_seats_than_it_is_given_requests(limit: int | None, seats: int) -> None:
    engine = EngineConfig(model="demo", max_num_seqs=64)
    config = autoscaling_config(Autoscaling(max_replicas=2), engine, "INFO", limit)
    assert config.policy.policy_kwargs["max_num_seqs"] == seats
