"""What stands before Serve's proxy takes Ray's own headers away, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.http_util import configure_http_middlewares
from ray.serve.config import HTTPOptions
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from app import proxy


async def passed_on(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """What an application behind the middleware sees of the headers."""
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])

    scope = {"type": "http", "headers": list(headers)}
    (middleware,) = proxy.middlewares()
    await middleware.cls(app)(scope, None, None)  # type: ignore[arg-type]
    assert scope["headers"] == list(headers), "the server's own scope is changed"
    return seen


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-timeout-seconds",
        b"X-Request-Disconnect-Disabled",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed_model-id",
        b"x-session-id",
    ],
)
async def test_headers_that_serve_obeys_are_gone(name: bytes) -> None:
    kept = (b"x-request-id", b"mine"), (b"authorization", b"Bearer key")
    assert await passed_on(kept[0], (name, b"?1"), kept[1], (name, b"1")) == list(kept)


@pytest.mark.parametrize("value", [b"\xff", b"two words", b"x" * 129, b""])
async def test_request_id_that_is_no_plain_one_is_gone(value: bytes) -> None:
    kept = (b"accept", b"\xff")
    assert await passed_on((b"X-Request-Id", value), kept) == [kept]


async def test_other_headers_stay_in_order() -> None:
    headers = (b"accept", b"a"), (b"x-request-timeout", b"1"), (b"accept", b"b")
    assert await passed_on(*headers) == list(headers)


def test_serve_takes_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Serve reads the variable when it is imported.
    monkeypatch.setattr(f"ray.serve._private.http_util.{proxy.VARIABLE}", proxy.CALLBACK)
    options = configure_http_middlewares(HTTPOptions())
    assert [middleware.cls for middleware in options.middlewares] == [proxy.WithoutOrders]


def with_another() -> list[Middleware]:
    return [Middleware(GZipMiddleware), *proxy.middlewares()]


def without() -> list[Middleware]:
    return [Middleware(GZipMiddleware)]


@pytest.mark.parametrize(
    ("path", "installed"),
    [
        (proxy.CALLBACK, True),
        ("app.proxy.middlewares", True),
        (f"{__name__}:with_another", True),
        (f"{__name__}:without", False),
        ("app.proxy:nothing", False),
        ("nowhere", False),
        ("", False),
        (None, False),
    ],
)
def test_callback_that_puts_it_before_the_proxy_is_known_however_it_is_written(
    path: str | None, installed: bool
) -> None:
    assert proxy.is_installed({} if path is None else {proxy.VARIABLE: path}) is installed


def test_what_serve_obeys_is_what_is_taken_away() -> None:
    from ray.serve._private import constants

    names = (
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
        constants.SERVE_SESSION_ID,
    )
    assert {name.replace("_", "-").encode() for name in names} == proxy.OBEYED
