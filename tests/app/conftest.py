"""One Ray cluster with Serve for all tests of the application."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

GRPC_SERVICERS = [
    "app.grpc.proxy.add_manta",
    "app.grpc.proxy.add_health",
]


@pytest.fixture(scope="session")
def grpc_port() -> int:
    """Where Serve's gRPC proxy listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def serve_url(grpc_port: int) -> Iterator[str]:
    """Starts Ray and Serve; the value is where Serve's HTTP proxy listens."""
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # More logical CPUs than there are: what the tests start mostly sleeps.
    ray.init("local", num_cpus=32, include_dashboard=False, logging_level="error", log_to_driver=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        grpc_options={"port": grpc_port, "grpc_servicer_functions": GRPC_SERVICERS},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def deploy_scripted(serve_url: str) -> Iterator[Callable[..., Any]]:
    """Deploys ScriptedReplicas as an application and returns its handle; the same name again changes it."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from engine.config import EngineConfig
    from tests.app.scripted_engine import ScriptedReplica

    names: set[str] = set()

    def deploy(
        name: str,
        num_replicas: int | None = 1,
        *,
        max_num_seqs: int = 64,
        max_queued_requests: int = 64,
        lease_s: float = 10.0,
        stall_timeout_s: float | None = None,
        **options: Any,
    ) -> Any:
        names.add(name)
        deployment = serve.deployment(
            name="replica",
            num_replicas=num_replicas,
            max_ongoing_requests=1000,
            ray_actor_options={"num_cpus": 0.1},
            graceful_shutdown_wait_loop_s=0.2,
            health_check_period_s=0.3,
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
            request_router_config=RequestRouterConfig(
                request_router_class="app.router.router:PrefixCacheRouter",
                request_router_kwargs={"max_queued_requests": max_queued_requests},
            ),
            **options,
        )(ScriptedReplica)
        config = EngineConfig(model="scripted", max_num_seqs=max_num_seqs)
        return serve.run(
            deployment.bind(config, max_queued_requests, lease_s, stall_timeout_s),
            name=name,
            route_prefix=None,
            logging_config={},
        )

    yield deploy
    for name in names:
        serve.delete(name, _blocking=False)
