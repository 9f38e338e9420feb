"""From the bytes of a request to a validated model, and from every way to fail to one clear sentence."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.openai.errors import ApiError, api_error, cut
from engine.sampling_params import InvalidParameter

MAX_DEPTH = 100
"""Nesting of a body: far above any tool's JSON schema, and far below what makes Python's recursion fail later."""

MAX_VALUES = 1 << 16
"""Objects, lists, texts, numbers, … in a body, token ids apart. A check costs some microseconds for each, and holds the
event loop up: a conversation of 2,048 messages, each with a call of a tool, has a third as many."""

MAX_TOKEN_IDS = 1 << 20
"""In a body, beside MAX_VALUES other values: parsing a million takes 60 ms, in which nothing else runs."""

LONG_BODY = 1 << 16
"""Bytes from which on a body is parsed and checked on a thread."""

_TOKEN_IDS = ("prompt", "tokens")
_INT64 = range(-(1 << 63), 1 << 63)
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A JSON text; one that does not end reaches to the body's end, so that the search takes linear time."""

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Model = TypeVar("Model", bound=BaseModel)


class RequestModel(BaseModel):
    """A body, or a part of one: strict types, no unknown fields, null for absent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, content: Any) -> Any:
        if isinstance(content, dict):
            return {name: value for name, value in content.items() if value is not None}
        return content


class BodyDeadline:
    """ASGI middleware: a body that has not arrived whole `seconds` after its request is answered with 408.

    Raises (out of the application's `receive`):
        ApiError: 408, which has the server close the connection.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        arrived = scope["type"] != "http"

        async def receive_in_time() -> Message:
            nonlocal arrived
            if arrived:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {self._seconds:g} seconds"
                raise ApiError(408, text, code="body_timeout", headers={"connection": "close"}) from None
            arrived = not message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time, send)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413, as soon as it is known to be longer than max_bytes.
        starlette.requests.ClientDisconnect: the client went away.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_long(max_bytes)
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_long(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 400, 408 or 413.
    """
    body = await _read_json_body(request, max_bytes)
    return await asyncio.to_thread(parse_json, body) if len(body) >= LONG_BODY else parse_json(body)


async def parse_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body as a `model`.

    Raises:
        ApiError: 400, 408 or 413, naming the field where there is one.
    """
    body = await _read_json_body(request, max_bytes)

    def work() -> Model:
        return validate(parse_json(body), model)

    return await asyncio.to_thread(work) if len(body) >= LONG_BODY else work()


async def _read_json_body(request: Request, max_bytes: int) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_body(request, max_bytes)
    if media_type != "application/json":
        shown = repr(cut(media_type)) if media_type else "absent"
        raise ApiError.bad_request(f"the content-type must be application/json; it is {shown}")
    return body


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object of at most MAX_VALUES values, nested at most MAX_DEPTH deep, whose texts can all be encoded."""
    if not body:
        raise ApiError.bad_request("the body is empty; it must be a JSON object")
    refuse_many_values(body)
    try:
        content = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise ApiError.bad_request(f"the body is not UTF-8: byte {error.start} is wrong") from None
    except RecursionError:
        raise ApiError.bad_request("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError.bad_request(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # more digits than Python converts
        raise ApiError.bad_request("the body has a number with too many digits") from None
    if not isinstance(content, dict):
        raise ApiError.bad_request("the body must be a JSON object")
    refuse_much_or_deep(content)
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(content)
    return content


def validate(content: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(content)
    except ValidationError as failure:
        error = failure.errors(include_url=False, include_context=True)[0]
        raise _sentence(error) from None


def _sentence(error: ErrorDetails) -> ApiError:
    refused = error.get("ctx", {}).get("error")
    if isinstance(refused, InvalidParameter):
        return api_error(refused)
    param = _field_path(error["loc"]) or None
    if error["type"] == "extra_forbidden":
        return ApiError.bad_request(f"{param}: unknown parameter", param, "unknown_parameter")
    if error["type"] == "missing":
        return ApiError.bad_request(f"{param}: is required", param, "missing_required_parameter")
    if isinstance(refused, ValueError):
        return ApiError.bad_request(f"{param}: {refused}", param)
    rule = _rule(error["msg"])
    value = error["input"]
    if isinstance(value, str | int | float):
        return ApiError.bad_request(f"{param}={cut(json.dumps(value))}: {rule}", param)
    return ApiError.bad_request(f"{param}: {rule}", param)


def _rule(message: str) -> str:
    """`must be an integer` for pydantic's `Input should be a valid integer`."""
    rule = re.sub(r"^\w+ should", "must", message).replace("valid ", "", 1)
    return re.sub(r"\ba (?=[aeiou])", "an ", rule).partition(" after validation")[0]


def _field_path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else part
    return path if len(path) <= 200 else path[:197] + "..."


def refuse_many_values(*documents: bytes) -> None:
    """Looks for the signs that objects, lists and their entries need, before parsing costs anything.

    Raises:
        ApiError: 400, the JSON documents have more values together than a body may.
    """
    if _has_many_values(b"".join(documents)) and _has_many_values(b"".join(_TEXT.sub(b"", each) for each in documents)):
        raise _too_many_values()


def _has_many_values(body: bytes) -> bool:
    return body.count(b"[") + body.count(b"{") > MAX_VALUES or body.count(b",") > MAX_VALUES + MAX_TOKEN_IDS


def refuse_many(values: int, token_ids: int = 0) -> None:
    """
    Raises:
        ApiError: 400, they are more than a body may have.
    """
    if values > MAX_VALUES or token_ids > MAX_TOKEN_IDS:
        raise _too_many_values()


def refuse_much_or_deep(content: dict[str, Any]) -> None:
    """
    Raises:
        ApiError: 400, it has more than MAX_VALUES values, or is nested more than MAX_DEPTH deep.
    """
    level: list[Any] = [
        {name: _without_token_ids(value) if name in _TOKEN_IDS else value for name, value in content.items()}
    ]
    values = 0
    for _ in range(MAX_DEPTH):
        values += sum(map(len, level))
        refuse_many(values)
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ApiError.bad_request(f"the body is nested too deeply: at most {MAX_DEPTH} levels are allowed")


def _without_token_ids(value: Any) -> Any:
    """A prompt, or some, with an empty list for each list of what may be token ids: these cost next to nothing."""
    if not isinstance(value, list):
        return value
    if _are_integers(value):
        return []
    return [[] if isinstance(each, list) and _are_integers(each) else each for each in value]


def _are_integers(values: list[Any]) -> bool:
    return {int}.issuperset(map(type, values)) and (not values or (min(values) in _INT64 and max(values) in _INT64))


def _too_many_values() -> ApiError:
    limits = f"at most {MAX_VALUES:,} are allowed, and {MAX_TOKEN_IDS:,} token ids beside them"
    return ApiError.bad_request(f"the body has too many values: {limits}")


def _refuse_lone_surrogates(content: dict[str, Any]) -> None:
    for name, value in content.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            shown = name.encode("ascii", "replace").decode()
            raise ApiError.bad_request(f"{shown}: has half of a surrogate pair, which is no text", shown) from None


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes:,} bytes", code="body_too_long")
