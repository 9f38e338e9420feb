"""Arguments of the engine on the command line: the options that a command does not know itself."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from engine.config import EngineConfig
from engine.sampling_params import InvalidParameter

TAKES_ENGINE_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The context settings of a command that hands such options to `engine_args`."""

OPTION = re.compile(r"(--?[a-z][\w-]*)(?:=(.*))?", re.IGNORECASE | re.DOTALL)
"""What counts as an option; other words may well begin with a dash, as the items of a list do."""


def engine_args(ctx: typer.Context, words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Arguments of the engine, from what a command line has beside the command's own options; and the other words.

    Args:
        ctx: of the command, whose own options may have been meant by a mistyped one.
        words: `--max-num-seqs 64`, `--max-num-seqs=64`, `--debug-integrity`, `--no-enable-prefix-caching`.

    Raises:
        InvalidParameter: an option is unknown, lacks its value or has one of another type.
    """
    types_of = get_type_hints(EngineConfig)
    args: dict[str, Any] = {}
    others = []
    rest = iter(words)
    for word in rest:
        found = OPTION.fullmatch(word)
        if found is None:
            others.append(word)
            continue
        option, text = found.groups()
        name = option.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        if types_of.get(positive) in (bool, bool | None) and text is None:
            args[positive] = positive == name
        elif name in types_of:
            args[name] = _value(name, next(rest, None) if text is None else text, types_of[name])
        else:
            raise _unknown(option, ctx, types_of)
    return args, others


def _unknown(option: str, ctx: typer.Context, of_engine: Iterable[str]) -> InvalidParameter:
    engine_options = [_option(name) for name in of_engine]
    known = [*(each for parameter in ctx.command.params for each in parameter.opts), *engine_options]
    near = get_close_matches(option, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"those of the engine are {', '.join(engine_options)}"
    return InvalidParameter(option, f"unknown option {option}; {hint}")


def _option(name: str) -> str:
    return f"--{name}".replace("_", "-")


def _value(name: str, text: str | None, kind: Any) -> Any:
    if text is None:
        raise InvalidParameter(name, f"{_option(name)}: its value is missing")
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in options:
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                raise InvalidParameter.of(name, text, "must be a number") from None
        if option is bool:
            raise InvalidParameter(
                name, f"{_option(name)}: takes no value; write --{name} or --no-{name}".replace("_", "-")
            )
        if option is str or get_origin(option) is Literal:
            return text
    raise AssertionError(f"an engine argument of type {kind}")
