"""What the gRPC side counts of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from app.openai.metrics import LATENCY_BUCKETS


class GrpcMetrics:
    """Collectors of one ingress, in the registry that it is given; touched on its event loop alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "manta_grpc_requests", "gRPC calls answered, by method and status", ["method", "status"], registry=registry
        )
        self.latency = Histogram(
            "manta_grpc_request_duration_seconds",
            "From a gRPC call's arrival to the end of its answer",
            ["method"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.in_flight = Gauge("manta_grpc_requests_in_flight", "gRPC calls being answered", registry=registry)
        self.disconnects = Counter(
            "manta_grpc_client_disconnects",
            "gRPC calls that their clients cancelled, or whose deadline passed, before their answer ended",
            registry=registry,
        )
