from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from app.openai import completions
from app.openai.logprobs import completion_logprobs
from app.openai.responses import CompletionResponse
from engine.output_processor import OutputProcessor
from engine.outputs import EngineOutput
from engine.request import FinishReason
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import AppOver, events, http, openai_client, saying
from tests.app.openai.scripted_client import ScriptedClient

PATH = "/v1/completions"


def joined(body: str) -> dict[int, dict[str, Any]]:
    """A stream's choices put together, by index."""
    choices: dict[int, dict[str, Any]] = {}
    for data in events(body)[:-1]:
        for choice in CompletionResponse.model_validate(json.loads(data)).model_dump()["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            if choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    whole["logprobs"] = whole["logprobs"] or {}
                    whole["logprobs"].setdefault(name, []).extend(values)
    return choices


async def test_completion_has_openai_format_and_16_tokens_at_most(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, " Paris", ".")
    async with http(app_over(engine)) as client:
        answer = await client.post(PATH, json={"model": "demo", "prompt": "The capital is"})
    content = CompletionResponse.model_validate(answer.json())
    assert content.id.startswith("cmpl-")
    assert (content.choices[0].text, content.choices[0].finish_reason) == (" Paris.", "stop")
    assert content.usage.prompt_tokens == 3  # type: ignore[union-attr]
    assert engine.requests[0].params.max_tokens == 16


async def test_openai_client_reads_answer_and_stream(app_over: AppOver, tokenizer: Tokenizer) -> None:
    app = app_over(saying(tokenizer, " Paris", "."))
    async with openai_client(app) as client:
        whole = await client.completions.create(model="demo", prompt="x", logprobs=1)
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == " Paris."
    assert whole.choices[0].logprobs.tokens[:2] == [" Paris", "."]  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    "prompt",
    ["one", [10, 11], ["one", "two"], [[10, 11], [12]], ["one", [12]]],
    ids=["text", "tokens", "texts", "token lists", "mixed"],
)
async def test_prompts_of_every_form(app_over: AppOver, tokenizer: Tokenizer, prompt: Any) -> None:
    engine = saying(tokenizer, "!")
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    async with http(app_over(engine)) as client:
        answer = await client.post(PATH, json={"model": "demo", "prompt": prompt})
    expected = [tuple(tokenizer.encode(one)) if isinstance(one, str) else tuple(one) for one in many]
    assert sorted(request.prompt_token_ids for request in engine.requests) == sorted(expected)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(many)))
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_are_prompt_major(app_over: AppOver, tokenizer: Tokenizer) -> None:
    """Each says its prompt's first token, and its child's number of times."""

    def script(request: Any) -> list[tuple[int, ...]]:
        child = int(request.request_id.rsplit("-", 1)[1])
        return [(request.prompt_token_ids[0],) * (child + 1)]

    first, second = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    body = {"model": "demo", "prompt": [[first], [second]], "n": 2}
    async with http(app_over(ScriptedClient(script))) as client:
        whole = (await client.post(PATH, json=body)).json()
        streamed = joined((await client.post(PATH, json={**body, "stream": True})).text)
    assert [choice["text"] for choice in whole["choices"]] == ["a", "aa", "b", "bb"]
    assert [streamed[index]["text"] for index in range(4)] == ["a", "aa", "b", "bb"]
    assert whole["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_logprobs_have_offsets_and_the_token_itself(app_over: AppOver, tokenizer: Tokenizer) -> None:
    app = app_over(saying(tokenizer, "Hello", " there", ends=False))
    body = {"model": "demo", "prompt": "x", "logprobs": 2}
    async with http(app) as client:
        whole = (await client.post(PATH, json=body)).json()["choices"][0]
        streamed = joined((await client.post(PATH, json={**body, "stream": True})).text)[0]
    logprobs = whole["logprobs"]
    assert logprobs["tokens"] == ["Hello", " there"]
    assert logprobs["text_offset"] == [0, 5]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"][0]["Hello"] == -0.5
    assert len(logprobs["top_logprobs"][0]) == 3
    assert streamed["logprobs"] == logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_echo_puts_the_prompt_first(
    app_over: AppOver, tokenizer: Tokenizer, stream: bool, max_tokens: int, logprobs: int | None, as_tokens: bool
) -> None:
    prompt = "Say it now"
    prompt_ids = tokenizer.encode(prompt)
    body = {
        "model": "demo",
        "prompt": prompt_ids if as_tokens else prompt,
        "echo": True,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "stream": stream,
    }
    async with http(app_over(saying(tokenizer, " it", ends=False))) as client:
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    choice = joined(answer.text)[0] if stream else answer.json()["choices"][0]
    assert choice["text"] == (prompt if max_tokens == 0 else prompt + " it")
    assert choice["finish_reason"] == "length"
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == (0 if max_tokens == 0 else 1)
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    tokens = [tokenizer.token_text(token) for token in prompt_ids] + ([] if max_tokens == 0 else [" it"])
    assert choice["logprobs"]["tokens"] == tokens
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(tokens) - 1)
    assert choice["logprobs"]["top_logprobs"][0] is None
    starts = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    assert choice["logprobs"]["text_offset"] == starts


async def test_prompt_logprobs_in_vllm_format(app_over: AppOver, tokenizer: Tokenizer) -> None:
    prompt_ids = tokenizer.encode("Say it now")
    async with http(app_over(saying(tokenizer, "!"))) as client:
        answer = await client.post(PATH, json={"model": "demo", "prompt": prompt_ids, "prompt_logprobs": 0})
    choice = CompletionResponse.model_validate(answer.json()).choices[0]
    assert choice.prompt_logprobs is not None
    assert [None if entry is None else list(entry) for entry in choice.prompt_logprobs] == [
        None,
        *([str(token)] for token in prompt_ids[1:]),
    ]


async def test_special_tokens_are_added_only_where_asked(
    app_over: AppOver, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tokenizer.encode

    def with_start(text: str, add_special_tokens: bool = True, **more: Any) -> list[int]:
        return [1] * add_special_tokens + encode(text)

    monkeypatch.setattr(tokenizer, "encode", with_start)
    engine = ScriptedClient(lambda request: [(5,)])
    async with http(app_over(engine)) as client:
        for add in (True, False):
            await client.post(PATH, json={"model": "demo", "prompt": "x", "add_special_tokens": add})
    assert [request.prompt_token_ids[0] == 1 for request in engine.requests] == [True, False]


async def test_work_of_an_answer_does_not_grow_with_the_square_of_n(
    app_over: AppOver, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = []
    snapshot = OutputProcessor.snapshot
    monkeypatch.setattr(OutputProcessor, "snapshot", lambda self: snapshots.append(1) or snapshot(self))
    body = {"model": "demo", "prompt": "x", "n": 64, "echo": True, "logprobs": 0}
    async with http(app_over(saying(tokenizer, "a", "b", ends=False))) as client:
        for stream in (False, True):
            assert (await client.post(PATH, json={**body, "stream": stream})).status_code == 200
    assert len(snapshots) < 10


async def test_failing_prompt_fails_the_request_and_ends_the_others(app_over: AppOver, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "a", "b", "c")
    engine.error, engine.error_after = RuntimeError("boom"), 2
    async with http(app_over(engine)) as client:
        answer = await client.post(PATH, json={"model": "demo", "prompt": ["x", "y", "z"]})
    assert answer.status_code == 500
    assert engine.closed == 3


async def test_characters_cut_by_token_borders_come_whole(app_over: AppOver, tokenizer: Tokenizer) -> None:
    text = "naïve 🦭🦭 日本語"
    engine = ScriptedClient(lambda request: [(token,) for token in tokenizer.encode(text)])
    async with http(app_over(engine)) as client:
        body = {"model": "demo", "prompt": "x", "max_tokens": 50}
        whole = (await client.post(PATH, json=body)).json()["choices"][0]["text"]
        streamed = await client.post(PATH, json={**body, "stream": True})
    assert whole == joined(streamed.text)[0]["text"] == text
    assert "�" not in streamed.text


async def test_echo_waits_for_the_prompts_logprobs_of_all_choices(app_over: AppOver, tokenizer: Tokenizer) -> None:
    """The second completion has ended before the first has computed them."""
    token = tokenizer.encode("a")[0]

    def script(request: Any) -> list[tuple[int, ...]]:
        return [(), (), (), (token,)] if request.request_id.endswith("-0") else [(token,), (token,)]

    engine = ScriptedClient(script, prompt_logprobs_at=3)
    body = {"model": "demo", "prompt": "Say it", "n": 2, "echo": True, "logprobs": 1, "stream": True}
    async with http(app_over(engine)) as client:
        choices = joined((await client.post(PATH, json=body)).text)
    assert [choices[index]["text"] for index in (0, 1)] == ["Say ita", "Say itaa"]
    assert [choices[index]["finish_reason"] for index in (0, 1)] == ["length", "length"]
    assert "".join(choices[1]["logprobs"]["tokens"]) == "Say itaa"


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.ABORT, 503), (FinishReason.ERROR, 500)], ids=["abort", "error"]
)
async def test_completion_that_the_engine_ends_is_an_error(
    app_over: AppOver, reason: FinishReason, status: int
) -> None:
    class Ending(ScriptedClient):
        def _output(self, request: Any, script: Any, step: int) -> EngineOutput:
            return EngineOutput(request.request_id, finish_reason=reason, error="secret")

    async with http(app_over(Ending(lambda request: [()]))) as client:
        answer = await client.post(PATH, json={"model": "demo", "prompt": "x"})
    assert answer.status_code == status
    assert "secret" not in answer.text


async def test_the_log_probabilities_of_a_long_echo_leave_the_event_loop_alone(
    app_over: AppOver, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, set[int]] = {}  # by how many log-probabilities are written

    def noted(entries: Any, *args: Any) -> Any:
        threads.setdefault(len(entries), set()).add(threading.get_ident())
        return completion_logprobs(entries, *args)

    monkeypatch.setattr(completions, "completion_logprobs", noted)
    body = {"model": "demo", "prompt": [300] * 400, "echo": True, "logprobs": 20, "stream": True}
    async with http(app_over(saying(tokenizer, " Paris", "."))) as client:
        answer = await client.post(PATH, json=body)
    assert len(joined(answer.text)[0]["logprobs"]["tokens"]) == 400 + 3
    assert threading.get_ident() not in threads.pop(401)
    assert set().union(*threads.values()) == {threading.get_ident()}, "short ones are not worth a thread"
