"""Requests that get nothing, or take too long, are given up; and the engine is rid of them.

All by the fixture `clock`: seconds here are the event loop's, and pass only where nothing runs.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.openai.generation import Generation
from engine.processor import ProcessedRequest, Processor
from engine.request import Clock
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, events, http, saying
from tests.app.openai.scripted_client import ScriptedClient

HOUR = 3600.0
MINUTE = 60.0

pytestmark = pytest.mark.usefixtures("clock")


def body(**given: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 8} | given


async def post(client: httpx.AsyncClient, **given: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=body(**given))


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_takes_too_long_is_given_up(
    app_over: AppOver, tokenizer: Tokenizer, clock: Clock, stream: bool
) -> None:
    engine = saying(tokenizer, "Hello", " there")
    engine.pauses = [0.0, HOUR]
    async with http(app_over(engine, clock=clock, request_timeout=MINUTE)) as client:
        before = clock()
        answer = await post(client, stream=stream)
        assert MINUTE <= clock() - before < MINUTE + 1
    if stream:
        *_, error, done = events(answer.text)
        assert (json.loads(error)["error"]["code"], done) == ("timeout", "[DONE]")
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert engine.closed == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_time_limit_of_a_body_does_not_reach_into_the_answer(
    app_over: AppOver, tokenizer: Tokenizer, clock: Clock, stream: bool
) -> None:
    engine = saying(tokenizer, "Hello")
    engine.pauses = [HOUR]
    async with http(app_over(engine, clock=clock, body_timeout=MINUTE)) as client:
        answer = await post(client, stream=stream)
    assert (answer.status_code, "Hello" in answer.text) == (200, True)


@pytest.mark.parametrize("prompts", [[5, 6], [[5, 6], [7, 8]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_request_without_a_token_is_given_up(app_over: AppOver, prompts: Any, stream: bool) -> None:
    engine = ScriptedClient(lambda _: [(9,)], pauses=[HOUR])
    async with http(app_over(engine, idle_timeout=MINUTE, heartbeat=HOUR)) as client:
        answer = await post(client, prompt=prompts, stream=stream)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "idle_timeout"
    assert engine.closed == len(engine.requests) > 0


async def test_stream_that_gets_no_more_ends_with_an_error_event(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there")
    engine.pauses = [0.0, HOUR]
    async with http(app_over(engine, idle_timeout=MINUTE)) as client:
        answer = await post(client, stream=True)
    *_, error, done = events(answer.text)
    assert answer.status_code == 200
    assert json.loads(error)["error"]["code"] == "idle_timeout"
    assert done == "[DONE]"
    assert engine.closed == 1


async def test_deadline_that_comes_in_a_pause_is_an_error_event_too(
    app_over: AppOver, tokenizer: Tokenizer, clock: Clock
) -> None:
    engine = saying(tokenizer, "Hello", " there", " you")
    engine.pauses = [0.0, HOUR]
    app = app_over(engine, clock=clock, request_timeout=MINUTE, coalesce=HOUR)
    app.state.service.pace.open_streams = 10**6  # so many that the pause is longer than the deadline
    async with http(app) as client:
        answer = await post(client, stream=True)
    *_, error, done = events(answer.text)
    assert json.loads(error)["error"]["code"] == "timeout"
    assert done == "[DONE]"
    assert engine.closed == 1


async def test_tokens_of_a_pause_come_together_and_the_last_one_waits_for_nothing(
    tokenizer: Tokenizer, processor: Processor
) -> None:
    engine = ScriptedClient(lambda _: [(9,)] * 5)
    pauses: list[None] = []

    def pause() -> float:
        pauses.append(None)
        return HOUR

    # Of several prompts tasks read ahead, as an engine's client does.
    several = [processed(processor), processed(processor)]
    generation = Generation(engine, tokenizer, several, pause=pause)
    steps = [deltas async for deltas in generation.steps()]
    assert (
        sum(len(completion.token_ids) for deltas in steps for _, delta in deltas for completion in delta.outputs) == 10
    )
    assert len(steps) == 2
    assert len(pauses) == len(steps) - 1


async def test_each_token_starts_the_wait_anew(tokenizer: Tokenizer, processor: Processor) -> None:
    engine = ScriptedClient(lambda _: [(9,)] * 5, pauses=[0.7 * MINUTE] * 5)
    generation = Generation(engine, tokenizer, [processed(processor)], idle_timeout=MINUTE)
    (output,) = await generation.results()
    assert list(output.outputs[0].token_ids) == [9] * 5


async def test_limit_that_is_not_ours_stays_what_it_is(tokenizer: Tokenizer, processor: Processor) -> None:
    engine = ScriptedClient(lambda _: [(9,)], pauses=[HOUR])
    generation = Generation(engine, tokenizer, [processed(processor)], idle_timeout=HOUR)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(MINUTE):
            await generation.results()
    engine.error = TimeoutError("of the transport")
    generation = Generation(engine, tokenizer, [processed(processor)], idle_timeout=HOUR)
    with pytest.raises(TimeoutError, match="of the transport"):
        await generation.results()


async def test_who_is_silent_between_tokens_is_not_idle(tokenizer: Tokenizer, processor: Processor) -> None:
    """A consumer that takes its time is no reason to give a request up."""
    engine = ScriptedClient(lambda _: [(9,), (9,)])
    generation = Generation(engine, tokenizer, [processed(processor)], idle_timeout=MINUTE)
    taken = 0
    async for _ in generation.steps():
        taken += 1
        await asyncio.sleep(HOUR)
    assert taken == 2


@pytest.fixture
def processor(model_config: Any, tokenizer: Tokenizer) -> Processor:
    return Processor(model_config, tokenizer, block_size=16, max_logprobs=20)


def processed(processor: Processor) -> ProcessedRequest:
    return processor.process([5, 6, 7], SamplingParams(max_tokens=5), request_id="one")
