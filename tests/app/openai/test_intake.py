"""A service that is about to end refuses requests, and knows when the last one is over."""

from __future__ import annotations

import asyncio

import pytest

from app.openai.errors import ApiError
from app.openai.intake import Intake
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, events, http, saying
from tests.app.openai.test_disconnect import until

BODY = {"model": "demo", "prompt": "Hi"}
HOUR = 3600.0


async def test_requests_that_are_there_go_on_and_others_are_refused(app_over: AppOver, tokenizer: Tokenizer) -> None:
    intake = Intake()
    engine = saying(tokenizer, "Hello", " there")
    go_on = asyncio.Event()
    engine.pauses = [go_on]
    async with http(app_over(engine, intake=intake)) as client:
        stream = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}))
        await until(lambda: engine.requests)
        intake.close()
        refused = await client.post("/v1/completions", json=BODY)
        listed = await client.get("/v1/models")
        probed = await client.get("/health")
        assert await intake.drained(0.0) == 1
        go_on.set()
        whole = await stream
        assert await intake.drained(HOUR) == 0
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) > 0
    assert (listed.status_code, probed.status_code) == (503, 200)
    assert "Hello" in whole.text
    assert events(whole.text)[-1] == "[DONE]"


async def test_request_that_fails_is_over(app_over: AppOver, tokenizer: Tokenizer) -> None:
    intake = Intake()
    engine = saying(tokenizer, "Hello")
    engine.error = RuntimeError("a fault")
    async with http(app_over(engine, intake=intake)) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 500
    assert intake.in_flight == 0


async def test_what_waits_for_the_last_request_is_woken(tokenizer: Tokenizer) -> None:
    intake = Intake()
    with intake.request(), intake.request():
        waiting = asyncio.create_task(intake.drained(HOUR))
        intake.close()
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == 0
    with pytest.raises(ApiError, match="shutting down"), intake.request():
        pass
