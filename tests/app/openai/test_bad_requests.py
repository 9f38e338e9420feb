"""Whatever a client sends is answered by an error object that names the field, and never by a 500."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.openai.responses import ErrorResponse
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, http, saying

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hi"}

BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (path, {name: value}, name)
    for path in (CHAT, COMPLETIONS)
    for name, values in {
        "n": (0, -1, 1.0, "1", True, 129, 2**70, []),
        "temperature": (-0.1, "hot", True, float("nan"), float("inf"), float("-inf"), 10**400, 101),
        "top_p": (0, -1, 1.1, "x", float("nan")),
        "top_k": (-2, 1.5, True, 10**30),
        "min_p": (-0.1, 1.1),
        "repetition_penalty": (0, -1, "x"),
        "presence_penalty": (-2.1, 2.1, float("nan")),
        "frequency_penalty": (-2.1, 2.1, []),
        "seed": (1.5, "x", True, 2**64, -(2**63) - 1),
        "max_tokens": (0, -1, 1.5, "1", True, 2**65),
        "min_tokens": (-1, 1.5),
        "stop_token_ids": ([-1], 3, [10**9]),
        "ignore_eos": (1, "true"),
        "skip_special_tokens": (0,),
        "stream": ("yes", 1),
        "prompt_logprobs": (-1, 21, 1.5),
        "priority": (0.5, "high", 2**70),
        "cache_salt": (3, ""),
        "stream_options": ({"include_usage": True},),
        "foo": (1, [], "x"),
        "guided_json": ({},),
    }.items()
    for value in values
] + [
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 2**70}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"tools": [{"type": "web"}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"modalities": ["audio"]}, "modalities[0]"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": ["Hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "assistant", "content": None}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (CHAT, {"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
    (COMPLETIONS, {"prompt": "x" * 1_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 1_000_000, "add_special_tokens": False}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "prompt"),
    (COMPLETIONS, {"prompt": 3}, "prompt"),
    (COMPLETIONS, {"prompt": {}}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [49152]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], None]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 512}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 300}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 3, "n": 100}, "prompt"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 2}, "prompt_logprobs"),
    (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (COMPLETIONS, {"stop": ""}, "stop"),
    (COMPLETIONS, {"stop": ["a", ""]}, "stop"),
    (COMPLETIONS, {"stop": ["a"] * 65}, "stop"),
    (COMPLETIONS, {"stop": 3}, "stop"),
    (COMPLETIONS, {"stop": [3]}, "stop[0]"),
    (COMPLETIONS, {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    (COMPLETIONS, {"stop_token_ids": [1, 1.0]}, "stop_token_ids[1]"),
    (COMPLETIONS, {"stop_token_ids": [True]}, "stop_token_ids[0]"),
    (COMPLETIONS, {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1_0": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"49152": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": "x"}}, "logit_bias.1"),
    (COMPLETIONS, {"logit_bias": {"1": float("inf")}}, "logit_bias.1"),
    (COMPLETIONS, {"logit_bias": [1]}, "logit_bias"),
    (COMPLETIONS, {"model": None}, "model"),
    (COMPLETIONS, {"model": 3}, "model"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"foo": 1}, "foo"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
]

GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": [USER]},
    COMPLETIONS: {"model": "demo", "prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture
def app(app_over: AppOver, tokenizer: Tokenizer) -> FastAPI:
    return app_over(saying(tokenizer, "ok"), max_body_bytes=2_000_000)


@pytest.mark.parametrize(("path", "fields", "param"), BAD_FIELDS)
async def test_wrong_field_is_named(app: FastAPI, path: str, fields: dict[str, Any], param: str) -> None:
    content = {**GOOD[path], **fields}
    if path == "/tokenize" and "messages" in fields:
        del content["prompt"]
    async with http(app) as client:
        answer = await client.post(path, content=json.dumps(content), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = ErrorResponse.model_validate(answer.json()).error
    assert error.type == "invalid_request_error"
    assert error.param == param, error
    assert len(error.message) < 600


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"messages": []}, "messages: must have at least 1 item"),
        (CHAT, {"n": "1"}, 'n="1": must be an integer'),
        (CHAT, {"stream": "yes"}, 'stream="yes": must be a boolean'),
        (COMPLETIONS, {"stop": [3]}, "stop[0]=3: must be a string"),
        (COMPLETIONS, {"n": "x" * 100}, f'n="{"x" * 76}...: must be an integer'),
        (COMPLETIONS, {"model": "x" * 100}, f"the model '{'x' * 77}...' does not exist"),
    ],
)
async def test_what_is_said_of_a_wrong_field(app: FastAPI, path: str, fields: dict[str, Any], message: str) -> None:
    async with http(app) as client:
        answer = await client.post(path, json={**GOOD[path], **fields})
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [10**4000]},
        {"prompt": [[10**4000], "a"]},
        {"seed": 10**4000},
        {"stop_token_ids": [10**4000]},
        {"n": "x" * 4000},
        {"x" * 4000: 1},
        {"model": "x" * 4000},
        {"best_of": 10**4000},
        {"logit_bias": {"1" * 4000: 1}},
        {"logit_bias": {"1": 10**4000}},
        {"logit_bias": {"1": "x" * 4000}},
        {"cache_salt": ["x" * 4000]},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
async def test_refused_value_is_shown_cut(app: FastAPI, fields: dict[str, Any]) -> None:
    async with http(app) as client:
        answer = await client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], **fields})
    assert answer.status_code in (400, 404)
    assert len(answer.json()["error"]["message"]) < 350


MANY = 400_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [USER] * (MANY // 2)}),
        (CHAT, {"messages": [{}] * MANY}),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (CHAT, {"tools": [{}] * MANY}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * (MANY // 4)}),
        (CHAT, {"metadata": [[]] * MANY}),
        (COMPLETIONS, {"prompt": ["a"] * MANY}),
        (COMPLETIONS, {"prompt": [[1]] * MANY}),
        (COMPLETIONS, {"prompt": [1.5] * MANY}),
        (COMPLETIONS, {"stop": [1] * MANY}),
        (COMPLETIONS, {"stop_token_ids": ["a"] * MANY}),
        (COMPLETIONS, {"logit_bias": {str(i): "x" for i in range(MANY)}}),
        (COMPLETIONS, {str(i): 1 for i in range(MANY)}),
        ("/tokenize", {"messages": [USER] * (MANY // 2)}),
        ("/detokenize", {"tokens": ["a"] * MANY}),
        ("/detokenize", {"tokens": [2**64] * (MANY // 4)}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
async def test_many_values_are_refused_before_each_is_looked_at(
    app_over: AppOver, tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps({**GOOD[path], **fields}, separators=(",", ":")).encode()
    async with http(app_over(saying(tokenizer, "ok"))) as client:
        started = time.process_time()
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        seconds = time.process_time() - started
    assert answer.status_code == 400
    assert "too many values" in answer.json()["error"]["message"]
    assert seconds < 1


async def test_as_many_token_ids_as_there_is_room_for_are_looked_at(app_over: AppOver, tokenizer: Tokenizer) -> None:
    async with http(app_over(saying(tokenizer, "ok"))) as client:
        for path, fields in ((COMPLETIONS, {"prompt": [1] * MANY}), (COMPLETIONS, {"prompt": [[1] * MANY]})):
            answer = await client.post(path, json={**GOOD[path], **fields})
            assert "prompt has 400,000 tokens" in answer.json()["error"]["message"]
        answer = await client.post("/detokenize", json={"tokens": [1] * 100_000})
        assert answer.status_code == 200


async def test_brackets_in_a_text_are_no_values(app: FastAPI) -> None:
    text = '[{"' + "[{" * 80_000 + "\\"
    async with http(app) as client:
        answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": "Hi", "user": text})
        assert answer.status_code == 200
        endless = b'{"a": "' + b'\\"' * 500_000 + b"[" * 80_000
        answer = await client.post(COMPLETIONS, content=endless, headers={"content-type": "application/json"})
        assert "is not JSON" in answer.json()["error"]["message"]


async def test_loop_goes_on_while_a_long_body_is_checked(app: FastAPI) -> None:
    body = {**GOOD[CHAT], "tools": [{"type": "function", "function": {"name": "f"}}] * 15_000, "n": "x"}
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async with http(app) as client:
        turning = asyncio.create_task(turn())
        answer = await client.post(CHAT, json=body)
        turning.cancel()
    assert answer.status_code == 400
    assert turns > 3


HUGE = b"9" * 5000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{} {}",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "demo", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model": "demo", "prompt": "x", "metadata": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
        b'{"model": "demo", "prompt": "x", "seed": ' + HUGE + b"}",
        b'{"model": "demo", "prompt": "x", "temperature": 1e999}',
        b'{"model": "demo", "prompt": "x", "temperature": NaN}',
        b'{"model": "demo", "prompt": "\\ud800"}',
        b'{"model": "demo", "prompt": "x", "user": {"a": ["\\udfff"]}}',
        b'{"model": "demo", "prompt": "x", "\\ud800": 1}',
        b'{"model": "demo", "prompt": "x", "stop": "\\ud800"}',
        b'{"model": "demo", "prompt": "x", "max_tokens": 1, "max_tokens": -1}',
        b"a=b",
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
@pytest.mark.parametrize("path", list(GOOD))
async def test_broken_body_is_refused(app: FastAPI, path: str, body: bytes) -> None:
    async with http(app) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    ErrorResponse.model_validate(answer.json())


async def test_other_content_types_are_refused(app: FastAPI) -> None:
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    async with http(app) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data", "\x80"):
            answer = await client.post(COMPLETIONS, content=body, headers={"content-type": kind.encode("latin-1")})
            assert answer.status_code == 400, kind
        with_charset = {"content-type": "application/json; charset=utf-8"}
        assert (await client.post(COMPLETIONS, content=body, headers=with_charset)).status_code == 200


async def test_null_is_absent_and_ignored_fields_are_tolerated(app: FastAPI) -> None:
    ignored = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": None,
        "foo": None,
        "best_of": None,
        "logit_bias": None,
        "stop": None,
    }
    async with http(app) as client:
        for path in (CHAT, COMPLETIONS):
            assert (await client.post(path, json={**GOOD[path], **ignored})).status_code == 200


async def test_unknown_model_and_paths(app: FastAPI) -> None:
    async with http(app) as client:
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            answer = await client.post(path, json={**GOOD[path], "model": "gpt\x00" * 100})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert answer.json()["error"]["param"] == "model"
        missing = await client.get("/v1/models/other/one")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("GET", "/%ff%00", 404),
            ("GET", "/v1/models/%ff%00", 404),
            ("GET", CHAT, 405),
            ("POST", "/health", 405),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == status
            ErrorResponse.model_validate(answer.json())
        assert (await client.get(CHAT)).headers["allow"] == "POST"


async def test_long_body_is_refused_declared_or_not(app_over: AppOver, tokenizer: Tokenizer) -> None:
    app = app_over(saying(tokenizer, "ok"), max_body_bytes=1000)
    read = 0

    async def chunks() -> Any:
        nonlocal read
        for _ in range(1000):
            read += 100
            yield b" " * 100

    headers = {"content-type": "application/json"}
    async with http(app) as client:
        declared = await client.post(CHAT, content=b" " * 1001, headers=headers)
        undeclared = await client.post(CHAT, content=chunks(), headers=headers)
        lying = await client.post(CHAT, content=b"{}", headers={**headers, "content-length": "9" * 400})
    assert [answer.status_code for answer in (declared, undeclared, lying)] == [413, 413, 413]
    assert declared.json()["error"]["code"] == "body_too_long"
    assert read <= 1100, "the rest of it was not waited for"


async def test_nothing_bad_reaches_the_engine(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine)) as client:
        for path, fields, _ in BAD_FIELDS:
            body = json.dumps({**GOOD[path], **fields})
            await client.post(path, content=body, headers={"content-type": "application/json"})
    assert engine.requests == []


FIELDS = [
    *("model", "messages", "prompt", "n", "temperature", "top_k", "top_p", "logit_bias", "seed", "max_tokens", "stop"),
    *("min_tokens", "stop_token_ids", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "tools"),
    *("tool_choice", "chat_template_kwargs", "response_format", "prompt_logprobs", "cache_salt", "tokens", "metadata"),
    *("continue_final_message", "add_generation_prompt", "best_of", "max_completion_tokens", "priority"),
]
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**63, 2**64, 10**400, 1e308]))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["demo", "user", "text"]))
KEYS = st.one_of(st.sampled_from(["role", "content", "type", "text", "function", "name", "1", *FIELDS]), st.text())
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(list(GOOD)),
    fields=st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text()), VALUES, max_size=4),
)
async def test_no_body_is_our_fault(app: FastAPI, path: str, fields: dict[str, Any]) -> None:
    async with http(app) as client:
        body = json.dumps({**GOOD[path], **fields})
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        ErrorResponse.model_validate(answer.json())
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in answer.text
