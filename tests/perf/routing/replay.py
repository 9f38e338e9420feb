"""A trace over HTTP against real replicas, once with each router: `python -m tests.perf.routing.replay`.

In each round every router gets the replay, in turn, with fresh replicas: the product's application with small engines
of one thread each, which differs in its request router alone. The prompts are those of `manta bench routing`, so that
hit ratios can be compared with the simulation's; times are those of this machine, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from ray import serve

from app.cli.bench.report import show
from app.cli.bench.workload import trace_requests
from app.simulation.requests import at_rate, longest, num_distinct_blocks, num_prompt_tokens, simulated_requests
from app.simulation.routing import ideal_hit_ratio, setup_for
from engine import EngineRequest
from engine.hub import fetch_demo
from tests.perf.routing.routers import ROUTERS
from tests.perf.routing.turn import fleet, replay
from tests.tiny_model import write_tiny_model

CUT = Path(__file__).parents[2] / "data" / "mooncake_cut.jsonl"

MODEL_SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
"""Its layers have a quarter of the weights of the demo model's."""

Figures = dict[str, float]


def main(
    trace: Annotated[Path, typer.Option(help="Mooncake's .jsonl.")] = CUT,
    replicas: Annotated[int, typer.Option(min=2)] = 4,
    rate: Annotated[float, typer.Option(help="Prompt tokens that arrive in a second on average.")] = 8_000,
    cache_fraction: Annotated[
        float, typer.Option(help="KV blocks of all replicas together, over the trace's distinct blocks.")
    ] = 0.25,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Requests.", show_default="all of the trace")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each router.")] = 3,
    routers: Annotated[list[str] | None, typer.Option("--router", show_default="all")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Medians over the rounds, with the keys of `manta bench routing`."""
    requests = simulated_requests(trace_requests(trace, num_prompts))
    requests, num_left_out = within(requests, MODEL_SIZES["max_position_embeddings"])
    requests = at_rate(requests, rate)
    setup = setup_for(requests, num_replicas=replicas, cache_fraction=cache_fraction)
    print(
        f"{len(requests):,} requests ({num_left_out} that are longer than the model's context are left out), "
        f"{num_prompt_tokens(requests):,} prompt tokens, {num_distinct_blocks(requests):,} distinct blocks, "
        f"over {requests[-1].arrival_time:.1f} s\n{replicas} replicas of {setup.num_kv_blocks:,} KV blocks"
    )
    ideal = ideal_hit_ratio(requests, replicas * setup.num_kv_blocks)
    turns: dict[str, list[Figures]] = {name: [] for name in routers or ROUTERS}
    with tempfile.TemporaryDirectory() as folder, running_serve() as url:
        model = Path(folder)
        write_tiny_model(fetch_demo(), model, **MODEL_SIZES)
        for number in range(1, rounds + 1):
            for name, each in turns.items():
                with fleet(name, model, setup):
                    each.append(asyncio.run(replay(requests, setup, url)).figures)
                print(f"round {number} of {rounds}: {name} {each[-1]}", file=sys.stderr)
    policies = summarise(turns)
    table(policies, ideal)
    if json_file is not None:
        settings = {
            "trace": trace.name,
            "requests": len(requests),
            "replicas": replicas,
            "kv_blocks_per_replica": setup.num_kv_blocks,
            "rate": rate,
            "rounds": rounds,
        }
        result: dict[str, Any] = {"settings": settings, "ideal_hit_ratio": ideal, "policies": policies}
        json_file.write_text(json.dumps(result, indent=2) + "\n")


def within(requests: Sequence[EngineRequest], max_model_len: int) -> tuple[list[EngineRequest], int]:
    """Those that are shorter than a model's context, from the first one's arrival on, and how many others there are."""
    fitting = [request for request in requests if longest([request]) < max_model_len]
    first = fitting[0].arrival_time
    result = [replace(each, arrival_time=each.arrival_time - first) for each in fitting]
    return result, len(requests) - len(result)


@contextmanager
def running_serve() -> Iterator[str]:
    """Serve on a cluster of its own in this process; where its proxy listens, on this machine alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # More logical CPUs than there are: the replicas share the real ones.
    ray.init("local", num_cpus=64, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def summarise(turns: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Medians, by router."""
    return {
        name: {key: statistics.median(figures[key] for figures in each) for key in each[0]}
        for name, each in turns.items()
    }


def table(policies: Mapping[str, Figures], ideal: float) -> None:
    rows = [
        [
            name.replace("_", " "),
            f"{each['hit_ratio']:.3f}",
            f"{100 * each['hit_ratio'] / ideal:.0f} %",
            *(f"{1e3 * each[f'ttft_{point}']:.0f}" for point in ("p50", "p99")),
            f"{each['imbalance']:.2f}",
        ]
        for name, each in policies.items()
    ]
    columns = ("", "hit ratio", "of the ideal", "TTFT p50, ms", "TTFT p99, ms", "imbalance")
    show(f"Routing over HTTP: the ideal hit ratio is {ideal:.3f}", columns, rows)


if __name__ == "__main__":
    typer.run(main)
