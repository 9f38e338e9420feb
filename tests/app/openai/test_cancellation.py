"""A server may cancel a handler at any await and as often as it likes; what a request opened is closed nevertheless."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, post_scope
from tests.app.openai.scripted_client import ScriptedClient

ENDLESS = 10_000
TURNS_TO_CLOSE = 30


@contextmanager
def abandoned_generators() -> Iterator[list[AsyncGenerator[Any, Any]]]:
    """Those that nobody closed: asyncio, which would close what is collected, is kept from it."""
    found: list[AsyncGenerator[Any, Any]] = []
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=found.append)
    try:
        yield found
    finally:
        sys.set_asyncgen_hooks(*before)


def endless(tokenizer: Tokenizer) -> ScriptedClient:
    token = tuple(tokenizer.encode(" a"))
    return ScriptedClient(lambda request: [token] * ENDLESS)


def handler(app: FastAPI, *, stream: bool, prompts: int) -> asyncio.Task[None]:
    """The application serving one request of a client that only listens."""
    body = json.dumps({"model": "demo", "prompt": ["Hi"] * prompts, "stream": stream, "max_tokens": 100}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    return asyncio.create_task(app(post_scope("/v1/completions"), receive, send))  # type: ignore[arg-type]


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("gaps", [(), (0,), (1,), (2,), (3,), (1, 1, 1, 1)], ids=str)
async def test_cancelled_handler_closes_its_calls(
    app_over: AppOver, tokenizer: Tokenizer, stream: bool, prompts: int, gaps: tuple[int, ...]
) -> None:
    """Cancelled after each number of turns of the loop, and again after each of the gaps."""
    engine = endless(tokenizer)
    app = app_over(engine)
    left_open = []
    interrupted = 0
    with abandoned_generators() as abandoned:
        for after in range(60):
            before, open_before = len(engine.requests), len(engine.requests) - engine.closed
            task = handler(app, stream=stream, prompts=prompts)
            await turns(after)
            task.cancel()
            for gap in gaps:
                await turns(gap)
                task.cancel()
            await asyncio.wait([task])
            await turns(TURNS_TO_CLOSE)
            interrupted += len(engine.requests) > before
            if len(engine.requests) - engine.closed > open_before:
                left_open.append(after)
    assert left_open == []
    assert abandoned == []
    assert interrupted > 30, "most of the cancellations met a running generation"
