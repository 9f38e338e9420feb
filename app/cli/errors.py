"""What a user can mend is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from engine.demo_model import FetchError
from engine.sampling_params import InvalidParameter

USER_ERROR = 2


def fail(message: str, code: int = USER_ERROR) -> typer.Exit:
    """Says what is wrong on stderr; the exit is for the caller to raise."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Ends the command with one line and exit code 2 for what its user can mend; anything else is a traceback."""
    try:
        yield
    except (InvalidParameter, FetchError) as error:
        raise fail(str(error)) from None
    except UnicodeDecodeError as error:
        raise fail(f"the file is not UTF-8: {error}") from None
    except OSError as error:
        raise fail(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
