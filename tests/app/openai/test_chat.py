from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from fastapi import FastAPI

from app.openai.responses import ChatCompletionChunk, ChatCompletionResponse
from app.transport import EngineFailed, NoReplica, QueueFull
from engine.outputs import EngineOutput
from engine.request import FinishReason
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, events, http, openai_client, saying
from tests.app.openai.scripted_client import ScriptedClient

QUESTION = [{"role": "user", "content": "Hi"}]


async def test_answer_has_openai_format(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "demo", "messages": QUESTION})
    assert answer.status_code == 200
    content = ChatCompletionResponse.model_validate(answer.json())
    assert content.id.startswith("chatcmpl-")
    assert content.model == "demo"
    choice = content.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("Hello there, friend.", "stop", None)
    assert content.usage.completion_tokens == 6
    assert content.usage.total_tokens == content.usage.prompt_tokens + 6
    assert content.usage.prompt_tokens_details.cached_tokens == 1


async def test_stream_starts_with_role_and_ends_with_done(chat_app: FastAPI) -> None:
    body = {"model": "demo", "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}
    async with http(chat_app) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *data, done = events(answer.text)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(json.loads(each)) for each in data]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "Hello there, friend."
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" in json.loads(each) for each in data)
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6  # type: ignore[union-attr]


async def test_stream_without_usage_has_no_usage(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "demo", "messages": QUESTION, "stream": True})
    assert all("usage" not in each for each in events(answer.text))


async def test_openai_client_reads_answer_and_stream(chat_app: FastAPI) -> None:
    async with openai_client(chat_app) as client:
        whole = await client.chat.completions.create(model="demo", messages=QUESTION)  # type: ignore[arg-type]
        stream = await client.chat.completions.create(model="demo", messages=QUESTION, stream=True)  # type: ignore[arg-type]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == "Hello there, friend."


async def test_n_answers_are_indexed_and_prompt_counts_once(chat_app: FastAPI) -> None:
    body = {"model": "demo", "messages": QUESTION, "n": 3}
    async with http(chat_app) as client:
        three = (await client.post("/v1/chat/completions", json=body)).json()
        one = (await client.post("/v1/chat/completions", json={**body, "n": 1})).json()
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 18
    chunks = [json.loads(each) for each in events(streamed.text)[:-1]]
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert roles == [0, 1, 2]


async def test_logprobs_have_bytes_and_alternatives(app_over: AppOver, tokenizer: Tokenizer) -> None:
    app = app_over(saying(tokenizer, "Hello", " 🦭"))
    body = {"model": "demo", "messages": QUESTION, "logprobs": True, "top_logprobs": 2}
    async with http(app) as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    content = ChatCompletionResponse.model_validate(whole).choices[0].logprobs.content  # type: ignore[union-attr]
    text = b"".join(bytes(token.bytes) for token in content)
    assert text.startswith("Hello 🦭".encode())
    assert [len(token.top_logprobs) for token in content] == [2] * len(content)
    assert content[0].top_logprobs[0].token == content[0].token == "Hello"
    assert content[0].logprob == pytest.approx(-0.5)
    chunks = [json.loads(each) for each in events(streamed.text)[:-1]]
    parts = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [token for part in parts for token in part] == whole["choices"][0]["logprobs"]["content"]


async def test_logprobs_without_alternatives(chat_app: FastAPI) -> None:
    async with http(chat_app) as client:
        body = {"model": "demo", "messages": QUESTION, "logprobs": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert all(token["top_logprobs"] == [] for token in answer["choices"][0]["logprobs"]["content"])


async def test_stop_string_cuts_text_and_aborts(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there", ",", " friend", ".")
    async with http(app_over(engine)) as client:
        body = {"model": "demo", "messages": QUESTION, "stop": ["re,"]}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        "Hello the",
        "stop",
        "re,",
    )
    assert answer["usage"]["completion_tokens"] == 3
    assert engine.aborted == [request.request_id for request in engine.requests]
    chunks = [json.loads(each) for each in events(streamed.text)[:-1]]
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == "Hello the"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"role": "user", "content": ""}, ""),
        ({"role": "user", "content": "nul \x00 byte"}, "nul \x00 byte"),
    ],
)
async def test_contents_reach_the_template(
    app_over: AppOver, tokenizer: Tokenizer, message: dict[str, object], expected: str
) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine)) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "demo", "messages": [message]})
    assert answer.status_code == 200
    prompt = tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert f"<|im_start|>user\n{expected}<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


async def test_final_message_is_continued(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")
    messages = [*QUESTION, {"role": "assistant", "content": "The answer is"}]
    async with http(app_over(engine)) as client:
        body = {"model": "demo", "messages": messages, "continue_final_message": True}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("The answer is")


async def test_tool_calls_and_tools_reach_the_template(
    app_over: AppOver, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}"
        "{% endfor %} tools: {{ (tools or []) | map(attribute='function') | map(attribute='name') | join }}"
        " {{ mood }}"
    )
    monkeypatch.setattr(tokenizer.hf, "chat_template", template)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = {
        "model": "demo",
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"mood": "calm"},
    }
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine)) as client:
        for choice in ("auto", "none"):
            answer = await client.post("/v1/chat/completions", json={**body, "tool_choice": choice})
            assert answer.status_code == 200, answer.text
    with_tools, without = (tokenizer.decode(request.prompt_token_ids) for request in engine.requests)
    assert with_tools == "[developer] d[assistant]  f(1)[tool] 2 tools: g calm"
    assert without == "[developer] d[assistant]  f(1)[tool] 2 tools:  calm"


async def test_sampling_fields_reach_the_engine(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 1,
        "seed": -3,
        "min_tokens": 1,
        "stop_token_ids": [5],
        "ignore_eos": False,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    extra = {"logit_bias": {"11": -5, "12": 0.5}, "max_completion_tokens": 9, "stop": "x", "priority": 4}
    async with http(app_over(engine)) as client:
        body = {"model": "demo", "messages": QUESTION, **fields, **extra}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    request = engine.requests[0]
    for name, value in fields.items():
        sent = getattr(request.params, name)
        assert (list(sent) if isinstance(value, list) else sent) == value, name
    assert request.params.logit_bias == {11: -5.0, 12: 0.5}
    assert (request.params.max_tokens, request.params.stop, request.priority) == (9, ("x",), 4)
    assert request.seed == 2**64 - 3


async def test_absent_max_tokens_is_what_the_context_leaves(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")
    async with http(app_over(engine)) as client:
        await client.post("/v1/chat/completions", json={"model": "demo", "messages": QUESTION})
    request = engine.requests[0]
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("the queue is full", 2.5), 429, "queue_full"),
        (NoReplica("no replica is up"), 503, "no_replica"),
        (EngineFailed("the engine failed"), 500, "internal_error"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_failure_before_first_token_has_its_status(
    app_over: AppOver, tokenizer: Tokenizer, error: Exception, status: int, code: str
) -> None:
    engine = saying(tokenizer, "Hello")
    engine.error = error
    async with http(app_over(engine)) as client:
        for stream in (False, True):
            body = {"model": "demo", "messages": QUESTION, "stream": stream}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == status
            assert answer.json()["error"]["code"] == code
            assert "secret" not in answer.text
            if status == 429:
                assert answer.headers["retry-after"] == "3"
    assert engine.closed == 2


async def test_failure_within_stream_is_an_error_event(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there")
    engine.error, engine.error_after = EngineFailed("the engine failed"), 1
    async with http(app_over(engine)) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "demo", "messages": QUESTION, "stream": True})
    *chunks, failure, done = events(answer.text)
    assert answer.status_code == 200
    assert done == "[DONE]"
    assert "Hello" in "".join(chunks)
    assert json.loads(failure)["error"]["type"] == "server_error"


async def test_long_wait_is_kept_open_by_comments(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello")
    engine.pauses = [0.2]
    async with http(app_over(engine, heartbeat=0.02)) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "demo", "messages": QUESTION, "stream": True})
    assert answer.text.startswith(": ")
    assert events(answer.text)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_ends_a_request_at_its_deadline_does_not_overtake_the_timeout(
    app_over: AppOver, stream: bool
) -> None:
    class Punctual(ScriptedClient):
        async def generate(self, requests: Any) -> Any:
            await asyncio.sleep(requests[0].deadline - time.time())
            yield [EngineOutput(requests[0].request_id, finish_reason=FinishReason.ABORT)]

    async with http(app_over(Punctual(lambda request: []), request_timeout=0.1)) as client:
        body = {"model": "demo", "messages": QUESTION, "stream": stream}
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


async def test_large_tools_are_rendered_off_the_loop(
    app_over: AppOver, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop = []

    def render_chat(*args: Any, **more: Any) -> str:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return "x"

    monkeypatch.setattr(tokenizer, "render_chat", render_chat)
    async with http(app_over(saying(tokenizer, "ok"))) as client:
        for description in ("short", "long " * 2000):
            tool = {"type": "function", "function": {"name": "f", "description": description}}
            body = {"model": "demo", "messages": QUESTION, "tools": [tool]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert on_loop == [True, False]
