"""A client that goes away frees the engine. Over a real socket: in-process transports cannot hang up."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from ray.exceptions import TaskCancelledError

from app.ingress import RayReceive
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, post_scope, saying
from tests.app.openai.scripted_client import ScriptedClient

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
HOUR = 3600.0


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def until(condition: object) -> None:
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_client_that_goes_before_the_first_token_ends_the_call(
    app_over: AppOver, tokenizer: Tokenizer, stream: bool, prompts: int
) -> None:
    engine = saying(tokenizer, "Hello")
    engine.pauses = [HOUR]
    body = {"model": "demo", "prompt": ["Hi"] * prompts, "stream": stream}
    async with served(app_over(engine)) as url, httpx.AsyncClient() as client:
        post = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await until(lambda: len(engine.requests) == prompts)
        assert engine.closed == 0
        post.cancel()
        await until(lambda: engine.closed == prompts)


async def test_client_that_leaves_a_stream_ends_the_call(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there")
    engine.pauses = [0.0, HOUR]
    async with served(app_over(engine)) as url, httpx.AsyncClient() as client:
        async with client.stream("POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            assert b"Hello" in await anext(answer.aiter_bytes())
            assert engine.closed == 0
        await until(lambda: engine.closed == 1)
        page = (await client.get(f"{url}/metrics")).text
        assert "manta_http_client_disconnects_total 1.0" in page


async def test_first_token_is_sent_while_the_second_is_awaited(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there")
    engine.pauses = [0.0, HOUR]
    async with served(app_over(engine)) as url, httpx.AsyncClient() as client:
        body = {**CHAT, "stream": True}
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            first = await anext(answer.aiter_bytes())
    assert first.index(b'"role":"assistant"') < first.index(b'"content":"Hello"')


async def test_client_that_hangs_up_within_its_body_is_no_error(app_over: AppOver) -> None:
    engine = ScriptedClient(lambda request: [(5,)])
    async with served(app_over(engine)) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        writer.write(head.encode())
        await writer.drain()
        writer.close()
        async with httpx.AsyncClient() as client:
            async with asyncio.timeout(10):
                while True:
                    page = (await client.get(f"{url}/metrics")).text
                    if "manta_http_client_disconnects_total 1.0" in page:
                        break
    assert engine.requests == []


async def test_body_that_does_not_arrive_in_time_is_answered_and_hung_up_on(app_over: AppOver) -> None:
    engine = ScriptedClient(lambda request: [(5,)])
    async with served(app_over(engine, body_timeout=0.2)) as url:
        host, port = url.removeprefix("http://").split(":")
        for chunked in (False, True):
            reader, writer = await asyncio.open_connection(host, int(port))
            length, start = ("transfer-encoding: chunked", "1\r\n{\r\n") if chunked else ("content-length: 99", "{")
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
            writer.write((head + start).encode())
            answer = await asyncio.wait_for(reader.read(), 10)  # to the connection's end
            head, _, body = answer.decode().partition("\r\n\r\n")
            assert " 408 " in head.splitlines()[0]
            assert json.loads(body)["error"]["code"] == "body_timeout"
            writer.close()
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body_arrives", [False, True])
async def test_receive_that_ray_cancels_is_a_client_that_left(
    app_over: AppOver,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    body_arrives: bool,
) -> None:
    engine = saying(tokenizer, "Hello")
    engine.pauses = [HOUR]
    app = app_over(engine)
    app.add_middleware(RayReceive)
    body = json.dumps({**CHAT, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}] if body_arrives else []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        raise TaskCancelledError

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    with caplog.at_level(logging.DEBUG):
        await app(post_scope("/v1/chat/completions"), receive, send)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://manta") as client:
        page = (await client.get("/metrics")).text
    assert sent == []
    assert [record for record in caplog.records if record.exc_info] == []
    assert 'manta_http_requests_total{path="/v1/chat/completions",status="499"} 1.0' in page
    assert "manta_http_client_disconnects_total 1.0" in page
    assert engine.closed == len(engine.requests)
