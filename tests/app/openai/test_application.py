from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from app.openai import IngressMetrics, Limits, create_app
from app.openai.protocol import ChatCompletionRequest, CompletionRequest
from app.openai.responses import DetokenizeResponse, ErrorResponse, ModelCard, ModelList, TokenizeResponse
from app.transport import NoReplica
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import CREATED, AppOver, http, openai_client, saying

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


async def test_models_are_listed_and_shown(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        listed = ModelList.model_validate((await client.get("/v1/models")).json())
        shown = ModelCard.model_validate((await client.get("/v1/models/demo")).json())
    assert listed.data == [shown]
    assert (shown.id, shown.created, shown.max_model_len) == ("demo", CREATED, 512)
    async with openai_client(chat_app) as api:
        assert [model.id async for model in api.models.list()] == ["demo"]


async def test_tokenize_and_detokenize_are_inverse(chat_app: FastAPI, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>naïve 🦭"
    async with http(chat_app) as client:
        plain = TokenizeResponse.model_validate((await client.post("/tokenize", json={"prompt": text})).json())
        named = await client.post("/tokenize", json={"model": "demo", "prompt": text, "return_token_strs": True})
        body = {"tokens": plain.tokens}
        back = DetokenizeResponse.model_validate((await client.post("/detokenize", json=body)).json())
    assert plain.tokens == tokenizer.encode(text)
    assert (plain.count, plain.max_model_len, plain.token_strs) == (len(plain.tokens), 512, None)
    assert named.json()["token_strs"][0] == "<|im_start|>"
    assert back.prompt == text


async def test_tokenized_chat_is_what_the_engine_gets(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine)) as client:
        tokens = (await client.post("/tokenize", json=CHAT)).json()["tokens"]
        await client.post("/v1/chat/completions", json=CHAT)
        unopened = await client.post("/tokenize", json={**CHAT, "add_generation_prompt": False})
    assert tuple(tokens) == engine.requests[0].prompt_token_ids
    assert unopened.json()["count"] < len(tokens)


async def test_long_texts_are_tokenized_off_the_loop(
    chat_app: FastAPI, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    encode = tokenizer.encode

    def recorded(text: str, *args: Any, **more: Any) -> list[int]:
        threads.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(text, *args, **more)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    async with http(chat_app) as client:
        for text in ("word " * 10, "word " * 20_000):
            answer = await client.post("/tokenize", json={"prompt": text})
            assert answer.json()["tokens"] == encode(text)
    assert threads == [(50, True), (100_000, False)]


@pytest.mark.parametrize(
    "body", [{"prompt": "a" * (1 << 20) + "b"}, {"messages": [{"role": "user", "content": "a" * (1 << 20) + "b"}]}]
)
async def test_texts_too_long_to_tokenize_are_refused(
    chat_app: FastAPI, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(tokenizer, "encode", None)
    monkeypatch.setattr(tokenizer, "apply_chat_template", None)
    async with http(chat_app) as client:
        answer = await client.post("/tokenize", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(body))


async def test_request_id_is_the_clients_or_a_new_one(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        given = await client.get("/v1/models", headers={"x-request-id": "mine-1"})
        missing = await client.get("/nowhere", headers={"x-request-id": "mine-2"})
        ugly = await client.get("/v1/models", headers={"x-request-id": "a b" + "c" * 300})
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert given.headers["x-request-id"] == "mine-1"
    assert missing.headers["x-request-id"] == "mine-2"
    assert len(ugly.headers["x-request-id"]) == len(streamed.headers["x-request-id"]) == 32


async def test_health_follows_the_engines() -> None:
    async def ill() -> None:
        raise NoReplica("no replica is up")

    async def gather() -> bytes:
        return b""

    app = create_app({}, Limits(), IngressMetrics(CollectorRegistry()), ill, gather)
    async with http(app) as client:
        answer = await client.get("/health")
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
    assert answer.status_code == 503
    assert ErrorResponse.model_validate(answer.json()).error.message == "no replica is up"


async def test_readiness_ends_before_health_does() -> None:
    async def well() -> None:
        """Has nothing to say."""

    async def closing() -> None:
        raise NoReplica("the service is shutting down")

    async def gather() -> bytes:
        return b""

    app = create_app({}, Limits(), IngressMetrics(CollectorRegistry()), well, gather, ready=closing)
    async with http(app) as client:
        assert (await client.get("/health")).status_code == 200
        answer = await client.get("/ready")
    assert answer.status_code == 503
    error = ErrorResponse.model_validate(answer.json()).error
    assert (error.message, error.code) == ("the service is shutting down", "not_ready")


async def test_health_and_version(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert isinstance((await client.get("/version")).json()["version"], str)


async def test_metrics_count_requests_by_route(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json={})
        await client.get("/v1/models/a")
        await client.get("/v1/models/b")
        await client.get("/invented")
        page = await client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }

    def requests(path: str, status: int) -> float:
        return samples["manta_http_requests_total", ("path", path), ("status", str(status))]

    assert requests("/v1/chat/completions", 200) == 1
    assert requests("/v1/chat/completions", 400) == 1
    assert requests("/v1/models/{model_id:path}", 404) == 2
    assert requests("other", 404) == 1
    assert samples["manta_ingress_time_to_first_token_seconds_count", ("model", "demo")] == 1
    assert samples["manta_http_request_duration_seconds_count", ("path", "/v1/chat/completions")] == 2
    assert samples[("manta_http_requests_in_flight",)] == 1  # the scrape itself


async def test_openapi_document_is_whole(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    referred = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert referred <= schemas.keys()
    assert "422" not in json.dumps(list(document["paths"].values()))
    for path, model in (("/v1/chat/completions", ChatCompletionRequest), ("/v1/completions", CompletionRequest)):
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(model.__name__)
        assert schemas[model.__name__]["properties"].keys() == model.model_fields.keys()
        assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
        assert {"400", "404", "413", "429", "500", "503"} <= operation["responses"].keys()
    assert set(schemas["ChatCompletionRequest"]["required"]) == {"model", "messages"}


def test_importing_the_interface_loads_no_tensors() -> None:
    program = (
        "import sys, app.openai;"
        "heavy = {'torch', 'triton', 'transformers', 'ray'} & set(sys.modules);"
        "heavy |= {m for m in sys.modules if m.startswith(('engine.worker', 'engine.models', 'engine.core'))};"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/v1/models/"])
async def test_nothing_else_is_served(chat_app: FastAPI, path: str) -> None:
    async with http(chat_app) as client:
        assert (await client.get(path)).status_code == 404
