"""Traces of real services: who asked when, with how long a prompt, and which of them began alike."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from engine.sampling_params import InvalidParameter

MOONCAKE_BLOCK = 512
"""Tokens that one of a Mooncake trace's hash_ids stands for."""

MOST_TOKENS = 10_000_000
"""In one prompt or output; no model takes as many."""

MOST_SECONDS = 100 * 365 * 86_400.0
"""That a request may come after, or before, the moment that times are counted from."""


class TraceRequest(NamedTuple):
    """A request as a trace has it.

    Attributes:
        arrival_s: seconds, from a moment that is the same for all of the trace.
        prompt_len, output_len: tokens, 1 or more.
        hash_ids: one for each block of a prompt's tokens, the last of which may not be full; equal ids mean an equal
            prefix. None where a trace has none.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] | None = None


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a file, in its order.

    A .csv is Azure's (TIMESTAMP, ContextTokens, GeneratedTokens), a .jsonl is Mooncake's (timestamp in ms,
    input_length, output_length, hash_ids of 512 tokens each).

    Raises:
        InvalidParameter: a line is not what the format says.
        OSError: the file cannot be read.
    """
    return _azure(path) if path.suffix == ".csv" else _mooncake(path)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file that has one a line, with the numbers of their lines.

    Raises:
        InvalidParameter: a line is something else.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidParameter("file", f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise InvalidParameter("file", f"{path}, line {number}: must be an object")
            yield number, row


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    for number, row in json_lines(path):
        try:
            request = _MooncakeLine.model_validate(row)
        except ValidationError as error:
            problem = error.errors()[0]
            what = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            told = f"{path}, line {number}: is no request of a Mooncake trace: {what}"
            raise InvalidParameter("trace", told) from None
        lengths = max(request.input_length, 1), max(request.output_length, 1)
        yield TraceRequest(request.timestamp / 1000, *lengths, request.hash_ids)


Length = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class _MooncakeLine(BaseModel, strict=True, extra="ignore"):
    timestamp: Annotated[float, Field(ge=-1000 * MOST_SECONDS, le=1000 * MOST_SECONDS, allow_inf_nan=False)]
    input_length: Length
    output_length: Length
    hash_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)]


def _azure(path: Path) -> Iterator[TraceRequest]:
    first: datetime | None = None
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        for number in count(2):
            try:
                row = next(rows)
                # Its fractions have seven digits, one more than Python reads; a zone would come after them.
                time = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=None)
                lengths = [int(row[name]) for name in ("ContextTokens", "GeneratedTokens")]
                first = first or time
                arrival_s = (time - first).total_seconds()
                is_sound = min(lengths) >= 0 and max(lengths) <= MOST_TOKENS and abs(arrival_s) <= MOST_SECONDS
            except StopIteration:
                return
            except (KeyError, TypeError, ValueError, csv.Error):
                is_sound = False
            if not is_sound:
                raise InvalidParameter("trace", f"{path}, line {number}: is no request of an Azure trace")
            yield TraceRequest(arrival_s, max(lengths[0], 1), max(lengths[1], 1))
