"""Manta beside its peers on this machine: python -m tests.perf.peers [--json FILE] [--rounds N] [--only NAME ...]

Each engine lives in a virtual environment of its own under the cache folder, made at first use. Every engine is started
once for warm caches; then engines take turns, one process a turn, so that the drift of the machine meets all of them
alike. The figures are medians over the rounds. A peer that cannot be installed or fails is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tests.perf.peers.environments import HERE, prepare
from tests.perf.peers.workloads import WORKLOADS

TURN_SECONDS = 900
PEERS = ("openvino", "vllm", "transformers")
ENGINES = ("manta", *PEERS)

Figures = dict[str, float]
"""tokens/s by workload, and seconds of `startup`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.peers", description="Manta beside its peers on a CPU.")
    parser.add_argument("--json", type=Path, help="where the medians and ratios go")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS), help="these peers alone")
    options = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    result = summarise(compare(["manta", *options.only], options.rounds, console))
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def compare(engines: list[str], rounds: int, console: Console) -> dict[str, list[Figures]]:
    """The figures of all turns, by engine; without the peers that failed.

    Raises:
        subprocess.SubprocessError, OSError, RuntimeError: Manta itself failed.
    """
    places: dict[str, tuple[Path, Path]] = {}
    turns: dict[str, list[Figures]] = {name: [] for name in engines}
    for turn in range(-1, rounds):
        for name in list(turns):
            started = time.perf_counter()
            try:
                if turn < 0:
                    places[name] = prepare(name, console.print)
                    run(name, *places[name], seed=0, workloads=[])
                else:
                    turns[name].append(run(name, *places[name], seed=100 * (turn + 1), workloads=list(WORKLOADS)))
            except (subprocess.SubprocessError, OSError, RuntimeError) as error:
                if name == "manta":
                    raise
                del turns[name]
                console.print(f"{name} is left out: {error}", style="red", markup=False)
                continue
            what = f"round {turn + 1} of {rounds}" if turn >= 0 else "warm-up"
            console.print(f"{what}: {name}, {time.perf_counter() - started:.0f} s")
    return turns


def run(name: str, python: Path, model: Path, *, seed: int, workloads: list[str]) -> Figures:
    """Runs workloads on an engine in a process of their own; `-E`, for no engine may import from another's folders."""
    done = subprocess.run(
        [str(python), "-E", str(HERE / f"run_{name}.py"), str(model), str(time.time()), str(seed), *workloads],
        capture_output=True,
        text=True,
        timeout=TURN_SECONDS,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return json.loads(line.removeprefix("FIGURES "))
    raise RuntimeError(f"it ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def summarise(turns: dict[str, list[Figures]]) -> dict[str, dict[str, float | None]]:
    """Medians by workload and engine, and Manta's ratio to the best of the others: over 1 is better, for start-up too.

    None stands for what was not measured.
    """
    result: dict[str, dict[str, float | None]] = {}
    for work in (*WORKLOADS, "startup"):
        medians = {name: statistics.median(figures[work] for figures in each) for name, each in turns.items()}
        others = [value for name, value in medians.items() if name != "manta"]
        ratio = None
        if others:
            ratio = min(others) / medians["manta"] if work == "startup" else medians["manta"] / max(others)
        result[work] = {name: medians.get(name) for name in ENGINES} | {"ratio_to_best_peer": ratio}
    return result


def show(result: dict[str, dict[str, float | None]]) -> None:
    table = Table(title="tokens/s; start-up in seconds", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", *ENGINES, "ratio"):
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    for work, row in result.items():
        digits = {"ratio_to_best_peer": 2} | dict.fromkeys(ENGINES, 1 if work == "startup" else 0)
        cells = ["" if value is None else f"{value:,.{digits[column]}f}" for column, value in row.items()]
        table.add_row(work, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
