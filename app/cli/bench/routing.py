"""`manta bench routing`: what a router makes of a fleet, on a virtual clock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.bench.options import Json, Plot, checked
from engine.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.simulation.routing import RoutingSetup
    from app.simulation.step_cost import StepCost
    from engine import EngineRequest

Fit = Annotated[
    Path | None, typer.Option(help="Take the three constants from this file, which `manta bench step --json` wrote.")
]
StepMs = Annotated[float, typer.Option(help="Milliseconds of a step, whatever is in it.")]
PrefillRate = Annotated[float, typer.Option(help="Tokens per second that a step computes beside that.")]
Bandwidth = Annotated[float, typer.Option(help="TB/s at which it reads KV blocks, 2 MiB each.")]


def routing(
    ctx: typer.Context,
    trace: Annotated[
        Path, typer.Option(help="Mooncake's .jsonl, or Azure's .csv, whose prompts have nothing in common.")
    ],
    replicas: Annotated[int, typer.Option(min=1, max=1000, help="How many there are.")] = 16,
    load: Annotated[
        float, typer.Option(help="Prompt tokens that arrive, over what all replicas could compute without a cache.")
    ] = 0.8,
    cache_fraction: Annotated[
        float, typer.Option(help="KV blocks of all replicas together, over the trace's distinct blocks.")
    ] = 0.25,
    ingresses: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="Processes that route, which know of each other's requests from replicas alone."
        ),
    ] = 1,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Requests.", show_default="all of the trace")] = None,
    step_ms: StepMs = 5.0,
    prefill_rate: PrefillRate = 50_000.0,
    bandwidth: Bandwidth = 4.0,
    fit: Fit = None,
    seed: Annotated[int, typer.Option(help="Of the routers' random choices.")] = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Replay a trace against simulated replicas, once with each router, and compare hit ratios and times.

    Lengths are divided by 32: a trace's block of 512 tokens is one KV block of 16. Arrivals keep their bursts, and are
    stretched to --load. A replica is a real engine core, with the engine's defaults, whose steps take a + b * tokens +
    c * KV blocks read; the constants are those of an H200 class unless given or fitted. Times are those of this scaled
    world, from a request's arrival to the end of the step that gave its first token.

    Routers: round_robin; power_of_two and least_loaded, by ongoing requests; session_hashing, by the first block that
    not more than a tenth of all prompts have; prefix_cache is Manta's own. The ideal is one cache of the same total
    size, with the requests one after another.

    --json: an object with command, version, machine, settings, fleet (what was simulated), ideal_hit_ratio, and
    policies: a router's name to hit_ratio, ttft_mean, ttft_p50, ttft_p90, ttft_p99 (seconds), imbalance (prompt tokens
    computed by the replica that computed most, over the mean), prefill_utilisation (prompt tokens computed, over what
    the replicas could have) and seconds (from the first arrival to the last token).
    """
    with checked((json,), plot):
        from app.cli.bench.report import write_report
        from app.cli.bench.workload import trace_requests
        from app.simulation.requests import at_rate, simulated_requests
        from app.simulation.routing import ideal_hit_ratio, setup_for

        for name, value in (("load", load), ("cache_fraction", cache_fraction)):
            _check_positive(name, value)
        if cache_fraction > replicas:
            rule = f"must be at most {replicas}, with which each replica holds all of them"
            raise InvalidParameter.of("cache_fraction", cache_fraction, rule)
        cost = _fitted_cost(ctx, fit) if fit is not None else _step_cost(step_ms, prefill_rate, bandwidth)
        requests = simulated_requests(trace_requests(trace, num_prompts))
        setup = setup_for(
            requests,
            num_replicas=replicas,
            cache_fraction=cache_fraction,
            num_ingresses=ingresses,
            cost=cost,
            seed=seed,
        )
        requests = at_rate(requests, load * replicas * setup.prefill_rate)
        typer.echo(_introduction(requests, setup))
        ideal = ideal_hit_ratio(requests, replicas * setup.num_kv_blocks)
        replays = _replays(requests, setup)
        policies = {name: figures for name, (figures, _) in replays.items()}
        _show(policies, ideal)
        fleet = setup.described()
        write_report(json, "routing", ctx.params, {"fleet": fleet, "ideal_hit_ratio": ideal, "policies": policies})
        if plot is not None:
            from app.cli.bench.plot import plot_routing

            title = f"{replicas} replicas, load {load:g}, cache {cache_fraction:g} of the distinct blocks"
            ratios = {name: figures["hit_ratio"] for name, figures in policies.items()}
            plot_routing(plot, title, ratios, ideal, {name: times for name, (_, times) in replays.items()})


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InvalidParameter.of(name, value, "must be above 0")


def _fitted_cost(ctx: typer.Context, fit: Path) -> StepCost:
    from app.simulation.fit import fitted_cost

    for name in ("step_ms", "prefill_rate", "bandwidth"):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = f"--{name.replace('_', '-')}"
            raise InvalidParameter(name, f"{option} and --fit cannot both say what a step takes")
    return fitted_cost(fit)


def _step_cost(step_ms: float, prefill_rate: float, bandwidth: float) -> StepCost:
    from app.simulation.requests import BLOCK_SIZE
    from app.simulation.step_cost import LLAMA_8B, StepCost

    for name, value in (("step_ms", step_ms), ("prefill_rate", prefill_rate), ("bandwidth", bandwidth)):
        _check_positive(name, value)
    return StepCost(step_ms / 1e3, 1 / prefill_rate, LLAMA_8B.kv_block_bytes(BLOCK_SIZE) / (bandwidth * 1e12))


def _introduction(requests: Sequence[EngineRequest], setup: RoutingSetup) -> str:
    from app.simulation.requests import num_distinct_blocks, num_prompt_tokens

    cost, config = setup.cost, setup.config
    raised = ", raised to what the longest request needs" if setup.is_raised else ""
    return (
        f"{len(requests):,} requests, {num_prompt_tokens(requests):,} prompt tokens, "
        f"{num_distinct_blocks(requests):,} distinct blocks, over {requests[-1].arrival_time:.2f} s\n"
        f"{setup.num_replicas} replicas of {setup.num_kv_blocks:,} KV blocks{raised}; "
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens:,}\n"
        f"a step takes {1e3 * cost.step_s:.3g} ms + {1e6 * cost.token_s:.3g} µs a token "
        f"+ {1e6 * cost.block_s:.3g} µs a KV block read: {setup.prefill_rate:,.0f} prompt tokens/s in full steps\n"
        f"{setup.num_ingresses} ingress(es), {1e3 * setup.news.delay_s:g} ms behind the replicas"
    )


def _replays(requests: Sequence[EngineRequest], setup: RoutingSetup) -> dict[str, tuple[dict[str, float], list[float]]]:
    """Of each router its figures, and the times to first token in milliseconds."""
    from tqdm import tqdm

    from app.simulation.routing import figures_of, replay, router_makers

    results = {}
    makers = router_makers(requests, setup)
    with tqdm(total=len(makers) * len(requests), desc="requests", disable=not sys.stderr.isatty()) as bar:
        for name, maker in makers.items():
            records = replay(requests, setup, maker, on_end=bar.update).records.values()
            times = [1e3 * record.ttft for record in records if record.ttft is not None]
            results[name] = figures_of(records, setup), times
    return results


def _show(policies: Mapping[str, Mapping[str, float]], ideal: float) -> None:
    from app.cli.bench.report import show

    rows: list[list[object]] = [
        [
            name.replace("_", " "),
            f"{each['hit_ratio']:.3f}",
            f"{100 * each['hit_ratio'] / ideal:.0f} %" if ideal else "",
            *(f"{1e3 * each[f'ttft_{point}']:.1f}" for point in ("mean", "p50", "p90", "p99")),
            f"{each['imbalance']:.2f}",
            f"{100 * each['prefill_utilisation']:.0f} %",
        ]
        for name, each in policies.items()
    ]
    times = (f"TTFT {point}, ms" for point in ("mean", "p50", "p90", "p99"))
    show(
        f"Routing: the ideal hit ratio is {ideal:.3f}",
        ("", "hit ratio", "of the ideal", *times, "imbalance", "prefill utilisation"),
        rows,
    )
