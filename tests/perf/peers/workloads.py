"""The work that every engine is given, and how its time is taken. Needs nothing but Python."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]
"""Completes prompts greedily by exactly so many tokens each."""


@dataclass(frozen=True)
class Workload:
    """Requests that come at once.

    Attributes:
        prompt: random tokens of each prompt, after the prefix.
        output: tokens that each request is to be given.
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


def measure(load: Callable[[str], Generate]) -> None:
    """Loads an engine, runs workloads once each and prints the figures as JSON: the body of each runner.

    Arguments of the process: the model's folder; when the process was started, in seconds since the epoch; a seed, so
    that each round has prompts of its own; the names of the workloads.
    """
    folder, launched, seed, *names = sys.argv[1:]
    generate = load(folder)
    generate(Workload(1, 128, 1).prompts(int(seed)), 1)
    figures = {"startup": time.time() - float(launched)}
    if names:
        generate(Workload(32, 64, 16).prompts(int(seed) + 1), 16)
    for number, name in enumerate(names, start=2):
        work = WORKLOADS[name]
        # A seed of its own, for no workload may find the prompts of the one before it in a cache.
        prompts = work.prompts(int(seed) + number)
        started = time.perf_counter()
        generate(prompts, work.output)
        seconds = time.perf_counter() - started
        figures[name] = work.requests * (work.output if work.counts == "output" else work.prompt) / seconds
    print("FIGURES " + json.dumps(figures), flush=True)
