"""A list of prompts is more than replicas have places for: those that were refused go when others have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from app.transport import QueueFull
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from tests.app.openai.access import ALICE, Now, of, ring
from tests.app.openai.conftest import AppOver, http
from tests.app.openai.scripted_client import ScriptedClient


class FewPlaces(ScriptedClient):
    """Refuses what comes while `places` prompts run; with `taken`, somebody else has some of them.

    Attributes:
        refusals: there were.
    """

    places = 3
    taken = 0
    refusals = 0
    running = 0

    async def generate(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        if self.running + self.taken >= self.places:
            self.refusals += 1
            raise QueueFull("no place")
        self.running += 1
        try:
            async for outputs in super().generate(requests):
                yield outputs
        finally:
            self.running -= 1


def body(prompts: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": [[5, index + 6] for index in range(prompts)], "max_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_beyond_the_places_wait_for_those_beside_them(app_over: AppOver, stream: bool) -> None:
    engine = FewPlaces(lambda _: [(9,)] * 3)
    async with http(app_over(engine)) as client:
        answer = await asyncio.wait_for(client.post("/v1/completions", json=body(20) | {"stream": stream}), 60)
    assert answer.status_code == 200
    if not stream:
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(20))
        assert answer.json()["usage"]["completion_tokens"] == 60
    assert 17 <= engine.refusals < 60, "each end lets one try again"
    assert engine.running == 0


async def test_prompts_that_nobody_beside_them_keeps_out_are_refused_and_cost_nothing(app_over: AppOver) -> None:
    engine = FewPlaces(lambda _: [(9,)] * 3)
    engine.taken = 3
    now = Now()
    async with http(app_over(engine, keys=ring(now, tokens_per_minute=100), clock=now)) as client:
        answer = await asyncio.wait_for(client.post("/v1/completions", json=body(20), headers=of(ALICE)), 60)
        left = (await client.get("/v1/models", headers=of(ALICE))).headers["x-ratelimit-remaining-tokens"]
    assert answer.status_code == 429
    assert engine.refusals == 20
    assert left == "100"
