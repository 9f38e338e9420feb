"""The sampling options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

MODELS = "the model's"
"""What holds where an option is not given."""

Temperature = Annotated[float | None, typer.Option(help="0 takes the best token.", show_default=MODELS)]
TopP = Annotated[float | None, typer.Option(help="Keep the best tokens up to this probability.", show_default=MODELS)]
TopK = Annotated[int | None, typer.Option(help="Keep the k best tokens.", show_default=MODELS)]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="End where this text appears; may be repeated.")]
