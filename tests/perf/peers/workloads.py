"""The work that every engine is given, and how its time is taken. Needs nothing but Python."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]
"""Completes prompts greedily by exactly so many tokens each."""


@dataclass(frozen=True)
class Workload:
    """Requests that come at once.

    Attributes:
        prefix: leading tokens that all prompts share.
        counts: `output` or `prompt`, the tokens that the figure counts.
    """

    requests: int
    prompt: int
    output: int
    prefix: int = 0
    counts: str = "output"

    def prompts(self, seed: int) -> Prompts:
        draw = random.Random(seed)
        shared = [draw.randrange(100, 40_000) for _ in range(self.prefix)]
        return [shared + [draw.randrange(100, 40_000) for _ in range(self.prompt)] for _ in range(self.requests)]


WORKLOADS = {
    "throughput_32x128x128": Workload(32, 128, 128),
    "single_128x128": Workload(1, 128, 128),
    "prefill_32x128": Workload(32, 128, 1, counts="prompt"),
    "long_8x1024x128": Workload(8, 1024, 128),
    "shared_prefix_32x(1024+32)x64": Workload(32, 32, 64, prefix=1024),
}


def process_started() -> float:
    """When this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    lines = Path("/proc/stat").read_text().splitlines()
    booted = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def measure(load: Callable[[str], Generate]) -> None:
    """Loads an engine, runs everything once and prints the figures as JSON: the body of each runner.

    Arguments of the process: the model's folder, and a seed, so that no run finds another one's prompts in a cache.
    """
    folder, seed = sys.argv[1], int(sys.argv[2])
    generate = load(folder)
    generate(Workload(1, 128, 1).prompts(seed), 1)
    figures = {"startup": time.time() - process_started()}
    generate(Workload(32, 64, 16).prompts(seed + 1), 16)
    for number, (name, work) in enumerate(WORKLOADS.items()):
        prompts = work.prompts(seed + 10 + number)
        started = time.perf_counter()
        generate(prompts, work.output)
        seconds = time.perf_counter() - started
        tokens = work.requests * (work.output if work.counts == "output" else work.prompt)
        figures[name] = tokens / seconds
    print("FIGURES " + json.dumps(figures), flush=True)
