"""Who may use the service: keys that are known by their hashes, and what stands before every endpoint."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api_keys import hash_key
from app.config import ApiKey
from app.openai.errors import ApiError
from app.openai.rate_limits import Client
from engine.request import Clock

OPEN_PATHS = ("/health", "/ready", "/version", "/metrics")
"""What balancers, probes and scrapers ask, without a key and without a limit."""


class KeyRing:
    """The clients of one process, found by their keys. Its state is that of its clients: one event loop's.

    Args:
        keys: with distinct hashes.
        clock: of their limits.
        shares: how many processes share each limit.
        isolate_prefix_cache: no client shares cached prefixes with another.
    """

    def __init__(
        self, keys: Sequence[ApiKey], clock: Clock, *, shares: int = 1, isolate_prefix_cache: bool = False
    ) -> None:
        self._clients = {key.hash: (key.hash, Client.of(key, clock, shares, isolate_prefix_cache)) for key in keys}

    def client(self, authorization: str | None) -> Client:
        """Whose key an `authorization` header, or the metadata of that name, shows.

        A hash is looked up, and then compared in constant time: what the search in a table of hashes may tell by its
        time is about hashes of guesses, from which nobody gets nearer to a key.

        Raises:
            ApiError: 401, there is no key; 403, it is not known.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or not key.isprintable() or " " in key:
            problem = "the authorization header is not" if authorization else "an API key is needed:"
            raise ApiError(
                401,
                f"{problem} `Authorization: Bearer KEY`",
                code="missing_api_key" if not authorization else "malformed_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        # Servers decode headers as Latin-1; a text from elsewhere may have what that lacks.
        digest = hash_key(key.encode("utf-8" if max(key) > "\xff" else "latin-1"))
        found = self._clients.get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            raise ApiError(403, "the API key is not known to this service", code="unknown_api_key")
        return found[1]


class AccessControl:
    """ASGI middleware: finds a request's client, `state.client`, and holds it to its limits until the answer ends.

    Args:
        keys: None is a service that is open to everyone.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing | None, clock: Clock) -> None:
        self._app = app
        self._keys = keys
        self._everyone = Client("everyone", clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = self._everyone
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._keys is not None and path not in OPEN_PATHS:
            client = self._keys.client(Headers(scope=scope).get("authorization"))
        scope["state"]["client"] = client
        with client.request() as admission:
            scope["state"]["admission"] = admission
            await self._app(scope, receive, send)
