"""The whole way through one process: HTTP, text, a real engine on a small model, and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from app.openai.responses import CompletionResponse
from engine import AsyncEngineCore, EngineConfig
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import app_over_engine, events, http, openai_client

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def core(tiny_folder: Path) -> AsyncIterator[AsyncEngineCore]:
    config = EngineConfig(
        model=str(tiny_folder),
        load_format="dummy",
        dtype="float32",
        num_kv_blocks=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        num_threads=1,
        debug_integrity=True,
    )
    core = AsyncEngineCore.from_config(config)
    yield core
    await core.check_integrity()
    await core.shutdown()


@pytest.fixture
def app(core: AsyncEngineCore, tokenizer: Tokenizer) -> FastAPI:
    return app_over_engine(core, tokenizer)


async def complete(app: FastAPI, **fields: Any) -> dict[str, Any]:
    async with http(app) as client:
        answer = await client.post(COMPLETIONS, json={"model": "tiny", "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    CompletionResponse.model_validate(answer.json())
    return answer.json()


async def test_seeded_answers_are_equal_whole_and_streamed(app: FastAPI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "seed": 7, "max_tokens": 12}
    async with openai_client(app) as client:
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


async def test_echo_alone_scores_the_prompt(app: FastAPI) -> None:
    """What max_tokens=0 gives is what prompt_logprobs gives beside a completion."""
    scored = await complete(app, prompt="The capital of France", max_tokens=0, echo=True, logprobs=2)
    beside = await complete(app, prompt="The capital of France", max_tokens=3, prompt_logprobs=2)
    choice = scored["choices"][0]
    assert choice["text"] == "The capital of France"
    expected = [
        None if entry is None else next(iter(entry.values()))["logprob"]
        for entry in beside["choices"][0]["prompt_logprobs"]
    ]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-5)
    assert scored["usage"]["completion_tokens"] == 0


async def test_many_prompts_give_what_each_gives_alone(app: FastAPI) -> None:
    prompts = ["one", "two", "three four five " * 20]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": 1}
    together = await complete(app, prompt=prompts, **asked)
    for prompt, choice in zip(prompts, together["choices"], strict=True):
        alone = (await complete(app, prompt=prompt, **asked))["choices"][0]
        assert choice["text"] == alone["text"]
        assert choice["logprobs"]["tokens"] == alone["logprobs"]["tokens"]


async def test_repeated_prompt_is_cached_but_not_under_another_salt(app: FastAPI) -> None:
    prompt = "word " * 40

    async def cached(**fields: Any) -> int:
        usage = (await complete(app, prompt=prompt, max_tokens=1, **fields))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    assert await cached() >= 32
    assert await cached(cache_salt="mine") == 0


async def test_stop_string_ends_the_engines_work(app: FastAPI, core: AsyncEngineCore) -> None:
    text = (await complete(app, prompt="x", seed=1, max_tokens=30))["choices"][0]["text"]
    stop = text[10:13]
    ended = (await complete(app, prompt="x", seed=1, max_tokens=400, stop=stop))["choices"][0]
    assert ended["text"] == text[: text.index(stop)]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
    async with asyncio.timeout(10):
        while core.load().running:
            await asyncio.sleep(0.01)


async def test_concurrent_streams_all_end(app: FastAPI, core: AsyncEngineCore) -> None:
    async def one(index: int) -> str:
        async with http(app) as client:
            body = {"model": "tiny", "prompt": f"number {index}", "seed": index, "max_tokens": 20, "stream": True}
            answer = await client.post(COMPLETIONS, json={**body, "ignore_eos": True})
        *data, done = events(answer.text)
        assert done == "[DONE]"
        return "".join(choice["text"] for each in data for choice in json.loads(each)["choices"])

    texts = await asyncio.gather(*(one(index) for index in range(24)))
    assert texts[5] == (await complete(app, prompt="number 5", seed=5, max_tokens=20))["choices"][0]["text"]


async def test_engine_metrics_are_on_the_page(app: FastAPI) -> None:
    await complete(app, prompt="x", max_tokens=2)
    async with http(app) as client:
        page = (await client.get("/metrics")).text
    assert "manta_http_requests_total" in page
    assert page.count("# TYPE manta_") > 8
