"""The application in this process, over a scripted client or over a real engine."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from app.openai import IngressMetrics, Limits, ServedModel, create_app
from app.openai.auth import KeyRing
from app.openai.intake import Intake
from app.transport import EngineClient
from engine import AsyncEngineCore
from engine.config import EngineConfig, ModelConfig
from engine.hub import load_model_config
from engine.processor import Processor
from engine.request import Clock
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.app.openai.access import Now
from tests.app.openai.scripted_client import ScriptedClient

CREATED = 1_700_000_000


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return load_tokenizer(demo_folder)


@pytest.fixture(scope="session")
def model_config(tiny_folder: Path) -> ModelConfig:
    config = load_model_config(EngineConfig(model=str(tiny_folder), load_format="dummy"))
    return dataclasses.replace(config, generation_defaults={})


@pytest.fixture
def now() -> Now:
    return Now()


AppOver = Callable[..., FastAPI]


@pytest.fixture
def app_over(tokenizer: Tokenizer, model_config: ModelConfig) -> AppOver:
    """create_app for a client of ours, under the name `demo`."""

    def make(
        client: EngineClient,
        *,
        keys: KeyRing | None = None,
        intake: Intake | None = None,
        clock: Clock = time.time,
        refuse_excess_max_tokens: bool = False,
        **limits: Any,
    ) -> FastAPI:
        registry = CollectorRegistry()

        async def healthy() -> None:
            pass

        async def gather() -> bytes:
            return generate_latest(registry)

        model = ServedModel(
            name="demo",
            model_config=model_config,
            processor=Processor(
                model_config,
                tokenizer,
                block_size=16,
                max_logprobs=20,
                refuse_excess_max_tokens=refuse_excess_max_tokens,
            ),
            tokenizer=tokenizer,
            client=client,
            created=CREATED,
        )
        bounds = Limits(**limits)
        metrics = IngressMetrics(registry)
        return create_app({"demo": model}, bounds, metrics, healthy, gather, keys=keys, intake=intake, clock=clock)

    return make


def app_over_engine(core: AsyncEngineCore, tokenizer: Tokenizer, **limits: Any) -> FastAPI:
    """create_app for an engine of this process, under the name `tiny`."""
    registry = CollectorRegistry()

    async def healthy() -> None:
        core.check_health()

    async def gather() -> bytes:
        return generate_latest(registry) + generate_latest(core.registry)

    model = ServedModel(
        name="tiny",
        model_config=core.model_config,
        processor=Processor(core.model_config, tokenizer, block_size=16, max_logprobs=20),
        tokenizer=tokenizer,
        client=core,
        created=CREATED,
    )
    return create_app({"tiny": model}, Limits(**limits), IngressMetrics(registry), healthy, gather)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The event loop's, which stands still while anything runs, and is put forward to the next timer when nothing does.

    For tests of time limits within this process: they take no time, and a slow machine is not late. What another thread
    or process does would be late always.
    """
    loop = asyncio.get_running_loop()
    selector = loop._selector  # type: ignore[attr-defined]
    select, now = selector.select, loop.time()

    def select_or_put_forward(timeout: float | None = None) -> list[Any]:
        nonlocal now
        events = select(timeout and 0)
        if timeout and not events:
            now += timeout
        return events

    monkeypatch.setattr(selector, "select", select_or_put_forward)
    monkeypatch.setattr(loop, "time", lambda: now)
    return loop.time


def http(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://manta")


def openai_client(app: FastAPI) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://manta/v1", api_key="none", http_client=http(app), max_retries=0)


def saying(tokenizer: Tokenizer, *pieces: str, ends: bool = True) -> ScriptedClient:
    """A client that gives each of the pieces in a step of its own, and then the end of the sequence."""
    steps: list[tuple[int, ...]] = [tuple(tokenizer.encode(piece)) for piece in pieces]

    def script(request: Any) -> Sequence[tuple[int, ...]]:
        return [*steps, request.eos_token_ids[:1]] if ends else steps

    return ScriptedClient(script)


def post_scope(path: str) -> dict[str, Any]:
    """What a server tells an application of a POST of JSON."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"manta"), (b"content-type", b"application/json")],
    }


def events(body: str) -> list[str]:
    """The data of an SSE body, comments left out."""
    return [block.removeprefix("data: ") for block in body.split("\n\n") if block.startswith("data: ")]


@pytest.fixture
def chat_app(app_over: AppOver, tokenizer: Tokenizer) -> FastAPI:
    """Says `Hello there, friend.` to everything."""
    return app_over(saying(tokenizer, "Hello", " there", ",", " friend", "."))
