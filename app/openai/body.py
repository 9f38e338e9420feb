"""From the bytes of a request to a validated model, and from every way to fail to one clear sentence."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from app.openai.errors import ApiError, api_error
from engine.sampling_params import InvalidParameter

MAX_DEPTH = 100
"""Nesting of a body: far above any tool's JSON schema, and far below what makes Python's recursion fail later."""

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Model = TypeVar("Model", bound=BaseModel)


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
        ApiError: 400 or 413.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_body(request, max_bytes)
    if media_type != "application/json":
        shown = repr(media_type[:80]) if media_type else "absent"
        raise ApiError.bad_request(f"the content-type must be application/json; it is {shown}")
    return parse_json(body)


async def parse_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body as a `model`.

    Raises:
        ApiError: 400 or 413, naming the field where there is one.
    """
    return validate(await read_json(request, max_bytes), model)


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object, nested at most MAX_DEPTH deep, whose texts can all be encoded."""
    if not body:
        raise ApiError.bad_request("the body is empty; it must be a JSON object")
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
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _refuse_deep_nesting(content)
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
    rule = error["msg"].replace("Input should", "must").replace("List should", "must").replace("valid ", "", 1)
    value = error["input"]
    if isinstance(value, str | int | float):
        shown = json.dumps(value)
        return ApiError.bad_request(f"{param}={shown if len(shown) <= 80 else shown[:77] + '...'}: {rule}", param)
    return ApiError.bad_request(f"{param}: {rule}", param)


def _field_path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else part
    return path if len(path) <= 200 else path[:197] + "..."


def _refuse_deep_nesting(content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ApiError.bad_request(f"the body is nested too deeply: at most {MAX_DEPTH} levels are allowed")


def _refuse_lone_surrogates(content: dict[str, Any]) -> None:
    for name, value in content.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            shown = name.encode("ascii", "replace").decode()
            raise ApiError.bad_request(f"{shown}: has half of a surrogate pair, which is no text", shown) from None


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes:,} bytes", code="body_too_long")
