"""The questions of MT-Bench that tests ask."""

from __future__ import annotations

import json
from pathlib import Path


def questions(count: int) -> list[str]:
    """First turns, in the order of the file."""
    lines = (Path(__file__).parent / "data" / "mt_bench_20.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]
