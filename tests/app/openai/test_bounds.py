"""What would cost much is refused before it costs anything, and the error says which limit it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, http, saying

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hi"}
LIMIT = 1000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "Hi", "logprobs": 9, "max_tokens": 101}, "logprobs"),
        (COMPLETIONS, {"prompt": ["Hi"] * 2, "n": 2, "logprobs": 0, "max_tokens": 251}, "logprobs"),
        (COMPLETIONS, {"prompt": [[5] * 101], "prompt_logprobs": 9}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [[5] * 101], "prompt_logprobs": 0, "n": 10, "max_tokens": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [[5] * 126], "echo": True, "logprobs": 1, "n": 4, "max_tokens": 1}, "logprobs"),
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 4, "max_tokens": 201}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "Hi " * 100}], "prompt_logprobs": 9}, "prompt_logprobs"),
    ],
)
async def test_more_logprobs_than_an_answer_may_have_are_refused(
    app_over: AppOver, tokenizer: Tokenizer, path: str, fields: dict[str, Any], param: str
) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine, max_logprobs=LIMIT)) as client:
        answer = await client.post(path, json={"model": "demo", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "at most 1,000 are allowed" in error["message"]
    assert error["message"].startswith(param)
    assert engine.requests == []


async def test_as_many_logprobs_as_an_answer_may_have_are_given(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine, max_logprobs=LIMIT)) as client:
        for fields in ({"logprobs": 9, "max_tokens": 100}, {"prompt": [[5] * 100], "prompt_logprobs": 9}):
            answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": "Hi", **fields})
            assert answer.status_code == 200, answer.text


async def test_chat_without_max_tokens_ends_where_its_logprobs_do(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine, max_logprobs=LIMIT)) as client:
        for fields in ({"logprobs": True, "top_logprobs": 4, "n": 2}, {}):
            answer = await client.post(CHAT, json={"model": "demo", "messages": [USER], **fields})
            assert answer.status_code == 200, answer.text
    with_logprobs, _, without = engine.requests
    assert with_logprobs.params.max_tokens == 100
    assert without.params.max_tokens is not None
    assert without.params.max_tokens > 400, "whatever the context leaves"


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, {"messages": [USER], "logprobs": True}),
        (CHAT, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": [5] * 505}),
    ],
)
async def test_bound_that_the_client_did_not_ask_for_is_never_refused(
    app_over: AppOver, tokenizer: Tokenizer, path: str, given: dict[str, Any]
) -> None:
    """Where more max_tokens than the context leaves are refused."""
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine, max_logprobs=10_000, refuse_excess_max_tokens=True)) as client:
        answer = await client.post(path, json={"model": "demo", **given})
        refused = await client.post(path, json={"model": "demo", **given, "max_tokens": 513})
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_completion_without_max_tokens_ends_after_sixteen_or_what_must_be_made(
    app_over: AppOver, tokenizer: Tokenizer
) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine)) as client:
        for given in ({}, {"min_tokens": 20}):
            answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": "Hi", **given})
            assert answer.status_code == 200, answer.text
    assert [request.params.max_tokens for request in engine.requests] == [16, 20]


def with_arguments(*arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}]}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, with_arguments(json.dumps([[]] * 40_000), json.dumps([[]] * 40_000)), "too many values"),
        (CHAT, with_arguments('"', json.dumps([{}] * 70_000)), "too many values"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {f"v{i}": i for i in range(65)}}, "at most 64 variables"),
        (COMPLETIONS, {"prompt": [[1] * 1_200_000]}, "too many values"),
        ("/detokenize", {"tokens": [1] * 1_200_000}, "too many values"),
    ],
)
async def test_many_values_are_refused_wherever_they_stand(
    app_over: AppOver, tokenizer: Tokenizer, path: str, fields: dict[str, Any], message: str
) -> None:
    async with http(app_over(saying(tokenizer, "ok"))) as client:
        answer = await client.post(path, json={"model": "demo", **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_brackets_in_a_calls_texts_are_no_values(app_over: AppOver, tokenizer: Tokenizer) -> None:
    fields = with_arguments(json.dumps({"code": "[[{{,," * 20_000}))
    async with http(app_over(saying(tokenizer, "ok"))) as client:
        answer = await client.post(CHAT, json={"model": "demo", **fields})
    assert "too many values" not in answer.text
