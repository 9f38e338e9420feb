"""Traces of real services: who asked when, with how long a prompt, and which of them began alike."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from engine.sampling_params import InvalidParameter


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
            except ValueError as error:
                raise InvalidParameter("file", f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise InvalidParameter("file", f"{path}, line {number}: must be an object")
            yield number, row


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    for number, row in json_lines(path):
        try:
            ids = tuple(int(each) for each in row["hash_ids"])
            arrival = float(row["timestamp"]) / 1000
            request = TraceRequest(arrival, max(int(row["input_length"]), 1), max(int(row["output_length"]), 1), ids)
            is_sound = bool(ids) and min(ids) >= 0 and math.isfinite(arrival)
        except (KeyError, TypeError, ValueError, OverflowError):
            is_sound = False
        if not is_sound:
            raise InvalidParameter("trace", f"{path}, line {number}: is no request of a Mooncake trace")
        yield request


def _azure(path: Path) -> Iterator[TraceRequest]:
    first: datetime | None = None
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                # Its fractions have seven digits, one more than Python reads; a zone would come after them.
                time = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=None)
                lengths = max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1)
            except (KeyError, TypeError, ValueError):
                raise InvalidParameter("trace", f"{path}, line {number}: is no request of an Azure trace") from None
            first = first or time
            yield TraceRequest((time - first).total_seconds(), *lengths)
