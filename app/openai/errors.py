"""OpenAI's error objects, and which one each of our exceptions becomes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from app.transport import EngineFailed, NoReplica, QueueFull, ReplicaLost
from engine.sampling_params import InvalidParameter

LONGEST_VALUE = 80
"""Characters of a refused value that a message shows."""

_LONG_WORD = re.compile(rf"\w{{{LONGEST_VALUE + 1},}}")


class ApiError(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: of the HTTP response.
        param: the field to correct, where there is one.
        code: a word for programs.
        headers: of the HTTP response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def bad_request(cls, message: str, param: str | None = None, code: str | None = None) -> ApiError:
        return cls(400, message, param=param, code=code)

    @property
    def kind(self) -> str:
        """OpenAI's `type` for the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def cut(shown: str) -> str:
    """A value of a client's, as short as a message needs it."""
    return shown if len(shown) <= LONGEST_VALUE else shown[: LONGEST_VALUE - 3] + "..."


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII, so that a text with lone surrogates can be sent as well."""
    return Response(json.dumps(content), status, dict(headers or {}), media_type="application/json")


def api_error(error: Exception) -> ApiError:
    """The ApiError that tells a client of any exception; 500 for what nobody expected."""
    match error:
        case ApiError():
            return error
        case InvalidParameter():
            # A number of 4,000 digits, say, may have come through whole.
            message = _LONG_WORD.sub(lambda word: cut(word[0]), str(error))
            return ApiError.bad_request(message, error.param)
        case QueueFull():
            retry_after = str(max(1, math.ceil(error.retry_after_s)))
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": retry_after})
        case NoReplica():
            return ApiError(503, str(error), code="no_replica", headers={"retry-after": "1"})
        case ReplicaLost():
            return ApiError(503, str(error), code="replica_died", headers={"retry-after": "1"})
        case EngineFailed():
            return ApiError(500, str(error), code="internal_error")
        case TimeoutError():
            return ApiError(504, "the request took longer than this service allows", code="timeout")
    return ApiError(500, "the server met an error of its own while it served the request", code="internal_error")


def is_unexpected(error: Exception) -> bool:
    """Whether it is a fault of ours, which belongs into the log."""
    return api_error(error).status == 500
