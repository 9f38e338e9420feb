"""What a benchmark tells: tables on the screen, figures in a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from app.version import manta_version

if TYPE_CHECKING:
    from app.cli.bench.roofline import Machine
    from engine.config import EngineConfig

PERCENTILES = (10, 25, 50, 75, 90, 99)

WIDTH = 10_000
"""Characters that a table may take: all it needs, since a number that is cut says something else."""

FASTER = (
    "Above 100 %: the machine was faster during the run than when it was measured, or its caches held what was read."
)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table, wider than the terminal where its cells are; floats are shown to three digits."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(number(each) if isinstance(each, float | int) else str(each) for each in row))
    Console(highlight=False, width=WIDTH).print(table)


def show_efficiency(machine: Machine, efficiency: Mapping[str, Mapping[str, float]]) -> None:
    """The machine, and how near each kind of step came to it."""
    rows: list[list[object]] = [
        ["the machine", "", machine.gb_per_s, "", machine.gflop_per_s, "", ""],
    ]
    for kind, each in efficiency.items():
        rows.append(
            [
                kind,
                int(each["steps"]),
                each["gb_per_s"],
                f"{each['gb_per_s_percent']:.0f} %",
                each["gflop_per_s"],
                f"{each['gflop_per_s_percent']:.0f} %",
                f"{each['roofline_percent']:.0f} %",
            ]
        )
    title = (
        f"Roofline: {machine.device}, {machine.dtype}, threads: {machine.threads}, "
        f"load average before: {machine.load_average:.1f}"
    )
    show(title, ("", "steps", "GB/s", "of it", "GFLOP/s", "of it", "of the roofline"), rows)
    if any(each[f"{name}_percent"] > 100 for each in efficiency.values() for name in ("gb_per_s", "gflop_per_s")):
        typer.echo(FASTER)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """mean and p10 … p99; nothing of nothing."""
    import numpy as np

    if not len(values):
        return {}
    points = np.percentile(values, PERCENTILES)
    return {"mean": float(np.mean(values))} | {
        f"p{p}": float(point) for p, point in zip(PERCENTILES, points, strict=True)
    }


def write_json(
    path: Path | None,
    command: str,
    options: Mapping[str, Any],
    config: EngineConfig,
    machine: Machine,
    figures: Mapping[str, Any],
) -> None:
    """A report of an engine in this process."""
    settings = {**options, "engine": asdict(config)}
    write_report(path, command, settings, {"roofline": asdict(machine), **figures})


def write_report(path: Path | None, command: str, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """One object: what ran, where, and the figures. Nothing where there is no path."""
    if path is None:
        return
    report = {
        "command": command,
        "version": manta_version(),
        "machine": _machine(),
        "settings": settings,
        **figures,
    }
    path.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")


def number(value: float) -> str:
    """1,234 or 12.3 or 0.123; whole numbers without a fraction."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
