"""The demo service through real clients: the real model, on our engine, inside Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Service

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def metrics(service: Service) -> dict[str, float]:
    """Every sample's value, summed over labels; buckets left out."""
    totals: dict[str, float] = {}
    text = httpx.get(f"{service.url}/metrics").raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


async def until_blocks_return(service: Service) -> None:
    for _ in range(100):
        now = metrics(service)
        if now["manta_requests_running"] == now["manta_kv_cache_usage_ratio"] == 0:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"blocks are still held: {now}")


async def test_chat_answers(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_stream_equals_the_whole(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == "The capital of France is Paris."
    assert usage is not None
    assert usage.completion_tokens > 0


async def test_raw_stream_is_server_sent_events(service: Service) -> None:
    body = {"model": "demo", "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0, "stream": True}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{service.url}/v1/completions", json=body) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line async for line in response.aiter_lines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event[6:])["object"] == "text_completion" for event in events[:-1])


async def test_sixty_four_requests_at_once_are_all_right(client: AsyncOpenAI) -> None:
    async def ask(index: int) -> list[str]:
        answer = await client.completions.create(
            model="demo",
            prompt=f"{index}, {index + 1}, {index + 2},",
            max_tokens=12,
            temperature=0.7,
            seed=index,
            n=2 if index % 8 == 0 else 1,
        )
        assert len(answer.choices) == (2 if index % 8 == 0 else 1)
        return [choice.text for choice in answer.choices]

    together = await asyncio.gather(*(ask(index) for index in range(64)))
    assert all(text for texts in together for text in texts)
    # The demo computes in bfloat16, where a batch may round differently; a repeat alone still agrees for most.
    again = [await ask(index) for index in range(1, 9)]
    assert sum(left == right for left, right in zip(together[1:9], again, strict=True)) >= 4


async def test_a_disconnected_stream_gives_its_blocks_back(client: AsyncOpenAI, service: Service) -> None:
    before = metrics(service)
    stream = await client.completions.create(
        model="demo", prompt="Write a very long story.", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    assert metrics(service)["manta_requests_running"] == 1
    await stream.close()
    await until_blocks_return(service)
    assert metrics(service)["manta_generated_tokens_total"] - before["manta_generated_tokens_total"] < 500


async def test_a_disconnected_request_without_stream_gives_its_blocks_back(service: Service) -> None:
    body = {"model": "demo", "prompt": "Write a very long story.", "max_tokens": 4000, "ignore_eos": True, "n": 3}
    async with httpx.AsyncClient(timeout=1.0) as http:
        with contextlib.suppress(httpx.ReadTimeout):
            await http.post(f"{service.url}/v1/completions", json=body)
            pytest.fail("the request should have taken longer")
    await until_blocks_return(service)
    assert metrics(service)["manta_requests_running"] == 0


async def test_bad_requests_get_openai_errors_and_cost_no_neighbour(client: AsyncOpenAI, service: Service) -> None:
    neighbour = asyncio.create_task(
        client.completions.create(model="demo", prompt="A neighbour", max_tokens=64, extra_body={"ignore_eos": True})
    )
    with pytest.raises(BadRequestError) as refused:
        await client.completions.create(model="demo", prompt="Hi", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(NotFoundError):
        await client.completions.create(model="nobody", prompt="Hi")
    async with httpx.AsyncClient() as http:
        broken = await http.post(f"{service.url}/v1/completions", content=b"{", headers={"content-type": "text/json"})
        long = await http.post(
            f"{service.url}/v1/completions", json={"model": "demo", "prompt": [1] * 9000, "max_tokens": 1}
        )
    for response in (broken, long):
        assert response.status_code == 400
        assert set(response.json()["error"]) >= {"message", "type", "param", "code"}
    assert (await neighbour).usage is not None
    usage = (await neighbour).usage
    assert usage is not None
    assert usage.completion_tokens == 64


async def test_metrics_count_what_happened(client: AsyncOpenAI, service: Service) -> None:
    before = metrics(service)
    answer = await client.completions.create(
        model="demo", prompt="Count: one", max_tokens=9, extra_body={"ignore_eos": True}
    )
    after = metrics(service)
    assert answer.usage is not None
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["manta_generated_tokens_total"] == 9
    assert grown["manta_prompt_tokens_total"] == answer.usage.prompt_tokens
    for histogram in ("time_to_first_token", "time_per_output_token", "queue_time", "e2e_latency"):
        assert grown[f"manta_{histogram}_seconds_count"] == 1
    for name in ("manta_requests_waiting", "manta_preemptions_total", "manta_prefix_cache_hit_tokens_total"):
        assert name in after


async def test_a_repeated_prompt_hits_the_prefix_cache(client: AsyncOpenAI) -> None:
    prompt = "The same long beginning, again and again. " * 12
    first = await client.completions.create(model="demo", prompt=prompt, max_tokens=1)
    second = await client.completions.create(model="demo", prompt=prompt, max_tokens=1)
    assert first.usage is not None
    assert second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert (details.cached_tokens or 0) >= first.usage.prompt_tokens - 17


async def test_terminal_chat_answers(service: Service) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [str(Path(sys.executable).parent / "manta"), "chat", "--url", service.url, "--temperature", "0"],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "The capital of France is Paris." in done.stdout


def test_the_whole_service_takes_less_than_three_gibibytes(service: Service) -> None:
    serve = psutil.Process(service.process.pid)
    total, names = 0, []
    for process in (serve, *serve.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
            names.append(process.name())
    # Ray's own daemons and the replica are among them, so that nothing is missing from the sum.
    assert {"raylet", "gcs_server"} <= set(names)
    assert any("ServeReplica" in name for name in names)
    assert total < 3 * 2**30


def test_health_and_version(service: Service) -> None:
    assert httpx.get(f"{service.url}/health").status_code == 200
    assert httpx.get(f"{service.url}/version").json()["version"]
    assert time.time() > httpx.get(f"{service.url}/v1/models").json()["data"][0]["created"] > 1_600_000_000


def test_the_log_says_that_it_is_ready_and_how_many_kv_blocks_there_are(service: Service) -> None:
    log = service.log.read_text()
    assert "service_ready models=demo" in log
    assert "kv_cache blocks=1092" in log


def test_engine_metrics_bear_the_served_name(service: Service) -> None:
    text = httpx.get(f"{service.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("manta_engine_steps_total")]
    assert lines
    assert all('model="demo"' in line and 'replica="' in line for line in lines)
