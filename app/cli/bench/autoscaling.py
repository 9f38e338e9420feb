"""`manta bench autoscaling`: what an autoscaling policy makes of a fleet, on a virtual clock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.bench.options import Json, Plot, checked
from engine.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.simulation.autoscaling import Point
    from app.simulation.autoscaling_sweep import Comparison, Scenario, Trial
    from app.simulation.demand import ReplicaClass
    from app.traces import TraceRequest

MOST_REQUESTS = 60_000
"""So many are replayed, some 25 times, in a few minutes; with more, a slower class of replicas is the default."""

MOST_COPIED_REQUESTS = 1_000_000
"""So many take hours."""

MOST_MEAN_REPLICAS = 1000
"""Larger fleets take hours."""

TITLES = {"manta": "manta", "ray_default": "Ray's default, best", "fixed": "fixed"}


def autoscaling(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Option(help="Mooncake's .jsonl, or Azure's .csv.")],
    mean_replicas: Annotated[
        float, typer.Option(help="The trace's requests come so often that about so many replicas are busy on average.")
    ] = 4.0,
    replica: Annotated[
        str, typer.Option(help="Class of the replicas: h200 or l40s.", show_default="h200, unless too many requests")
    ] = "",
    startup_s: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds until a new replica takes requests.")
    ] = 60.0,
    ttft_target: Annotated[float, typer.Option(help="Seconds to the first token that meet the objective.")] = 5.0,
    tpot_target: Annotated[
        float, typer.Option(help="Seconds per output token, on average over a request, that meet it.")
    ] = 0.05,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests of the trace.", show_default="all of the trace")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = min(2, os.cpu_count() or 1),
    seed: Annotated[int, typer.Option(help="Of the copies of the trace.")] = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Replay a trace against a simulated fleet whose size a policy decides, and compare objectives met and hours paid.

    The trace comes several times over, each copy a little later and with prefixes of its own, until --mean-replicas
    have enough to do. Lengths and times are divided by 32 in the simulation; all that is said here is in the trace's
    own. A replica is a real engine core whose steps take a + b * tokens + c * KV blocks read, with the constants of its
    class and Llama-3.1-8B in bfloat16. Manta's router places the requests, whatever decides on the replicas.

    manta is the autoscaling policy with its default settings and the two targets. ray_default is Ray Serve's own at its
    best: of all settings of target_ongoing_requests, downscale_delay_s and the scaling factors that were tried, the one
    with the fewest replica-hours among those that come within 0.1 points of the best attainment. fixed is the smallest
    fleet of constant size that reaches the attainment of that.

    --json: an object with command, version, machine, settings, fleet (what was simulated), policies, saving (the share
    of ray_default's replica-hours that manta does without), ray_default_as_good (the cheapest of Ray's settings that
    reach manta's attainment), ray_default_sweep and fixed_sweep (all that was tried), and timelines: a policy's name to
    rows of seconds, replicas wanted, replicas that took requests, and requests. policies has, of each name,
    slo_attainment (share of requests that met both targets), replica_hours (from where each replica was asked for to
    the end of its draining), scale_events (changes of the number wanted), ttft_attainment, tpot_attainment,
    mean_replicas, max_replicas, ttft_p50, ttft_p99, tpot_p50, tpot_p99 (seconds) and settings.
    """
    with checked((json,), plot):
        from app.cli.bench.report import write_report
        from app.cli.bench.workload import trace_requests
        from app.simulation.autoscaling_sweep import Scenario, compare
        from app.simulation.demand import copies_for

        options = {"mean_replicas": mean_replicas, "ttft_target": ttft_target, "tpot_target": tpot_target}
        for name, value in options.items():
            if not 0 < value < float("inf"):
                raise InvalidParameter.of(name, value, "must be above 0")
        requests = trace_requests(trace, num_prompts)
        if mean_replicas > MOST_MEAN_REPLICAS:
            raise InvalidParameter.of("mean_replicas", mean_replicas, f"must be at most {MOST_MEAN_REPLICAS:,}")
        chosen = _class_of(replica, requests, mean_replicas)
        scenario = Scenario(
            tuple(requests),
            copies_for(requests, chosen, mean_replicas),
            chosen,
            mean_replicas=mean_replicas,
            startup_s=startup_s,
            ttft_target_s=ttft_target,
            tpot_target_s=tpot_target,
            seed=seed,
        )
        count = scenario.copies * len(requests)
        if count < 1:
            rule = f"so many are busy with less than one of the trace's {len(requests):,} requests"
            raise InvalidParameter.of("mean_replicas", mean_replicas, rule)
        if count > MOST_COPIED_REQUESTS:
            rule = (
                f"it takes {count:.3g} requests to keep so many busy over all of the trace's time; "
                f"at most {MOST_COPIED_REQUESTS:,} are replayed"
            )
            raise InvalidParameter.of("mean_replicas", mean_replicas, rule)
        typer.echo(_introduction(scenario))
        comparison = compare(scenario, processes)
        _show(comparison)
        write_report(json, "autoscaling", ctx.params, {"fleet": scenario.described(), **comparison.described()})
        if plot is not None:
            from app.cli.bench.plot import plot_replicas

            plot_replicas(
                plot,
                f"{trace.name}, {scenario.copies:.2f} times: replicas",
                scenario.demand_over_time(),
                {TITLES[name]: _serving(each.timeline) for name, each in comparison.best.items()},
            )


def _class_of(name: str, requests: Sequence[TraceRequest], mean_replicas: float) -> ReplicaClass:
    """The class of a name, or the fastest one that is not too fast for the trace."""
    from app.simulation.demand import CLASSES, copies_for

    if name:
        found = [each for each in CLASSES if each.name == name]
        if not found:
            raise InvalidParameter.of("replica", name, f"must be {' or '.join(each.name for each in CLASSES)}")
        return found[0]
    fitting = (each for each in CLASSES if copies_for(requests, each, mean_replicas) * len(requests) <= MOST_REQUESTS)
    return next(fitting, CLASSES[-1])


def _serving(timeline: Sequence[Point]) -> tuple[list[float], list[int]]:
    return [point.seconds for point in timeline], [point.serving for point in timeline]


def _introduction(scenario: Scenario) -> str:
    from app.simulation.requests import SCALE
    from app.traces import MOONCAKE_BLOCK

    replica, cost, bounds = scenario.replica, scenario.replica.cost, scenario.bounds
    return (
        f"{len(scenario.trace):,} requests, {scenario.copies:.2f} times over; lengths and times divided by {SCALE}\n"
        f"replicas of class {replica.name}: a step takes {1e3 * cost.step_s:.3g} ms + {1e6 * cost.token_s:.3g} µs a "
        f"token + {1e9 * cost.block_s / MOONCAKE_BLOCK:.3g} ns a token read; "
        f"{MOONCAKE_BLOCK * replica.num_kv_blocks:,} tokens of KV, {replica.max_num_batched_tokens:,} a step at most\n"
        f"{scenario.initial_replicas} at first, {bounds['min_replicas']} to {bounds['max_replicas']}, "
        f"{scenario.startup_s:g} s to start one; objective: first token within {scenario.ttft_target_s:g} s, "
        f"{1e3 * scenario.tpot_target_s:g} ms per output token"
    )


def _show(comparison: Comparison) -> None:
    from app.cli.bench.report import show

    trials = {TITLES[name]: trial for name, trial in comparison.best.items()}
    if (as_good := comparison.ray_as_good) is not None:
        trials["Ray's, as good as manta"] = as_good
    columns = ("", "objective\nmet", "replica-\nhours", "scale\nevents", "replicas,\nmean", "\nmost")
    times = ("TTFT, s\np50", "\np99", "TPOT, ms\np50", "\np99")
    best = comparison.best["ray_default"]
    points = 100 * (comparison.manta.attainment - best.attainment)
    percent = round(100 * comparison.saving)
    hours = f"{abs(percent)} % {'fewer' if percent >= 0 else 'more'} replica-hours than Ray's best"
    title = f"Autoscaling: manta takes {hours}, for {points:+.2f} points of attainment"
    show(title, (*columns, *times), [_row(name, trial) for name, trial in trials.items()])
    for name, trial in trials.items():
        typer.echo(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in trial.settings.values.items()))


def _row(title: str, trial: Trial) -> list[object]:
    figures = trial.figures
    return [
        title,
        f"{100 * trial.attainment:.2f} %",
        f"{trial.replica_hours:.2f}",
        figures["scale_events"],
        f"{figures['mean_replicas']:.2f}",
        figures["max_replicas"],
        *(f"{figures[name]:.2f}" for name in ("ttft_p50", "ttft_p99")),
        *(f"{1e3 * figures[name]:.1f}" for name in ("tpot_p50", "tpot_p99")),
    ]
