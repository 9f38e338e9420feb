"""How commands find a running service, and show it their key."""

from __future__ import annotations

from typing import Annotated

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
    import httpx

    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidParameter.of(option, url, f"is no address: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidParameter.of(option, url, "must be http:// or https:// and a host")
    return url
