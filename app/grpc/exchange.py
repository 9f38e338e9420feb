"""One gRPC call from its metadata to its status: who makes it, what it is counted as, how it ends.

What `app/openai/envelope.py` and `app/openai/auth.py` are to HTTP.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import urllib.parse
import uuid
from asyncio import Semaphore
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext
from starlette.requests import Request

from app.grpc.metrics import GrpcMetrics
from app.openai.auth import KeyRing
from app.openai.envelope import CLIENTS_ID
from app.openai.errors import ApiError, api_error, is_unexpected
from app.openai.intake import Intake
from app.openai.rate_limits import Client
from app.openai.service import Service

logger = logging.getLogger(__name__)

STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Of the HTTP status that an error has."""

LONGEST_DETAILS = 2000
"""Characters of a status: it travels in HTTP/2 trailers, which clients bound at 8 KiB."""

MOST_WATCHERS = 16
"""Of one ingress: a quarter of the room that CONTROL_CALLS leaves beside requests."""

_ADDRESS = re.compile(r"ipv[46]:\[?([0-9a-f.:]+)(?:%[^\]]*)?\]?:[0-9]+")
_PLAIN = re.compile(r"[\x20-\x7e]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSide:
    """What all gRPC calls of one ingress share.

    Attributes:
        keys: who may use it; None is everyone.
        intake: whether calls are taken.
        local_only: refuse clients on other machines.
        check_ready: returns when calls can be served, raises otherwise.
        everyone: who makes the calls that show no key.
        watchers: how many more may be told of the service's health for a time; they hold Serve's places for calls.
    """

    service: Service
    keys: KeyRing | None
    intake: Intake
    metrics: GrpcMetrics
    local_only: bool
    check_ready: Callable[[], Awaitable[None]]
    everyone: Client
    watchers: Semaphore = field(default_factory=partial(Semaphore, MOST_WATCHERS))


class Exchange:
    """One call, as a context manager: what is raised within becomes the call's status, and is not raised further.

    Serve sends `context` to its proxy along with each message of an answer. A call that fails therefore needs a message
    after the `with`, however empty.

    Args:
        method: the RPC's name, for metrics and logs.
        message: the request.
        is_open: it needs no key and has no limits.
    """

    def __init__(
        self, side: GrpcSide, method: str, message: Message, context: RayServegRPCContext, *, is_open: bool = False
    ) -> None:
        self._side = side
        self._method = method
        self._message = message
        self._context = context
        self._is_open = is_open
        self._metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        given = self._metadata.get("x-request-id", "")
        self._request_id = given if CLIENTS_ID.fullmatch(given) else uuid.uuid4().hex
        self._client = side.everyone
        self._held = ExitStack()
        self.failed = False

    def __enter__(self) -> Self:
        self._arrived = self._side.service.clock()
        self._side.metrics.in_flight.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._held.close()
        status = grpc.StatusCode.OK
        if isinstance(error, Exception):
            status = self._refuse(error)
        elif error is not None:  # a cancellation, or a generator that is closed: nobody waits for the answer
            status = grpc.StatusCode.CANCELLED
            self._side.metrics.disconnects.inc()
        elif not self.failed:
            self.show_metadata()
        metrics = self._side.metrics
        metrics.in_flight.dec()
        metrics.requests.labels(self._method, status.name).inc()
        metrics.latency.labels(self._method).observe(max(0.0, self._side.service.clock() - self._arrived))
        return self.failed

    def admit(self) -> Request:
        """The call as the endpoints know requests: its state has what theirs has.

        Raises:
            ApiError: 401, 403, 413, 429, or 503 where no more calls are taken.
        """
        limits = self._side.service.limits
        if self._side.local_only and not is_local(self._context.peer()):
            raise ApiError(403, "gRPC is served to clients on this machine alone", code="not_local")
        if not self._is_open:
            self._held.enter_context(self._side.intake.request())
            if self._side.keys is not None:
                self._client = self._side.keys.client(self._metadata.get("authorization"))
        admission = self._held.enter_context(self._client.request())
        if self._message.ByteSize() > limits.max_body_bytes:
            raise ApiError(413, f"the message is longer than {limits.max_body_bytes:,} bytes", code="body_too_long")
        state = {
            "request_id": self._request_id,
            "arrived": self._arrived,
            "client": self._client,
            "admission": admission,
        }
        return Request({"type": "http", "headers": [], "state": state})

    def show_metadata(self, **more: str) -> None:
        """Sets the trailing metadata, with the client's limits as they stand."""
        metadata = {"x-request-id": self._request_id, **self._client.headers(), **more}
        self._context.set_trailing_metadata(list(metadata.items()))

    def _refuse(self, error: Exception) -> grpc.StatusCode:
        self.failed = True
        refusal = api_error(error)
        if is_unexpected(error):
            logger.error("request_failed request_id=%s method=%s", self._request_id, self._method, exc_info=error)
        status = STATUS.get(refusal.status, grpc.StatusCode.UNKNOWN)
        self._context.set_code(status)
        self._context.set_details(str(refusal)[:LONGEST_DETAILS])
        told = {
            "error-code": refusal.code,
            "error-param": refusal.param,
            "retry-after": refusal.headers.get("retry-after"),
        }
        self.show_metadata(**{key: value for key, value in told.items() if value and _PLAIN.fullmatch(value)})
        return status


def is_local(peer: str) -> bool:
    """Whether a client, as gRPC names it, is on the machine that it is connected to."""
    if peer.startswith("unix:"):
        return True
    found = _ADDRESS.fullmatch(urllib.parse.unquote(peer))
    if found is None:
        return False
    try:
        address = ipaddress.ip_address(found[1])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
