"""`python -m tests.faults`: plays the fault matrix, prints its table, and exits 1 if a row is wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.hub import fetch_demo
from tests.faults.matrix import FAULTS, Fault
from tests.faults.play import Row, play, undisturbed
from tests.faults.service import Service, started
from tests.tiny_model import write_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", metavar="TEXT", default="", help="play the faults whose name has this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(fetch_demo(), Path(folder))
        with started(Path(folder)) as service:
            rows = asyncio.run(_play([fault for fault in FAULTS if options.only in fault.name], service))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(rows))
    wrong = {problem: None for row in rows for problem in row.problems}
    for problem in wrong:
        console.print(problem, markup=False, highlight=False)
    return 1 if wrong else 0


async def _play(faults: list[Fault], service: Service) -> list[Row]:
    reference = await undisturbed(service)
    rows: list[Row] = []
    for fault in faults:
        began = time.monotonic()
        rows += await play(service, fault, reference)
        print(f"{fault.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return rows


def _table(rows: list[Row]) -> Table:
    table = Table("fault", "stream", "its client", "others", "pause s", "whole again s", "")
    for row in rows:
        table.add_row(
            row.fault,
            "yes" if row.streaming else "no",
            row.client,
            row.neighbours,
            _seconds(row.pause_s),
            _seconds(row.whole_again_s),
            "wrong" if row.problems else "right",
        )
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
