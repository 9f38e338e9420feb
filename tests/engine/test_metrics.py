"""What an engine counts, read back from its registry."""

from __future__ import annotations

import pytest

from engine.metrics import EngineMetrics
from engine.outputs import EngineLoad, EngineOutput, RequestTiming
from engine.request import FinishReason


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None
    return found


def observe(metrics: EngineMetrics, *outputs: EngineOutput) -> None:
    metrics.observe_step(outputs, preemptions=0, prefix_queried=0, prefix_hit=0)


def test_times_of_a_request_are_observed_once() -> None:
    metrics = EngineMetrics()
    observe(metrics, EngineOutput("a", (1,), timing=RequestTiming(10.0, 10.5, 12.0, None, 1)))
    observe(metrics, EngineOutput("a", (2,)))
    last = RequestTiming(10.0, 10.5, 12.0, 16.0, 3)
    observe(metrics, EngineOutput("a", (3,), finish_reason=FinishReason.STOP, timing=last))
    assert value(metrics, "manta_queue_time_seconds_count") == 1
    assert value(metrics, "manta_queue_time_seconds_sum") == 0.5
    assert value(metrics, "manta_time_to_first_token_seconds_count") == 1
    assert value(metrics, "manta_time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "manta_e2e_latency_seconds_sum") == 6.0
    assert value(metrics, "manta_time_per_output_token_seconds_sum") == 2.0
    assert value(metrics, "manta_requests_finished_total", reason="stop") == 1
    assert value(metrics, "manta_generated_tokens_total") == 3


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_that_begins_and_ends_in_one_step_has_a_first_token(count: int) -> None:
    metrics = EngineMetrics()
    timing = RequestTiming(1.0, 1.0, 2.0, 2.0, count)
    observe(metrics, EngineOutput("a", tuple(range(count)), finish_reason=FinishReason.LENGTH, timing=timing))
    assert value(metrics, "manta_time_to_first_token_seconds_count") == 1
    assert value(metrics, "manta_e2e_latency_seconds_count") == 1


def test_a_request_that_never_ran_has_no_first_token() -> None:
    metrics = EngineMetrics()
    observe(metrics, EngineOutput("a", finish_reason=FinishReason.ABORT, timing=RequestTiming(1.0, None, None, 3.0)))
    assert value(metrics, "manta_time_to_first_token_seconds_count") == 0
    assert value(metrics, "manta_e2e_latency_seconds_sum") == 2.0
    assert value(metrics, "manta_requests_finished_total", reason="abort") == 1


def test_load_and_counts_are_shown() -> None:
    metrics = EngineMetrics()
    metrics.observe_load(EngineLoad(3, 2, 40, 5, 20))
    metrics.observe_start(7)
    metrics.observe_step([], preemptions=2, prefix_queried=100, prefix_hit=60)
    assert value(metrics, "manta_requests_running") == 3
    assert value(metrics, "manta_requests_waiting") == 2
    assert value(metrics, "manta_queued_prefill_tokens") == 40
    assert value(metrics, "manta_kv_cache_usage_ratio") == 0.25
    assert value(metrics, "manta_prompt_tokens_total") == 7
    assert value(metrics, "manta_preemptions_total") == 2
    assert value(metrics, "manta_prefix_cache_hit_tokens_total") == 60
