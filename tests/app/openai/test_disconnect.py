"""A client that goes away frees the engine. Over a real socket: in-process transports cannot hang up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, saying
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
