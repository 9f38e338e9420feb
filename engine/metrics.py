"""What an engine counts, as Prometheus collectors in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.outputs import EngineLoad, EngineOutput, RequestTiming
from engine.request import FinishReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


class EngineMetrics:
    """One engine's counters, gauges and histograms. Written on the engine's thread, read by whoever scrapes.

    Attributes:
        registry: holds these collectors and nothing else, so that several engines can live in one process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._running = self._gauge("manta_requests_running", "Requests that are being computed")
        self._waiting = self._gauge("manta_requests_waiting", "Requests that wait for their first or next turn")
        self._kv_usage = self._gauge("manta_kv_cache_usage_ratio", "Share of the KV blocks held by running requests")
        self._kv_blocks = self._gauge("manta_kv_cache_blocks", "KV blocks that there are")
        self._queued_prefill = self._gauge("manta_queued_prefill_tokens", "Prompt tokens still to be computed")
        self._prompt_tokens = self._counter("manta_prompt_tokens", "Prompt tokens of the requests that were started")
        self._generated_tokens = self._counter("manta_generated_tokens", "Tokens generated")
        self._computed_tokens = self._counter(
            "manta_computed_tokens", "Tokens that steps computed, drafts and repetitions included"
        )
        self._prefix_queries = self._counter(
            "manta_prefix_cache_queried_tokens", "Tokens looked up in the prefix cache"
        )
        self._prefix_hits = self._counter("manta_prefix_cache_hit_tokens", "Tokens found in the prefix cache")
        self._preemptions = self._counter("manta_preemptions", "Times that a running request lost its KV blocks")
        self._steps = self._counter("manta_engine_steps", "Steps of the engine")
        self._overlapped_steps = self._counter(
            "manta_engine_overlapped_steps", "Steps that were submitted while another one was in flight"
        )
        self._failed_steps = self._counter(
            "manta_engine_failed_steps", "Steps that failed, after which their requests were tried again"
        )
        self._finished = Counter(
            "manta_requests_finished",
            "Requests that ended, by reason",
            ["reason"],
            registry=self.registry,
        )
        for reason in FinishReason:
            self._finished.labels(reason=reason.value)
        self._queue_time = self._histogram("manta_queue_time_seconds", "Arrival to first scheduling", _SECONDS)
        self._first_token = self._histogram("manta_time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self._per_token = self._histogram(
            "manta_time_per_output_token_seconds", "Mean time between a request's tokens", _TOKEN_SECONDS
        )
        self._latency = self._histogram("manta_e2e_latency_seconds", "Arrival to the end, in the engine", _SECONDS)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)

    def observe_load(self, load: EngineLoad) -> None:
        """Sets the gauges."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._kv_blocks.set(load.kv_blocks_total)
        self._kv_usage.set(load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0)
        self._queued_prefill.set(load.queued_prefill_tokens)

    def observe_start(self, num_prompt_tokens: int) -> None:
        """Counts a request that was accepted."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def observe_executed_step(self) -> None:
        """Counts a step whose results are asked for, whether or not it fails."""
        self._steps.inc()

    def observe_failed_step(self) -> None:
        """Counts an executed step that failed."""
        self._failed_steps.inc()

    def observe_computed(self, num_tokens: int) -> None:
        """Counts the tokens of a step that did not fail."""
        self._computed_tokens.inc(num_tokens)

    def observe_overlap(self) -> None:
        """Counts a step that was submitted while another one was in flight."""
        self._overlapped_steps.inc()

    def observe_step(
        self, outputs: Iterable[EngineOutput], *, preemptions: int, prefix_queried: int, prefix_hit: int
    ) -> None:
        """Counts what a step put out, and what happened in the bookkeeping since the last one."""
        self._preemptions.inc(preemptions)
        self._prefix_queries.inc(prefix_queried)
        self._prefix_hits.inc(prefix_hit)
        generated = 0
        for output in outputs:
            generated += len(output.new_token_ids)
            if output.timing is not None:
                self._observe_times(output.timing, len(output.new_token_ids))
            if output.finish_reason is not None:
                self._finished.labels(reason=output.finish_reason.value).inc()
        self._generated_tokens.inc(generated)

    def _observe_times(self, timing: RequestTiming, num_new_tokens: int) -> None:
        first, last, count = timing.first_token_at, timing.finished_at, timing.num_generated_tokens
        # An output carries times at the first token and at the end, which may be the same output.
        is_first = 0 < num_new_tokens == count
        if is_first and timing.scheduled_at is not None and first is not None:
            self._queue_time.observe(timing.scheduled_at - timing.queued_at)
            self._first_token.observe(first - timing.queued_at)
        if last is not None:
            self._latency.observe(last - timing.queued_at)
            if first is not None and count > 1:
                self._per_token.observe((last - first) / (count - 1))
