"""The application as it is built from a configuration: two engines with a tiny model, two ingresses."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.config import ServiceConfig
from app.engine_client import RayEngineClient
from app.main import build
from engine.config import EngineConfig
from engine.hub import load_model_config
from engine.kv_cache.block_hash import hash_blocks, root_hash
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def service(serve_url: str, tiny_folder: Path) -> Iterator[str]:
    """Its URL."""
    from ray import serve

    engine = {
        "load_format": "dummy",
        "dtype": "float32",
        "num_threads": 1,
        "num_kv_blocks": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
    }
    config = ServiceConfig.model_validate(
        {
            "models": [
                {
                    "name": name,
                    "model": str(tiny_folder),
                    "engine": engine | {"seed": seed},
                    "num_replicas": replicas,
                    "health_check_period_s": 1,
                    "graceful_shutdown_timeout_s": 10,
                }
                for name, replicas, seed in (("tiny", 2, 0), ("other", 1, 1))
            ],
            "access": {"open": True},
            "ingress": {
                "num_replicas": 2,
                "num_cpus": 0.1,
                "graceful_shutdown_timeout_s": 10,
                "metrics_max_age_s": 0,
            },
            "log_level": "WARNING",
        }
    )
    serve.run(build(config), name="manta", route_prefix="/")
    yield serve_url
    serve.delete("manta")


@pytest.fixture
async def http(service: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service, timeout=60) as client:
        yield client


async def complete(http: httpx.AsyncClient, model: str = "tiny", **given: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": "one two three", "max_tokens": 8, "temperature": 0, "ignore_eos": True} | given
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def samples(http: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """By name and replica, summed over the other labels."""
    totals: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            key = sample.name, sample.labels["replica"]
            totals[key] = totals.get(key, 0.0) + sample.value
    return totals


async def test_each_model_answers_with_its_own_tokens(http: httpx.AsyncClient) -> None:
    tiny = [(await complete(http))["choices"][0]["text"] for _ in range(4)]
    other = (await complete(http, "other"))["choices"][0]["text"]
    assert len(set(tiny)) == 1, "whichever replica and ingress"
    assert other != tiny[0]
    assert [m["id"] for m in (await http.get("/v1/models")).json()["data"]] == ["tiny", "other"]


async def test_an_answer_bears_one_request_id(http: httpx.AsyncClient) -> None:
    given = await http.get("/v1/models", headers={"x-request-id": "mine-1"})
    drawn = await http.get("/v1/models")
    assert given.headers.get_list("x-request-id") == ["mine-1"]
    assert len(drawn.headers.get_list("x-request-id")) == 1


async def test_metrics_cover_every_process_and_count_every_token(http: httpx.AsyncClient) -> None:
    before = await samples(http)
    await asyncio.gather(*[complete(http, prompt=f"prompt {i}", max_tokens=10) for i in range(20)])
    after = await samples(http)

    def total(name: str, page: dict[tuple[str, str], float]) -> float:
        return sum(value for (n, _), value in page.items() if n == name)

    assert total("manta_generated_tokens_total", after) - total("manta_generated_tokens_total", before) == 200
    assert sum(name == "manta_generated_tokens_total" for name, _ in after) == 3, "engines"
    assert sum(name == "manta_http_requests_in_flight" for name, _ in after) == 2, "ingresses"
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith(("_total", "_count")))


async def test_a_process_learns_which_blocks_the_engines_hold(service: str, tiny_folder: Path) -> None:
    from ray import serve

    model_config = load_model_config(EngineConfig(model=str(tiny_folder), load_format="dummy", dtype="float32"))
    prompts = {f"blocks-{i}": tuple(range(i, i + 50)) for i in range(6)}
    handle = serve.get_deployment_handle("model-tiny", "manta")
    client = RayEngineClient(handle, ingress_id="a test", ingress=None, replica_wait_s=10.0)
    try:

        async def run(name: str) -> int:
            request = EngineRequest(
                request_id=name, prompt_token_ids=prompts[name], params=SamplingParams(max_tokens=2), seed=1
            )
            return sum([len(o.new_token_ids) async for outputs in client.generate([request]) for o in outputs])

        assert await asyncio.gather(*map(run, prompts)) == [2] * 6
        root = root_hash(model_config, 16)
        for _ in range(200):
            held = set().union(*(client.replicas.cached_blocks(i) for i in client.replicas.members))
            if all(set(hash_blocks(tokens, 16, root)) <= held for tokens in prompts.values()):
                break
            await asyncio.sleep(0.05)
        for tokens in prompts.values():
            blocks = hash_blocks(tokens, 16, root)
            assert len(blocks) == 3
            assert set(blocks) <= held
    finally:
        await client.close()


async def test_a_client_that_leaves_frees_the_engine(http: httpx.AsyncClient) -> None:
    before = await samples(http)
    body = {"model": "tiny", "prompt": "go on", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    for _ in range(200):
        now = await samples(http)
        running = sum(value for (name, _), value in now.items() if name == "manta_requests_running")
        generated = sum(
            value - before.get(key, 0.0) for key, value in now.items() if key[0] == "manta_generated_tokens_total"
        )
        if running == 0 and generated > 0:
            break
        await asyncio.sleep(0.05)
    assert running == 0
    assert 0 < generated < 400


async def test_clients_do_not_notice_that_a_replica_was_killed(http: httpx.AsyncClient) -> None:
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 7},
        {"temperature": 0.8, "seed": 8, "n": 2, "logprobs": 2},
        {"temperature": 0.7, "seed": 9, "top_p": 0.9, "frequency_penalty": 0.5, "min_tokens": 30},
    ]
    bodies = [body | {"prompt": f"prompt {i}", "max_tokens": 480} for i in range(4) for body in bodies]
    undisturbed = await asyncio.gather(*[complete(http, **body) for body in bodies])
    before = await samples(http)
    victim = next(p for p in psutil.process_iter() if "manta:model-tiny" in " ".join(_cmdline(p)) and _is_ours(p))
    begun = asyncio.Event()

    async def stream(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        choices: dict[int, dict[str, Any]] = {}
        given = {"model": "tiny", "ignore_eos": True, "stream": True, **body}
        async with http.stream("POST", "/v1/completions", json=given) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                begun.set()
                for choice in json.loads(line[6:])["choices"]:
                    whole = choices.setdefault(choice["index"], {"text": "", "tokens": [], "finish_reason": None})
                    whole["text"] += choice["text"]
                    whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
                    whole["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
        return choices

    running = [asyncio.create_task(stream(body)) for body in bodies]
    await begun.wait()
    os.kill(victim.pid, signal.SIGKILL)
    for streamed, whole in zip(await asyncio.gather(*running), undisturbed, strict=True):
        for choice in whole["choices"]:
            tokens = (choice["logprobs"] or {}).get("tokens", [])
            expected = {"text": choice["text"], "tokens": tokens, "finish_reason": "length"}
            assert streamed[choice["index"]] == expected
    resumed = sum(value for (name, _), value in (await samples(http)).items() if name == "manta_requests_resumed_total")
    assert resumed > sum(value for (name, _), value in before.items() if name == "manta_requests_resumed_total")


async def test_health_names_a_model_without_replicas_until_it_is_back(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    (process,) = [p for p in psutil.process_iter() if "manta:model-other" in " ".join(_cmdline(p)) and _is_ours(p)]
    os.kill(process.pid, signal.SIGKILL)
    seen: list[int] = []
    for _ in range(600):
        response = await http.get("/health")
        seen.append(response.status_code)
        if response.status_code == 503:
            assert "other" in response.text
        if seen[-1] == 200 and 503 in seen:
            break
        await asyncio.sleep(0.05)
    assert 503 in seen
    assert seen[-1] == 200
    assert (await complete(http, "other"))["choices"][0]["text"]


def _cmdline(process: Any) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_ours(process: Any) -> bool:
    """Started by this test's Ray, not by another one on the machine."""
    return os.getsid(process.pid) == os.getsid(0) or os.getpid() in {p.pid for p in process.parents()}
