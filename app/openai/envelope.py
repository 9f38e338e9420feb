"""What surrounds every request: its id, its place in the metrics, and an answer to whatever was raised."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.openai.errors import api_error, is_unexpected
from app.openai.metrics import IngressMetrics
from engine.request import Clock

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status under which an answer that nobody waits for is counted."""

CLIENTS_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Envelope:
    """ASGI middleware. A request's id is its `x-request-id` where that is a plain one.

    Args:
        shows_id: put it into every answer.
    """

    def __init__(self, app: ASGIApp, metrics: IngressMetrics, clock: Clock, *, shows_id: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._shows_id = shows_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if CLIENTS_ID.fullmatch(given) else uuid.uuid4().hex
        arrived = self._clock()
        scope.setdefault("state", {}).update(request_id=request_id, arrived=arrived)
        status = CLIENT_CLOSED_REQUEST
        started = False

        async def send_named(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                started = True
                status = message["status"]
                if self._shows_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
                if client := scope["state"].get("client"):
                    MutableHeaders(scope=message).update(client.headers())
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            self._metrics.disconnects.inc()
        except asyncio.CancelledError:  # a server's other way to say so
            self._metrics.disconnects.inc()
            raise
        except Exception as error:
            if is_unexpected(error):
                logger.exception("request_failed request_id=%s path=%s", request_id, scope["path"])
            if started:
                raise
            await api_error(error).response()(scope, receive, send_named)
        finally:
            path = _route_path(scope)
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.latency.labels(path).observe(max(0.0, self._clock() - arrived))


def _route_path(scope: Scope) -> str:
    """The template of the path that was asked for, also where the request was refused before it was routed."""
    if (route := scope.get("route")) is not None:
        return route.path
    matching = (route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE)
    return getattr(next(matching, None), "path", "other")
