"""What Manta puts in front of Ray Serve's HTTP proxy.

Serve's proxy obeys headers that any client may send: how long a request may take, whether it goes on when its client
has gone, which replica of the ingress gets it. The proxy takes its middleware from the environment alone:

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.proxy:middlewares
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pkgutil import resolve_name

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

_ID = re.compile(rb"[\x21-\x7e]{1,128}")
"""What an ingress takes as a client's name for its request; Serve fails where it cannot decode one."""


class WithoutOrders:
    """ASGI middleware: a request without the headers that Serve obeys. On the path of every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if headers := scope.get("headers"):
            kept = [header for header in headers if _is_kept(*header)]
            if len(kept) != len(headers):
                scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)


def _is_kept(name: bytes, value: bytes) -> bool:
    name = name.lower().replace(b"_", b"-")
    return name not in OBEYED and (name != b"x-request-id" or _ID.fullmatch(value) is not None)


def middlewares() -> list[Middleware]:
    """What Serve's proxy calls when it starts."""
    return [Middleware(WithoutOrders)]


def is_installed(environment: Mapping[str, str]) -> bool:
    """Whether Serve's proxy, with this environment, puts WithoutOrders before itself, be it among others."""
    try:
        return any(each.cls is WithoutOrders for each in resolve_name(environment[VARIABLE])())
    except Exception:  # of whichever kind: the callback is the operator's
        return False
