"""Keys let clients in, and limits hold them: over the application in this process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.api_keys import KeysUnreadable, hash_key, key_line, load_keys, new_key
from app.config import Access, ApiKey
from app.openai.auth import KeyRing
from app.openai.errors import ApiError
from app.openai.rate_limits import Client, TokenBucket
from app.openai.responses import ErrorResponse
from app.transport import QueueFull
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, http, post_scope, saying
from tests.app.openai.scripted_client import ScriptedClient
from tests.app.openai.test_disconnect import HOUR, served, until

ALICE = "sk-manta-alice"
BOB = "sk-manta-bob"
PROMPT = [5, 6, 7, 8]
"""As token ids, so that its length is known."""

BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 3}


class Now:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1_700_000_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    return Now()


def ring(now: Now, shares: int = 1, **alices: Any) -> KeyRing:
    """Of Alice, whose limits are given, and Bob, who has none."""
    keys = [
        ApiKey(name="alice", hash=hash_key(ALICE.encode()), **alices),
        ApiKey(name="bob", hash=hash_key(BOB.encode())),
    ]
    return KeyRing(keys, now, shares=shares)


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def three_tokens() -> ScriptedClient:
    return ScriptedClient(lambda request: [(9,), (9,), (9,)])


def error(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, ErrorResponse.model_validate(answer.json()).error.code


# ---- who ----


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


# ---- limits ----


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
    engine = three_tokens()
    engine.pauses = [0.0, 0.2]
    async with http(app_over(engine, keys=ring(now, concurrent_requests=1))) as client:

        async def post(key: str = ALICE) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY | {"stream": stream}, headers=of(key))

        running = asyncio.create_task(post())
        await until(lambda: len(engine.requests) == 1)
        refused = await post()
        assert error(refused) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert (await post(BOB)).status_code == 200
        assert (await running).status_code == 200
        assert (await post()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_counts_as_a_request_at_a_time(app_over: AppOver, now: Now, stream: bool) -> None:
    engine = three_tokens()
    engine.pauses = [0.0, 0.2]
    keys = ring(now, concurrent_requests=5)
    async with http(app_over(engine, keys=keys)) as client:

        async def post(**more: Any) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY | {"stream": stream} | more, headers=of(ALICE))

        running = asyncio.create_task(post(prompt=[PROMPT, PROMPT], n=2))
        await until(lambda: len(engine.requests) == 4)
        assert keys.client(f"Bearer {ALICE}").running == 4
        assert error(await post(n=2)) == (429, "rate_limit_exceeded")
        assert (await post()).status_code == 200
        assert (await running).status_code == 200
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


# ---- where keys come from ----


def test_new_key_is_known_by_its_line(tmp_path: Path, now: Now) -> None:
    file = tmp_path / "keys.yaml"
    keys = {name: new_key() for name in ("true", "1.5", "a-b")}
    file.write_text("\n".join(["# ours", *(key_line(name, key) for name, key in keys.items())]))
    loaded = load_keys(Access(keys_file=str(file)), {})
    assert loaded is not None
    assert len(set(keys.values())) == 3
    for name, key in keys.items():
        assert KeyRing(loaded, now).client(f"Bearer {key}").name == name
        assert key not in file.read_text()


def test_keys_come_from_the_environment_or_nowhere() -> None:
    loaded = load_keys(Access(keys_env="KEYS"), {"KEYS": key_line("alice", ALICE)})
    assert loaded == [ApiKey(name="alice", hash=hash_key(ALICE.encode()))]
    assert load_keys(Access(open=True), {}) is None


HASH = hash_key(b"x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "list"),
        ("[]", "has no key"),
        ("- {", "is not YAML in line 1"),
        ("secret", "list"),
        ("- {name: a, hash: secret}", "0.hash: String should match"),
        (f"- {{name: a, hash: '{HASH}', rpm: 3}}", "0: unknown key; known: name, hash, requests_per_minute"),
        ("- {sk-manta-secret: alice}", "0: unknown key; known: name, hash"),
        ("- {sk-manta-secret}", "0: unknown key; known: name, hash"),
        ("- {name: a, hash: !!int 'sk-manta-secret'}", "is not YAML"),
        ("- {name: a, hash: !!bool 'sk-manta-secret'}", "is not YAML"),
        ("- {name: a, hash: !!timestamp 'sk-manta-secret'}", "is not YAML"),
        ("- {name: a, hash: !secret x}", "is not YAML in line 1"),
        ("- {name: 2026-13-45, hash: secret}", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        (
            f"- {{name: a, hash: '{HASH}', requests_per_minute: .inf}}",
            "0.requests_per_minute: Input should be a finite",
        ),
        (f"- {{name: a, hash: '{HASH}', requests_per_minute: 0}}", "0.requests_per_minute: Input should be greater"),
        (f"- {{name: a b, hash: '{HASH}'}}", "0.name: String should match"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: b, hash: '{HASH}'}}", "1.hash: is used twice"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: a, hash: '{hash_key(b'y')}'}}", "1.name: is used twice"),
    ],
)
def test_wrong_keys_are_refused_without_being_shown(text: str, says: str) -> None:
    with pytest.raises(KeysUnreadable) as refused:
        load_keys(Access(keys_env="KEYS"), {"KEYS": text})
    assert says in str(refused.value)
    assert str(refused.value).startswith("keys_env KEYS: ")
    assert "secret" not in str(refused.value)
    assert HASH not in str(refused.value)


def test_missing_source_of_keys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeysUnreadable, match="No such file"):
        load_keys(Access(keys_file=str(tmp_path / "none")), {})
    with pytest.raises(KeysUnreadable, match="no such environment variable"):
        load_keys(Access(keys_env="NONE"), {})


async def test_document_has_the_refusals_where_keys_are_needed(app_over: AppOver, now: Now) -> None:
    def statuses(app: FastAPI) -> set[str]:
        return set(app.openapi()["paths"]["/v1/models"]["get"]["responses"])

    assert {"401", "403", "429"} <= statuses(app_over(three_tokens(), keys=ring(now)))
    assert not {"401", "403", "429"} & statuses(app_over(three_tokens()))
