"""schemathesis asks the service whatever its own OpenAPI document allows, and holds the answers to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.openai.responses import ChatCompletionChunk, CompletionResponse
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import events
from tests.app.openai.live_service import ANSWER_S, MODEL, LiveService, live_service

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
NEEDED = ("model", "messages", "prompt", "tokens")
STREAMED = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": CompletionResponse}
OPERATIONS = [
    ("POST", "/v1/chat/completions", 60),
    ("POST", "/v1/completions", 60),
    ("POST", "/tokenize", 40),
    ("POST", "/detokenize", 30),
    ("GET", "/v1/models", 3),
    ("GET", "/v1/models/{model_id}", 20),
    ("GET", "/health", 3),
    ("GET", "/ready", 3),
    ("GET", "/version", 3),
    ("GET", "/metrics", 3),
]


@pytest.fixture(scope="module")
def service(tiny_folder: Path, tokenizer: Tokenizer) -> Iterator[LiveService]:
    with live_service(tiny_folder, tokenizer) as service:
        yield service


@pytest.fixture(scope="module")
def document(service: LiveService) -> dict[str, Any]:
    return httpx.get(service.url + "/openapi.json", timeout=ANSWER_S).json()


def test_every_operation_is_asked(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(method, path) for method, path, _ in OPERATIONS}


VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "examples", "mode"),
    # Without a body there is nothing to break.
    [(*each, VALID) for each in OPERATIONS] + [(*each, INVALID) for each in OPERATIONS if each[0] == "POST"],
)
def test_answers_are_as_documented(
    service: LiveService, document: dict[str, Any], method: str, path: str, examples: int, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path][method]
    statuses = set()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), kept=st.sets(st.integers(0, 40), max_size=4))
    def ask(case: Case, kept: set[int]) -> None:
        if isinstance(case.body, dict):
            if mode is VALID:
                # With all fields there is always one whose value is out of a range that the document does not tell.
                names = sorted(case.body)
                defaults = {"max_tokens": 4} if path in STREAMED else {}
                case.body = defaults | {
                    name: case.body[name] for i, name in enumerate(names) if name in NEEDED or i in kept
                }
            if isinstance(case.body.get("model"), str):
                case.body["model"] = MODEL  # any other name ends there
        response = case.call(base_url=service.url, timeout=ANSWER_S)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            *data, done = events(response.text)
            assert done == "[DONE]"
            for each in data:
                STREAMED[path].model_validate_json(each)

    ask()
    service.check_idle()
    if method == "POST":
        assert (200 if mode is VALID else 400) in statuses, "nothing was tried"
