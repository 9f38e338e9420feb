"""A key's limits hold: over the application in this process, and of its buckets alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from app.api_keys import hash_key
from app.config import ApiKey
from app.openai.errors import ApiError
from app.openai.rate_limits import Client, TokenBucket
from app.transport import QueueFull
from engine.tokenizer import Tokenizer
from tests.app.openai.access import ALICE, BOB, BODY, PROMPT, Now, error, of, ring, three_tokens
from tests.app.openai.conftest import AppOver, http, saying
from tests.app.openai.test_disconnect import HOUR, served, until


async def test_requests_per_minute_refuse_and_refill(app_over: AppOver, now: Now) -> None:
    app = app_over(three_tokens(), keys=ring(now, requests_per_minute=2), clock=now)
    async with http(app) as client:

        async def post(key: str = ALICE) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY, headers=of(key))

        first, second, third = [await post() for _ in range(3)]
        assert (first.status_code, second.status_code) == (200, 200)
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == [
            "1",
            "0",
            "0",
        ]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-reset-requests"] == "30.000s"
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert error(third) == (429, "rate_limit_exceeded")
        assert third.json()["error"]["type"] == "rate_limit_error"
        assert third.headers["retry-after"] == "30"
        assert (await post(BOB)).status_code == 200
        now.seconds += 29
        assert (await post()).headers["retry-after"] == "1"
        now.seconds += 1
        assert (await post()).status_code == 200
        assert (await post()).status_code == 429


async def test_tokens_are_charged_for_prompt_and_output(app_over: AppOver, now: Now) -> None:
    app = app_over(three_tokens(), keys=ring(now, tokens_per_minute=12), clock=now)
    async with http(app) as client:

        async def post(**more: Any) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY | more, headers=of(ALICE))

        assert (await post()).headers["x-ratelimit-remaining-tokens"] == "5"  # 12 - 4 of the prompt - 3
        streamed = await post(stream=True)
        assert "[DONE]" in streamed.text
        refused = await post()  # at -2
        assert error(refused) == (429, "rate_limit_exceeded")
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert refused.headers["x-ratelimit-reset-tokens"] == "70.000s"
        now.seconds += 15  # at 1: enough to be heard, not for the prompt
        refused = await post()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "15")
        now.seconds += 15
        assert (await post()).status_code == 200


async def test_output_that_the_answer_does_not_have_costs_nothing(
    app_over: AppOver, tokenizer: Tokenizer, now: Now
) -> None:
    for asked in ({"stop": " there"}, {"echo": True, "max_tokens": 0}):
        app = app_over(saying(tokenizer, "Hello", " there", " you"), keys=ring(now, tokens_per_minute=100), clock=now)
        async with http(app) as client:
            answer = await client.post("/v1/completions", json=BODY | asked, headers=of(ALICE))
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            left = (await client.get("/v1/models", headers=of(ALICE))).headers["x-ratelimit-remaining-tokens"]
        assert left == str(100 - usage["total_tokens"])


async def test_all_prompts_of_a_request_are_charged_once_whatever_n(app_over: AppOver, now: Now) -> None:
    app = app_over(three_tokens(), keys=ring(now, tokens_per_minute=100), clock=now)
    async with http(app) as client:
        body = BODY | {"prompt": [PROMPT, PROMPT], "n": 2}
        answer = await client.post("/v1/completions", json=body, headers=of(ALICE))
    assert answer.json()["usage"]["total_tokens"] == 2 * 4 + 2 * 2 * 3
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - answer.json()["usage"]["total_tokens"])


async def test_request_whose_work_is_refused_does_not_count(app_over: AppOver, now: Now) -> None:
    keys = ring(now, requests_per_minute=10, tokens_per_minute=12, concurrent_requests=2)
    async with http(app_over(three_tokens(), keys=keys, clock=now)) as client:

        async def post(**more: Any) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY | more, headers=of(ALICE))

        assert (await post()).headers["x-ratelimit-remaining-requests"] == "9"
        for refused, told in (
            (await post(prompt=[5] * 6), (429, "rate_limit_exceeded")),
            (await post(prompt=[5] * 13), (400, "prompt_above_rate_limit")),
            (await post(n=3), (400, "choices_above_rate_limit")),
        ):
            assert error(refused) == told
            assert refused.headers["x-ratelimit-remaining-requests"] == "9"
            assert refused.headers["x-ratelimit-remaining-tokens"] == "5"


async def test_prompt_above_the_limit_is_told_that_it_never_fits(app_over: AppOver, now: Now) -> None:
    engine = three_tokens()
    async with http(app_over(engine, keys=ring(now, tokens_per_minute=3))) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=of(ALICE))
    assert error(answer) == (400, "prompt_above_rate_limit")
    assert engine.requests == []


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, PROMPT]])
async def test_prompt_that_no_engine_took_costs_nothing(app_over: AppOver, now: Now, prompt: Any) -> None:
    engine = three_tokens()
    engine.error = QueueFull("too many wait", retry_after_s=3)
    app = app_over(engine, keys=ring(now, tokens_per_minute=100), clock=now)
    async with http(app) as client:
        for stream in (False, True):
            body = BODY | {"prompt": prompt, "stream": stream}
            answer = await client.post("/v1/completions", json=body, headers=of(ALICE))
            assert error(answer) == (429, "queue_full")
            assert answer.headers["x-ratelimit-remaining-tokens"] == "100"


async def test_chats_are_charged_too(app_over: AppOver, tokenizer: Tokenizer, now: Now) -> None:
    app = app_over(saying(tokenizer, "Hello", " there"), keys=ring(now, tokens_per_minute=1000), clock=now)
    async with http(app) as client:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.post("/v1/chat/completions", json=body, headers=of(ALICE))
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - answer.json()["usage"]["total_tokens"])


@pytest.mark.parametrize("stream", [False, True])
async def test_concurrent_requests_are_bounded_until_their_answers_end(
    app_over: AppOver, now: Now, stream: bool
) -> None:
    engine, go_on = three_tokens(), asyncio.Event()
    engine.pauses = [0.0, go_on]
    async with http(app_over(engine, keys=ring(now, concurrent_requests=1))) as client:

        async def post(key: str = ALICE) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY | {"stream": stream}, headers=of(key))

        running = asyncio.create_task(post())
        await until(lambda: len(engine.requests) == 1)
        refused = await post()
        assert error(refused) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        bobs = asyncio.create_task(post(BOB))
        await until(lambda: len(engine.requests) == 2)
        go_on.set()
        assert (await running).status_code == (await bobs).status_code == 200
        assert (await post()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_counts_as_a_request_at_a_time(app_over: AppOver, now: Now, stream: bool) -> None:
    engine, go_on = three_tokens(), asyncio.Event()
    engine.pauses = [0.0, go_on]
    keys = ring(now, concurrent_requests=5)
    async with http(app_over(engine, keys=keys)) as client:

        async def post(**more: Any) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY | {"stream": stream} | more, headers=of(ALICE))

        running = asyncio.create_task(post(prompt=[PROMPT, PROMPT], n=2))
        await until(lambda: len(engine.requests) == 4)
        assert keys.client(f"Bearer {ALICE}").running == 4
        assert error(await post(n=2)) == (429, "rate_limit_exceeded")
        fifth = asyncio.create_task(post())
        await until(lambda: keys.client(f"Bearer {ALICE}").running == 5)
        go_on.set()
        assert (await running).status_code == (await fifth).status_code == 200
        assert keys.client(f"Bearer {ALICE}").running == 0
        assert error(await post(n=6)) == (400, "choices_above_rate_limit")
        assert keys.client(f"Bearer {ALICE}").running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_place_is_given_back_when_the_client_leaves(app_over: AppOver, now: Now, stream: bool) -> None:
    engine = three_tokens()
    engine.pauses = [0.0, HOUR]
    keys = ring(now, concurrent_requests=2)
    async with served(app_over(engine, keys=keys)) as url, httpx.AsyncClient() as client:
        body = BODY | {"stream": stream, "n": 2}
        post = asyncio.create_task(client.post(f"{url}/v1/completions", json=body, headers=of(ALICE)))
        await until(lambda: len(engine.requests) == 2)
        assert keys.client(f"Bearer {ALICE}").running == 2
        post.cancel()
        await until(lambda: keys.client(f"Bearer {ALICE}").running == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error_after", [0, 1])
async def test_place_is_given_back_when_a_request_fails(
    app_over: AppOver, now: Now, stream: bool, error_after: int
) -> None:
    engine = three_tokens()
    engine.error, engine.error_after = RuntimeError("broken"), error_after
    keys = ring(now, concurrent_requests=1)
    async with http(app_over(engine, keys=keys)) as client:
        for body in (BODY | {"stream": stream}, {"model": "nobody", "prompt": "x"}, {"prompt": 3}):
            answer = await client.post("/v1/completions", json=body, headers=of(ALICE))
            assert "rate_limit" not in answer.text
            assert keys.client(f"Bearer {ALICE}").running == 0
    assert engine.requests


def test_limits_are_shared_among_ingresses(now: Now) -> None:
    key = ApiKey(name="a", hash=hash_key(b"a"), requests_per_minute=60, tokens_per_minute=1000, concurrent_requests=5)
    client = Client.of(key, now, shares=2)
    assert client.headers()["x-ratelimit-limit-requests"] == "30"
    assert client.headers()["x-ratelimit-limit-tokens"] == "500"
    with client.request(), client.request(), pytest.raises(ApiError), client.request():
        pass


def test_small_share_still_lets_one_request_in(now: Now) -> None:
    key = ApiKey(name="a", hash=hash_key(b"a"), requests_per_minute=1, concurrent_requests=1)
    client = Client.of(key, now, shares=4)
    with client.request():
        pass
    now.seconds += 239
    with pytest.raises(ApiError), client.request():
        pass
    now.seconds += 1
    with client.request():
        pass


def test_refused_request_takes_nothing(now: Now) -> None:
    client = Client("a", now, requests_per_minute=2, concurrent_requests=1)
    with client.request():
        for _ in range(5):
            with pytest.raises(ApiError), client.request():
                pass
    with client.request():
        pass


def test_clock_that_is_set_back_neither_fills_nor_empties_a_bucket(now: Now) -> None:
    bucket = TokenBucket(60, now)
    bucket.take(30)
    now.seconds -= 1000
    assert bucket.level == 30
    now.seconds += 10
    assert bucket.level == 40
    now.seconds += 1000
    assert bucket.level == 60
