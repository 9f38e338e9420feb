"""`manta models`."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.errors import user_errors

models = typer.Typer(no_args_is_help=True, help="Models on this machine.")


@models.callback()
def options() -> None:
    """Models on this machine."""


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(help="demo, or a hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
) -> None:
    """Put a model into the cache, if it is not there, and print its folder."""
    from engine.hub import resolve_model

    with user_errors():
        typer.echo(resolve_model(name, revision))
