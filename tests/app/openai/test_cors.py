"""Scripts of other pages call the service only where its configuration says so."""

from __future__ import annotations

import time

import httpx
import pytest
from pydantic import ValidationError

from app.api_keys import hash_key
from app.config import ApiKey, Ingress
from app.openai.auth import KeyRing
from app.transport import QueueFull
from tests.app.openai.conftest import AppOver, http
from tests.app.openai.scripted_client import ScriptedClient

PAGE = "https://chat.example.com"
BODY = {"model": "demo", "prompt": [5, 6], "max_tokens": 1}


async def ask_first(client: httpx.AsyncClient, origin: str = PAGE) -> httpx.Response:
    """A browser's question before it lets a script post JSON with a key."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return await client.options("/v1/completions", headers=headers)


async def post(client: httpx.AsyncClient, key: str | None = None, origin: str = PAGE) -> httpx.Response:
    headers = {"origin": origin} | ({} if key is None else {"authorization": f"Bearer {key}"})
    return await client.post("/v1/completions", json=BODY, headers=headers)


@pytest.fixture
def keys() -> KeyRing:
    key = ApiKey(name="page", hash=hash_key(b"key"), requests_per_minute=1)
    return KeyRing([key], time.time)


async def test_by_default_browsers_are_told_nothing(app_over: AppOver) -> None:
    async with http(app_over(ScriptedClient(lambda _: [(9,)]))) as client:
        refused = await ask_first(client)
        answered = await post(client)
    assert refused.status_code == 405
    assert answered.status_code == 200
    for answer in (refused, answered):
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_browser_may_ask_without_a_key_and_errors_can_be_read(app_over: AppOver, keys: KeyRing) -> None:
    engine = ScriptedClient(lambda _: [(9,)])
    async with http(app_over(engine, keys=keys, cors_origins=[PAGE])) as client:
        allowed = await ask_first(client)
        answers = [await post(client), await post(client, "key"), await post(client, "key")]
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert [answer.status_code for answer in answers] == [401, 200, 429]
    for answer in (allowed, *answers):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-credentials" not in answer.headers
    assert "x-ratelimit-remaining-requests" in answers[1].headers["access-control-expose-headers"]
    assert "retry-after" in answers[2].headers["access-control-expose-headers"]


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("a fault"), 500), (QueueFull("full"), 429)])
async def test_failures_can_be_read(app_over: AppOver, error: Exception, status: int) -> None:
    engine = ScriptedClient(lambda _: [(9,)], error=error)
    async with http(app_over(engine, cors_origins=["*"])) as client:
        answer = await post(client)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "*")


async def test_another_page_is_not_let_in(app_over: AppOver) -> None:
    async with http(app_over(ScriptedClient(lambda _: [(9,)]), cors_origins=[PAGE])) as client:
        refused = await ask_first(client, "https://evil.example.com")
        answer = await post(client, origin="https://evil.example.com")
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://chat.example.com", "http://[::1]:80"])
def test_origins_are_taken(origin: str) -> None:
    assert Ingress(cors_origins=[origin]).cors_origins == [origin]


@pytest.mark.parametrize(
    "origin", ["chat.example.com", "https://chat.example.com/", "https://a.com/x", "https://A.com", "null", ""]
)
def test_what_no_browser_sends_as_an_origin_is_named(origin: str) -> None:
    with pytest.raises(ValidationError, match=f"'{origin}': must be"):
        Ingress(cors_origins=[origin])
