"""What Manta puts in front of Ray Serve's HTTP proxy.

Serve's proxy obeys headers that any client may send: how long a request may take, whether it goes on when its client
has gone, which replica of the ingress gets it. The proxy takes its middleware from the environment alone:

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.proxy:middlewares
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "app.proxy:middlewares"

OBEYED = frozenset(
    (
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"serve-multiplexed-model-id",
        b"x-session-id",
    )
)
"""Headers that Serve takes orders from, `_` being the same as `-`; x-request-id, which only names a request, stays."""


class WithoutOrders:
    """ASGI middleware: a request without the headers that Serve obeys. On the path of every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if headers := scope.get("headers"):
            kept = [header for header in headers if header[0].lower().replace(b"_", b"-") not in OBEYED]
            if len(kept) != len(headers):
                scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve's proxy calls when it starts."""
    return [Middleware(WithoutOrders)]
