"""`manta keys`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from app.cli.errors import fail

keys = typer.Typer(no_args_is_help=True, help="API keys of a service.")


@keys.callback()
def options() -> None:
    """API keys of a service."""


@keys.command()
def new(name: Annotated[str, typer.Argument(help="Whose key it is; errors name it.")]) -> None:
    """Make a key and print it, this once, and below it the line that makes a service know it."""
    from app.api_keys import key_line, new_key
    from app.config import KEY_NAME

    if not re.fullmatch(KEY_NAME, name):
        raise fail(f"{name!r}: a name has 1 to 64 letters, digits, and . _ -")
    key = new_key()
    typer.echo("for its owner, shown only now:", err=True)
    typer.echo(key)
    typer.echo("for the file that `access.keys_file` names:", err=True)
    typer.echo(key_line(name, key))
