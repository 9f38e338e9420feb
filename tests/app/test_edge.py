"""The ingress on a real Serve whose proxy obeys its clients, over engines that are slow or give nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import ServiceConfig
from app.engine_client import RayEngineClient
from app.ingress import IngressDeployment
from engine.tokenizer import load_tokenizer
from tests.app.scripted_engine import ScriptedReplica
from tests.app.test_transport import eventually, on_replicas

LONG = 400
AFTERWARDS = 20
"""Events of a stream that a removed replica must still give; each has a token or more."""

HEADERS = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1"}
"""No limit and no end, as far as Serve is concerned."""


class SlowReplica(ScriptedReplica):
    """A whole answer takes 40 s, so that a redeploy comes in its midst; no test waits for all of it."""

    STEP_S = 0.1


class StuckReplica(ScriptedReplica):
    STEP_S = 3600.0


def deploy(tiny_folder: Path, *, max_queued: int = 64, **ingress: Any) -> None:
    """The application `edge` with the models `slow` and `stuck`; another max_queued is another version of these."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    config = ServiceConfig.model_validate(
        {
            "models": [
                {"name": name, "model": str(tiny_folder), "engine": {"load_format": "dummy"}, "resume_wait_s": 0.5}
                for name in ("slow", "stuck")
            ],
            "access": {"open": True},
            "ingress": ingress,
            "log_level": "ERROR",
        }
    )
    common: dict[str, Any] = {
        "max_ongoing_requests": 1000,
        "graceful_shutdown_timeout_s": 60.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 0.5,
        "logging_config": {"enable_access_log": False, "log_level": "ERROR"},
    }
    router = RequestRouterConfig(
        request_router_class="app.router.router:PrefixCacheRouter",  # type: ignore[arg-type]
        request_router_kwargs={"max_queued_requests": max_queued},
    )
    models = {
        model.name: serve.deployment(
            name=model.name, ray_actor_options={"num_cpus": 0.1}, request_router_config=router, **common
        )(replica).bind(model.engine_config(), max_queued, 10.0)
        for model, replica in zip(config.models, (SlowReplica, StuckReplica), strict=True)
    }
    front = serve.deployment(name="ingress", ray_actor_options={"num_cpus": 0}, **common)(IngressDeployment)
    serve.run(front.bind(config, models), name="edge", route_prefix="/edge")


@pytest.fixture(scope="module")
def edge(serve_url: str, tiny_folder: Path) -> Iterator[Callable[..., str]]:
    """Deploys, and says where."""
    from ray import serve

    def make(**given: Any) -> str:
        deploy(tiny_folder, **given)
        return f"{serve_url}/edge"

    yield make
    serve.delete("edge", _blocking=False)


@pytest.fixture(scope="module")
def limited(edge: Callable[..., str]) -> str:
    return edge(request_timeout_s=3.0, idle_timeout_s=1.0)


@pytest.fixture
async def slow() -> AsyncIterator[RayEngineClient]:
    async with looking_at("slow") as client:
        yield client


@contextlib.asynccontextmanager
async def looking_at(model: str) -> AsyncIterator[RayEngineClient]:
    from ray import serve

    handle = serve.get_deployment_handle(model, "edge")
    client = RayEngineClient(handle, ingress_id=uuid.uuid4().hex, ingress=None, replica_wait_s=5.0)
    try:
        yield client
    finally:
        await client.close()


def body(model: str, **given: Any) -> dict[str, Any]:
    return {"model": model, "prompt": [1000, 7, 8], "max_tokens": LONG, "ignore_eos": True} | given


async def post(url: str, **given: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{url}/v1/completions", json=body(**given), headers=HEADERS)


async def nothing_runs(client: RayEngineClient) -> bool:
    async def idle() -> bool:
        return await on_replicas(client, "running") == []

    return await eventually(idle)


def error_codes(text: str) -> list[str]:
    """Of a whole answer or of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    return [each["error"]["code"] for each in map(json.loads, lines) if "error" in each]


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_takes_too_long_ends_whatever_its_headers_say(
    limited: str, slow: RayEngineClient, stream: bool
) -> None:
    answer = await post(limited, model="slow", stream=stream)
    assert answer.status_code == (200 if stream else 504)
    assert error_codes(answer.text) == ["timeout"]
    assert await nothing_runs(slow)
    assert await on_replicas(slow, "aborted")


@pytest.mark.parametrize("stream", [False, True])
async def test_request_without_a_token_ends_whatever_its_headers_say(limited: str, stream: bool) -> None:
    answer = await post(limited, model="stuck", stream=stream)
    assert (answer.status_code, error_codes(answer.text)) == (504, ["idle_timeout"])
    async with looking_at("stuck") as client:
        assert await nothing_runs(client)


async def test_client_that_leaves_frees_the_engine_whatever_its_headers_said(edge: Callable[..., str]) -> None:
    url = edge()
    async with httpx.AsyncClient(timeout=60) as http, looking_at("slow") as client:
        given = body("slow", stream=True)
        async with http.stream("POST", f"{url}/v1/completions", json=given, headers=HEADERS) as answer:
            lines = answer.aiter_lines()  # held: its end would close the connection
            assert (await anext(lines)).startswith("data: {")

            async def runs() -> bool:
                return len(await on_replicas(client, "running")) == 1

            assert await eventually(runs)
        assert await nothing_runs(client)
        assert len(await on_replicas(client, "aborted")) >= 1


@pytest.mark.parametrize("with_ingress", [False, True])
async def test_stream_survives_a_redeploy_that_removes_its_replica(
    edge: Callable[..., str], tiny_folder: Path, with_ingress: bool
) -> None:
    url = edge()
    change: dict[str, Any] = {"max_choices": 255} if with_ingress else {}

    async with httpx.AsyncClient(timeout=120) as http, looking_at("slow") as client:
        begun, removed = asyncio.Event(), asyncio.Event()

        async def stream() -> str:
            """What it has said some tokens after its replica's removal."""
            text, afterwards = "", 0
            given = body("slow", stream=True)
            async with http.stream("POST", f"{url}/v1/completions", json=given) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        begun.set()
                        text += json.loads(line[6:])["choices"][0]["text"]
                        afterwards += removed.is_set()
                    if afterwards == AFTERWARDS:
                        break
            return text

        async def known() -> frozenset[str]:
            return frozenset(client.replicas.members)

        before = await eventually(known)
        streamed = asyncio.create_task(stream())
        await begun.wait()
        redeployed = asyncio.create_task(asyncio.to_thread(edge, max_queued=65, **change))

        async def is_removed() -> bool:
            return not before & client.replicas.members

        assert await eventually(is_removed)
        assert not streamed.done(), "the test is too slow to say anything"
        removed.set()
        text = await streamed
        whole = load_tokenizer(tiny_folder).decode(range(1000, 1000 + LONG))
        assert len(text) >= AFTERWARDS
        assert whole.startswith(text)
        assert text != whole
        await redeployed
        after = await http.post(f"{url}/v1/completions", json=body("slow", max_tokens=2))
        assert after.status_code == 200
