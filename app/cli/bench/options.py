"""The options that the benchmarks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.engine_args import engine_args
from app.cli.errors import user_errors
from engine.config import EngineConfig
from engine.sampling_params import InvalidParameter

Model = Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a hub id.")]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Seed = Annotated[int, typer.Option(help="Of the random prompts and of dummy weights.")]
Input = Annotated[
    str,
    typer.Option(
        help='random, or a .jsonl file with rows of {"prompt": …} or {"turns": […]}, whose first turn counts.'
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Lengths and shared prefixes of real requests: Mooncake's .jsonl or Azure's .csv."),
]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")]
OutputLen = Annotated[
    int | None, typer.Option(min=1, help="Tokens of each output.", show_default="128, or the trace's")
]
SharedPrefix = Annotated[
    int, typer.Option(min=0, help="Tokens that all random prompts begin with, before their --input-len own ones.")
]
Warmup = Annotated[int, typer.Option(min=0, help="Rounds before those that are measured.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
Plot = Annotated[Path | None, typer.Option(help="Draw them here (.png, .svg, .pdf); needs matplotlib.")]


def engine_config(ctx: typer.Context, model: str, dtype: str, seed: int) -> EngineConfig:
    """The config of a benchmark's engine, with the arguments that the command line has for it.

    Raises:
        InvalidParameter: see `engine_args` and EngineConfig.
    """
    args, others = engine_args(ctx, ctx.args)
    if others:
        raise InvalidParameter("options", f"{others[0]!r} is not an option")
    return EngineConfig.from_args(model, {"dtype": dtype, "seed": seed, **args})


def as_args(config: EngineConfig) -> dict[str, Any]:
    """All fields of a config but its model."""
    return {each.name: getattr(config, each.name) for each in fields(config) if each.name != "model"}


@contextmanager
def checked(files: Iterable[Path | None], plot: Path | None) -> Iterator[None]:
    """Ends the command in one line where its user can mend something; what a run could not write is told before it.

    Nothing is left of the attempt: files appear when the run has something to write.
    """
    with user_errors():
        for file in (*files, plot):
            if file is not None:
                is_new = not file.exists()
                file.open("a").close()
                if is_new:
                    file.unlink()
        if plot is not None:
            from app.cli.bench.plot import check_available

            check_available(plot)
        yield


def positive_numbers(name: str, text: str) -> list[int]:
    """Of an option that takes several, as `1,32,256`.

    Raises:
        InvalidParameter: one is no number, or below 1.
    """
    numbers = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(numbers) != text.count(",") + 1 or min(numbers) < 1:
        raise InvalidParameter.of(name, text, "must be whole numbers, 1 or more, with commas between them")
    return numbers
