"""The command `manta`."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.bench.main import bench
from app.cli.chat import chat
from app.cli.check import check
from app.cli.engine_args import TAKES_ENGINE_ARGS
from app.cli.generate import generate
from app.cli.keys import keys
from app.cli.models import models
from app.cli.serve import serve
from app.version import manta_version

app = typer.Typer(
    name="manta",
    help="Language models served from your own Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.add_typer(models, name="models")
app.command("chat")(chat)
app.command("check")(check)
app.command("generate", context_settings=TAKES_ENGINE_ARGS)(generate)
app.command("serve")(serve)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"manta {manta_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Language models served from your own Ray cluster."""
