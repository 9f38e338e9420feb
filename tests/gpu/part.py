"""Runs checks of one part in a process of their own: python -m tests.gpu.part PART OPTIONS.

A kernel that faults takes the CUDA context, and so its process, with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

import torch

from tests.gpu.check import Check, Setup
from tests.gpu.report import RowFile, attempt, line_of

PARTS = ("kernels", "engine", "figures")
"""Each is a module of this folder with a dict CHECKS."""


def checks_of(part: str) -> dict[str, Check]:
    checks: dict[str, Check] = importlib.import_module(f"tests.gpu.{part}").CHECKS
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.part")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--checks", type=json.loads, required=True, help="names, as JSON")
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()

    deadline = time.monotonic() + options.seconds
    setup = Setup(torch.device(options.device), options.tiny, options.folder, lambda: deadline - time.monotonic())
    rows = RowFile(options.rows)
    checks = checks_of(options.part)
    for name in options.checks:
        started = time.monotonic()
        rows.begin(name)
        for row in attempt(name, checks[name], setup):
            rows.add(name, row)
            if row.ok is not True:
                print(f"{options.part}: {line_of(row)}", flush=True)
        rows.end(name, time.monotonic() - started)
        print(f"{options.part}: {name} took {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
