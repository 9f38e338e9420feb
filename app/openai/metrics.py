"""What the HTTP side counts of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class IngressMetrics:
    """Collectors of one ingress, in the registry that it is given; touched on its event loop alone.

    Paths are route templates (`/v1/models/{model_id:path}`), `other` where no route matched, so that clients cannot
    invent label values.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "manta_http_requests", "HTTP requests answered, by path and status", ["path", "status"], registry=registry
        )
        self.latency = Histogram(
            "manta_http_request_duration_seconds",
            "From an HTTP request's arrival to the last byte of its answer",
            ["path"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "manta_ingress_time_to_first_token_seconds",
            "From an HTTP request's arrival to its first token at the ingress",
            ["model"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.resumed = Counter(
            "manta_requests_resumed",
            "Attempts to finish requests whose replica died on another one",
            ["model"],
            registry=registry,
        )
        self.in_flight = Gauge("manta_http_requests_in_flight", "HTTP requests being answered", registry=registry)
        self.disconnects = Counter(
            "manta_http_client_disconnects", "Clients that went away before their answer ended", registry=registry
        )
