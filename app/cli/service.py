"""How commands find a running service, and show it their key."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from engine.sampling_params import InvalidParameter

ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="MANTA_API_KEY", show_envvar=True, help="What the service wants as one."),
]


def service_url(url: str, option: str = "url") -> str:
    """The service's address, however it was written: with or without a scheme, with or without OpenAI's /v1.

    Args:
        option: where it was given, for the error.

    Raises:
        InvalidParameter: it is none.
    """
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parsed = urlsplit(url)
        _ = parsed.port
    except ValueError as error:
        raise InvalidParameter.of(option, url, f"is no address: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise InvalidParameter.of(option, url, "must be http:// or https:// and a host")
    if parsed.username is not None or parsed.password is not None:
        # It would be shown and written down with the address.
        raise InvalidParameter(option, f"{option}: must be an address without a user's name or password")
    return url
