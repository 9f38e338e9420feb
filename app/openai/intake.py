"""Whether an ingress takes requests, and how many it still serves: what a service that ends needs to know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from app.openai.auth import OPEN_PATHS
from app.openai.errors import ApiError

RETRY_AFTER_S = 5
"""When a client is told to come again; where it goes to another service it need not wait."""


class Intake:
    """The requests of one process. Lives on one event loop.

    Attributes:
        closed: whether new requests are refused.
        in_flight: requests that are being served.
    """

    def __init__(self) -> None:
        self.closed = False
        self.in_flight = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def close(self) -> None:
        """Refuses all that come from now on; those that are there go on."""
        self.closed = True

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request while it is served.

        Raises:
            ApiError: 503, no more are taken.
        """
        if self.closed:
            headers = {"retry-after": str(RETRY_AFTER_S)}
            raise ApiError(503, "the service is shutting down", code="shutting_down", headers=headers)
        self.in_flight += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._empty.set()

    async def drained(self, wait_s: float) -> int:
        """What is in flight once nothing is, or so many seconds later."""
        try:
            async with asyncio.timeout(wait_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self.in_flight


class Gate:
    """ASGI middleware: requests pass while the intake is open. auth.OPEN_PATHS pass always, and do not count."""

    def __init__(self, app: ASGIApp, intake: Intake) -> None:
        self._app = app
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        with self._intake.request():
            await self._app(scope, receive, send)
