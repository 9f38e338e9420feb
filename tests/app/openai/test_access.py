"""Keys let clients in, and say what is theirs: over the application in this process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI

from app.api_keys import hash_key
from app.config import ApiKey
from app.openai.auth import KeyRing
from app.openai.errors import ApiError
from tests.app.openai.access import ALICE, BOB, BODY, Now, error, of, ring, three_tokens
from tests.app.openai.conftest import AppOver, http, post_scope
from tests.app.openai.scripted_client import ScriptedClient


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ({}, (401, "missing_api_key")),
        ({"authorization": ALICE}, (401, "malformed_api_key")),
        ({"authorization": "Bearer "}, (401, "malformed_api_key")),
        ({"authorization": f"Basic {ALICE}"}, (401, "malformed_api_key")),
        ({"authorization": f"Bearer {ALICE} x"}, (401, "malformed_api_key")),
        (of("sk-manta-eve"), (403, "unknown_api_key")),
        (of(ALICE[:-1]), (403, "unknown_api_key")),
        (of(hash_key(ALICE.encode())), (403, "unknown_api_key")),
        ({b"authorization": b"Bearer \xff\xfe"}, (403, "unknown_api_key")),
    ],
)
async def test_requests_without_a_known_key_are_refused(
    app_over: AppOver, now: Now, headers: Any, refusal: tuple[int, str]
) -> None:
    engine = three_tokens()
    async with http(app_over(engine, keys=ring(now))) as client:
        for answer in (
            await client.post("/v1/completions", json=BODY, headers=headers),
            await client.get("/v1/models", headers=headers),
            await client.get("/nowhere", headers=headers),
            await client.get("/openapi.json", headers=headers),
            await client.get("/health/", headers=headers),
        ):
            assert error(answer) == refusal
            assert (answer.headers.get("www-authenticate") == "Bearer") == (refusal[0] == 401)
    assert engine.requests == []


@pytest.mark.parametrize("authorization", [f"Bearer {ALICE}", f"bearer {ALICE}", f"Bearer   {ALICE} "])
async def test_known_key_is_let_in(app_over: AppOver, now: Now, authorization: str) -> None:
    async with http(app_over(three_tokens(), keys=ring(now))) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"authorization": authorization})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_checks_version_and_metrics_need_no_key(app_over: AppOver, now: Now) -> None:
    async with http(app_over(three_tokens(), keys=ring(now))) as client:
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_refusals_are_counted_under_the_path_that_was_asked_for(app_over: AppOver, now: Now) -> None:
    async with http(app_over(three_tokens(), keys=ring(now))) as client:
        await client.post("/v1/completions", json=BODY)
        await client.get("/v1/models/any/model", headers=of("sk-manta-eve"))
        await client.get("/v1/completions")
        await client.get("/invented")
        page = (await client.get("/metrics")).text
    for path, status in (
        ("/v1/completions", 401),
        ("/v1/models/{model_id:path}", 403),
        ("other", 401),
    ):
        assert f'manta_http_requests_total{{path="{path}",status="{status}"}}' in page
    assert "invented" not in page
    assert "any/model" not in page


async def test_open_service_asks_for_nothing(app_over: AppOver) -> None:
    async with http(app_over(three_tokens())) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert (await client.post("/v1/completions", json=BODY, headers=of("any"))).status_code == 200


async def test_body_of_a_stranger_is_not_read(app_over: AppOver, now: Now) -> None:
    app = app_over(three_tokens(), keys=ring(now))
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    await app(post_scope("/v1/completions"), receive, send)
    assert sent[0]["status"] == 401


def test_key_of_any_text_is_compared_and_not_known(now: Now) -> None:
    for key in ("schlüssel", "ключ", "\U0001f511"):
        with pytest.raises(ApiError) as refused:
            ring(now).client(f"Bearer {key}")
        assert refused.value.status == 403


async def test_secrets_reach_neither_logs_nor_answers(
    app_over: AppOver, now: Now, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedClient(lambda request: [(9,)], error=RuntimeError("broken"))
    keys = ring(now, requests_per_minute=2)
    texts = []
    with caplog.at_level(logging.DEBUG):
        async with http(app_over(engine, keys=keys)) as client:
            for key in (ALICE, ALICE, ALICE, "sk-manta-eve"):
                answer = await client.post("/v1/completions", json=BODY, headers=of(key))
                texts.append(f"{answer.status_code} {answer.headers} {answer.text}")
    assert [text[:3] for text in texts] == ["500", "500", "429", "403"]
    for text in [*texts, caplog.text]:
        assert ALICE not in text
        assert "sk-manta-eve" not in text
        assert hash_key(ALICE.encode())[7:] not in text
    assert hash_key(ALICE.encode()) not in repr(ApiKey(name="alice", hash=hash_key(ALICE.encode())))


@pytest.mark.parametrize(
    ("own", "asked", "got"), [(0, None, 0), (0, -5, 0), (0, 5, 5), (-3, None, -3), (-3, -9, -3), (4, 0, 4), (4, 9, 9)]
)
async def test_request_may_only_lower_its_keys_priority(
    app_over: AppOver, now: Now, own: int, asked: int | None, got: int
) -> None:
    engine = three_tokens()
    async with http(app_over(engine, keys=ring(now, priority=own))) as client:
        given = {} if asked is None else {"priority": asked}
        assert (await client.post("/v1/completions", json=BODY | given, headers=of(ALICE))).status_code == 200
    assert [request.priority for request in engine.requests] == [got]


async def salts(app: FastAPI, engine: ScriptedClient, key: str, **given: Any) -> list[Any]:
    """What sets a prompt's cached blocks apart."""
    before = len(engine.requests)
    async with http(app) as client:
        answer = await client.post("/v1/completions", json=BODY | given, headers=of(key))
    assert answer.status_code == 200
    return [request.block_hashes for request in engine.requests[before:]]


@pytest.mark.parametrize("isolate", [False, True])
async def test_keys_share_cached_prefixes_unless_they_are_isolated(app_over: AppOver, now: Now, isolate: bool) -> None:
    engine = three_tokens()
    keys = [ApiKey(name=name, hash=hash_key(key.encode())) for name, key in (("alice", ALICE), ("bob", BOB))]
    app = app_over(engine, keys=KeyRing(keys, now, isolate_prefix_cache=isolate))
    long = {"prompt": [5] * 40}
    alices = await salts(app, engine, ALICE, **long)
    assert alices == await salts(app, engine, ALICE, **long)
    assert alices[0]
    assert (alices == await salts(app, engine, BOB, **long)) is not isolate
    salted = await salts(app, engine, ALICE, cache_salt="x", **long)
    assert salted != alices
    assert (salted == await salts(app, engine, BOB, cache_salt="x", **long)) is not isolate


async def test_empty_salt_is_refused_where_keys_are_isolated_too(app_over: AppOver, now: Now) -> None:
    keys = KeyRing([ApiKey(name="alice", hash=hash_key(ALICE.encode()))], now, isolate_prefix_cache=True)
    async with http(app_over(three_tokens(), keys=keys)) as client:
        answer = await client.post("/v1/completions", json=BODY | {"cache_salt": ""}, headers=of(ALICE))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


async def test_document_has_the_refusals_where_keys_are_needed(app_over: AppOver, now: Now) -> None:
    def statuses(app: FastAPI) -> set[str]:
        return set(app.openapi()["paths"]["/v1/models"]["get"]["responses"])

    assert {"401", "403", "429"} <= statuses(app_over(three_tokens(), keys=ring(now)))
    assert not {"401", "403", "429"} & statuses(app_over(three_tokens()))
