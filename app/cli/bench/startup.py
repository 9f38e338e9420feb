"""`manta bench startup`: from nothing to the first token, each time in a process of its own."""

from __future__ import annotations

import json as json_format
import subprocess
import sys
import time
from statistics import median
from typing import Annotated

import typer

from app.cli.bench.options import DType, Json, Model, Plot, Seed, Warmup, as_args, checked, engine_config
from app.cli.errors import fail
from engine.config import EngineConfig
from engine.sampling_params import InvalidParameter

CHILD = """
import json, sys
from engine import InvalidParameter, measure_startup
try:
    found = measure_startup(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))
except InvalidParameter as error:
    found = {"refused": error.param, "message": str(error)}
print(json.dumps(found))
"""


def startup(
    ctx: typer.Context,
    model: Model = "demo",
    num_iters: Annotated[int, typer.Option(min=1, help="Measured starts; the figures are their medians.")] = 5,
    warmup: Warmup = 1,
    dtype: DType = "auto",
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Start an engine in a new process and let it give one token; seconds of each phase.

    interpreter (Python itself), imports, config, kernels (built at the very first use), weights, kv_cache, tokenizer,
    first_token, rest. The warm-up fills the disk's cache and builds the kernels. Options not named here are arguments
    of the engine.

    --json: an object with command, version, machine, settings, roofline, and rounds and median: seconds of each phase,
    and total.
    """
    with checked((json,), plot):
        config = engine_config(ctx, model, dtype, seed)

        from app.cli.bench.report import show, show_efficiency, write_json
        from app.cli.bench.roofline import measure_machine
        from engine.hub import load_model_config

        machine = measure_machine(config, load_model_config(config).dtype)
        rounds = [_start(config) for _ in range(warmup + num_iters)][warmup:]
        middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
        rows = [
            [name.replace("_", " "), f"{value:.3f}", f"{min(each[name] for each in rounds):.3f}"]
            for name, value in middle.items()
        ]
        show(f"Start-up: seconds, {num_iters} starts", ("", "median", "best"), rows)
        show_efficiency(machine, {})
        write_json(json, "startup", ctx.params, config, machine, {"rounds": rounds, "median": middle})
        if plot is not None:
            from app.cli.bench.plot import plot_parts

            parts = {name: value for name, value in middle.items() if name != "total"}
            plot_parts(plot, "Start-up", "seconds", {config.model: parts})


def _start(config: EngineConfig) -> dict[str, float]:
    """Seconds of each phase of one start.

    Raises:
        InvalidParameter: as the engine does there.
    """
    command = [sys.executable, "-c", CHILD, config.model, json_format.dumps(as_args(config)), str(time.time())]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode != 0:
        raise fail("the engine did not start; its messages are above", 1)
    found = json_format.loads(child.stdout)
    if "refused" in found:
        raise InvalidParameter(found["refused"], found["message"])
    phases: dict[str, float] = found
    return {**phases, "total": sum(phases.values())}
