"""Valid bodies, broken in every way that comes to mind, are answered, never by a 500, and leave nothing behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from app.openai.responses import ErrorResponse
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import events
from tests.app.openai.live_service import ANSWER_S, MODEL, LiveService, live_service

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": null}]}'}}
CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
    ],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "seed": 1,
    "stop": ["\n", "x"],
    "logit_bias": {"5": -1.5},
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "text"},
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL]}]},
        CHAT,
        {**CHAT, "stream": False, "stream_options": None, "prompt_logprobs": 1, "priority": 3, "cache_salt": "s"},
    ],
    "/v1/completions": [
        {"model": MODEL, "prompt": "Hi", "max_tokens": 2},
        {"model": MODEL, "prompt": ["Hi", "you"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 2, "stream": True},
        {"model": MODEL, "prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "logprobs": 0},
        {"model": MODEL, "prompt": [1, 2, 3], "prompt_logprobs": 2, "min_tokens": 1, "stop_token_ids": [7], "top_k": 3},
    ],
    "/tokenize": [
        {"model": MODEL, "prompt": "Hi", "add_special_tokens": False, "return_token_strs": True},
        {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": MODEL, "tokens": [1, 2, 3]}],
}


def nested(depth: int, *, as_objects: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if as_objects else [value]
    return value


ODD_VALUES = st.one_of(
    st.sampled_from(
        [None, True, False, "", [], {}, [[]], [None], {"a": None}, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64]
    ),
    st.sampled_from([10**400, -(10**400), 0.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")]),
    st.sampled_from(["\x00", "\ud800", "\U0010ffff", "\u202e", "{{ 1 / 0 }}", "<|im_end|>", "%s%n", "x" * 5000, MODEL]),
    st.builds(nested, st.sampled_from([3, 98, 99, 100, 101, 500]), as_objects=st.booleans()),
    st.sampled_from([[0] * 70, ["a"] * 70, {str(i): i for i in range(70)}, [[1]] * 70]),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
).map(copy.deepcopy)  # what was drawn may be changed


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a body there is something."""
    if path:
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(child, (*path, key))


@st.composite
def broken_values(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """Up to three values replaced, taken away, or put where they do not belong."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        all_places = list(places(body))
        if not all_places:
            break
        *way, last = draw(st.sampled_from(all_places))
        owner: Any = body
        for key in way:
            owner = owner[key]
        match draw(st.sampled_from(["replace", "remove", "add", "move"])):
            case "replace":
                owner[last] = draw(ODD_VALUES)
            case "remove":
                del owner[last]
            case "add" if isinstance(owner, dict):
                owner[draw(st.text(max_size=5))] = draw(ODD_VALUES)
            case "add":
                owner.insert(draw(st.integers(0, 3)), draw(ODD_VALUES))
            case "move":
                body[str(last)] = owner.pop(last)
    return body


@st.composite
def broken_bytes(draw: st.DrawFn, body: bytes) -> bytes:
    """Bytes cut off, changed, put in, or said twice."""
    start = draw(st.integers(0, len(body)))
    end = draw(st.integers(start, min(start + 20, len(body))))
    match draw(st.sampled_from(["cut", "replace", "repeat", "again", "other"])):
        case "cut":
            return body[:start]
        case "replace":
            odd = [
                b"\xff",
                b"\xed\xa0\x80",
                b"\\ud800",
                b"\\u0000",
                b"NaN",
                b"-",
                b"1e999",
                b'"',
                b"[" * 200,
                b",",
                b"9" * 5000,
            ]
            return body[:start] + draw(st.one_of(st.sampled_from(odd), st.binary(max_size=8))) + body[end:]
        case "repeat":
            return body[:end] + body[start:]
        case "again":  # each key twice, the second time with another value
            other = {key: draw(ODD_VALUES) for key in json.loads(body)}
            return body[:-1] + b"," + json.dumps(other).encode()[1:]
    return body.decode().encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "utf-7"])))


CONTENT_TYPES = st.one_of(
    st.just("application/json"),
    st.sampled_from(
        ["", "text/plain", "application/json; charset=utf-16", "APPLICATION/JSON", "multipart/form-data", "a" * 300]
    ),
)


@pytest.fixture(scope="module")
def service(tiny_folder: Path, tokenizer: Tokenizer) -> Iterator[LiveService]:
    with live_service(tiny_folder, tokenizer) as service:
        yield service


@pytest.mark.parametrize(("path", "examples"), [(path, 30 * len(bodies)) for path, bodies in BODIES.items()])
def test_broken_bodies_are_answered_and_leave_nothing_behind(service: LiveService, path: str, examples: int) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        body = data.draw(st.sampled_from(BODIES[path]))
        if data.draw(st.booleans()):
            content = json.dumps(data.draw(broken_values(body))).encode()
        else:
            content = data.draw(broken_bytes(json.dumps(body).encode()))
        kind = data.draw(CONTENT_TYPES)
        answer = client.post(path, content=content, headers={"content-type": kind})
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (content, answer.text)
        if answer.status_code != 200:
            ErrorResponse.model_validate_json(answer.text)
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert events(answer.text)[-1] == "[DONE]"
            assert "server_error" not in answer.text, (content, answer.text)

    with httpx.Client(base_url=service.url, timeout=ANSWER_S) as client:
        ask()
    assert {200, 400} <= statuses, "nothing was tried"
    service.check_idle()
