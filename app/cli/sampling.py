"""The sampling options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[float | None, typer.Option(help="0 takes the best token. [default: the model's]")]
TopP = Annotated[float | None, typer.Option(help="Keep the best tokens up to this probability.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k best tokens.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="End where this text appears; may be repeated.")]
