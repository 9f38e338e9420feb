"""`manta bench`: how fast an engine is here, how near to what this machine can do, how fast a service or a fleet is."""

from __future__ import annotations

import typer

from app.cli.bench.autoscaling import autoscaling
from app.cli.bench.latency import latency
from app.cli.bench.routing import routing
from app.cli.bench.serve import serve
from app.cli.bench.startup import startup
from app.cli.bench.step import step
from app.cli.bench.throughput import throughput
from app.cli.engine_args import TAKES_ENGINE_ARGS

bench = typer.Typer(no_args_is_help=True, help="Measure this machine's engine, a service, or a simulated fleet.")


@bench.callback()
def options() -> None:
    """Measure this machine's engine, a service, or a simulated fleet.

    A command that runs an engine prints what the machine can do and how near the run comes to it. Options that such a
    command does not name are arguments of the engine, such as --max-num-seqs 64 or --no-enable-prefix-caching.
    """


for command in (throughput, latency, startup, step):
    bench.command(command.__name__, context_settings=TAKES_ENGINE_ARGS)(command)
bench.command("serve")(serve)
bench.command("routing")(routing)
bench.command("autoscaling")(autoscaling)
