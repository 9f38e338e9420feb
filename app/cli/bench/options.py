"""The options that the benchmarks share, and the engine's arguments among the others."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

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


def engine_args(rest: list[str]) -> dict[str, Any]:
    """Arguments of the engine, from what a command line has beside the command's own options.

    Args:
        rest: `--max-num-seqs 64`, `--max-num-seqs=64`, `--debug-integrity`, `--no-enable-prefix-caching`.

    Raises:
        InvalidParameter: one is unknown, lacks its value or has one of another type.
    """
    types_of = get_type_hints(EngineConfig)
    args: dict[str, Any] = {}
    words = iter(rest)
    for word in words:
        if not word.startswith("--"):
            raise InvalidParameter("options", f"{word!r} is not an option")
        name, given, text = word[2:].partition("=")
        name = name.replace("-", "_")
        positive = name.removeprefix("no_")
        if types_of.get(positive) in (bool, bool | None) and not given:
            args[positive] = positive == name
        elif name not in types_of:
            EngineConfig.from_args("demo", {name: None})  # refuses it, and names those it knows
        else:
            args[name] = _value(name, text if given else next(words, None), types_of[name])
    return args


def engine_config(model: str, dtype: str, seed: int, rest: list[str], **defaults: Any) -> EngineConfig:
    """The config of a benchmark's engine.

    Args:
        defaults: what the benchmark itself wants, unless the command line says otherwise.

    Raises:
        InvalidParameter: see `engine_args` and EngineConfig.
    """
    return EngineConfig.from_args(model, {**defaults, "dtype": dtype, "seed": seed, **engine_args(rest)})


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


def _value(name: str, text: str | None, kind: Any) -> Any:
    if text is None:
        raise InvalidParameter(name, f"{name}: its value is missing")
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in options:
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                raise InvalidParameter.of(name, text, "must be a number") from None
        if option is bool:
            raise InvalidParameter(name, f"{name}: takes no value; write --{name} or --no-{name}".replace("_", "-"))
        if option is str or get_origin(option) is Literal:
            return text
    raise AssertionError(f"an engine argument of type {kind}")
