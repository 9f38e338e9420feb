"""The autoscaling policy in Ray Serve's controller: replicas come and go under real calls."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from app.autoscaling_config import Autoscaling
from app.config import ServiceConfig
from app.engine_client import RayEngineClient
from app.main import autoscaling_config, build
from engine.config import EngineConfig
from tests.app.scripted_engine import request
from tests.app.transport_clients import LONG, client_of, eventually, new_id, on_replicas, tokens_of

# Ray means to replace the setting by environment variables, and says so each time that it reads one.
pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")

SEATS = 4


@pytest.fixture
def deploy_scaled(deploy_scripted: Callable[..., Any]) -> Callable[..., Any]:
    """Deploys ScriptedReplicas that run SEATS requests each, as many as the policy says."""

    def deploy(name: str, **autoscaling: Any) -> Any:
        engine = EngineConfig(model="scripted", max_num_seqs=SEATS)
        scaling = autoscaling_config(Autoscaling(downscale_delay_s=1.0, **autoscaling), engine, "INFO")
        return deploy_scripted(name, None, max_num_seqs=SEATS, autoscaling_config=scaling)

    return deploy


async def become(client: RayEngineClient, number: int) -> bool:
    """Whether there are so many replicas at some time soon."""

    async def is_so() -> bool:
        return len(client.replicas.members) == number

    return bool(await eventually(is_so))


async def test_a_burst_brings_all_replicas_at_once_and_those_that_go_finish_their_streams(
    deploy_scaled: Callable[..., Any],
) -> None:
    async with client_of(deploy_scaled("burst", max_replicas=3)) as client:
        assert await become(client, 1)
        targets: set[int] = set()

        async def three() -> bool:
            status = serve.status().applications["burst"].deployments["replica"]
            targets.add(sum(status.replica_states.values()))
            return len(client.replicas.members) == 3

        burst = [asyncio.create_task(tokens_of(client, request(new_id(), 1, LONG))) for _ in range(9)]
        assert await eventually(three)
        assert targets <= {1, 3}, "there was never one more alone"

        # A few streams on each, less than one replica has room for; the burst ends.
        few = [request(new_id(), 1, 4000) for _ in range(3)]
        streams = [asyncio.create_task(tokens_of(client, each)) for each in few]

        async def all_started() -> bool:
            return len(await on_replicas(client, "running")) == 12

        assert await eventually(all_started)
        for task in burst:
            task.cancel()
        assert await become(client, 1)
        assert not any(task.done() for task in streams), "the test is too slow to say anything"
        assert {client.replicas.replica_of(each.request_id) for each in few} - client.replicas.members
        results = await asyncio.gather(*streams)
        assert results == [{each.request_id: list(range(1, 4001))} for each in few]


async def test_requests_wait_for_the_first_replica_and_the_last_one_goes(deploy_scaled: Callable[..., Any]) -> None:
    handle = deploy_scaled("none", min_replicas=0, max_replicas=1)
    async with client_of(handle, replica_wait_s=60.0) as client:
        for _ in range(2):
            assert await become(client, 0)

            async def none_left() -> bool:
                return not serve.status().applications["none"].deployments["replica"].replica_states

            assert await eventually(none_left)
            requests = [request(new_id()) for _ in range(3)]
            results = await asyncio.gather(*[tokens_of(client, each) for each in requests])
            assert results == [{each.request_id: [1, 2, 3, 4, 5]} for each in requests]


@pytest.fixture
def service(serve_url: str, tiny_folder: Path) -> Iterator[str]:
    """A service whose model has no replica until one is needed; its URL."""
    engine = {"load_format": "dummy", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 256}
    model = {
        "name": "tiny",
        "model": str(tiny_folder),
        "engine": engine,
        "autoscaling": {"min_replicas": 0, "max_replicas": 2},
    }
    ingress = {"num_cpus": 0.1, "heartbeat_s": 0.2}
    config = {"models": [model], "access": {"open": True}, "ingress": ingress, "log_level": "WARNING"}
    serve.run(build(ServiceConfig.model_validate(config)), name="zero", route_prefix="/zero")
    yield f"{serve_url}/zero"
    serve.delete("zero")


async def test_a_stream_stays_open_while_the_first_replica_starts(service: str) -> None:
    async with httpx.AsyncClient(base_url=service, timeout=60) as http:
        assert (await http.get("/ready")).status_code == 200, "none is missing"
        assert not serve.status().applications["zero"].deployments["model-tiny"].replica_states
        body = {"model": "tiny", "prompt": "one two", "max_tokens": 5, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
    assert lines[0].startswith(":")
    assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    assert "error" not in "".join(lines)
