"""`manta bench latency`: one batch, again and again."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.bench.options import (
    DType,
    Input,
    InputLen,
    Json,
    Model,
    OutputLen,
    Plot,
    Seed,
    SharedPrefix,
    Trace,
    Warmup,
    checked,
    engine_config,
)

LABELS = {
    "e2e_s": "end to end, s",
    "ttft_s": "time to first token, s",
    "tpot_s": "time per output token, s",
    "batch_s": "whole batch, s",
}


def latency(
    ctx: typer.Context,
    model: Model = "demo",
    input: Input = "random",
    trace: Trace = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "--num-prompts", min=1, help="Requests at once.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = None,
    shared_prefix: SharedPrefix = 0,
    num_iters: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 10,
    warmup: Warmup = 2,
    dtype: DType = "auto",
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Run one batch again and again; percentiles of what its requests wait for.

    Times are the engine's: from a request's queueing to its first token (time to first token), to its last one (end to
    end), and between its tokens (time per output token). Sampling is greedy, outputs do not end before their length,
    and each round starts with an empty prefix cache. Options not named here are arguments of the engine.

    --json: an object with command, version, machine, settings, roofline, efficiency (see throughput), and e2e_s,
    ttft_s, tpot_s (over the requests of all rounds) and batch_s (over the rounds), each with mean, p10, p25, p50, p75,
    p90, p99 in seconds.
    """
    with checked((json,), plot):
        config = engine_config(ctx, model, dtype, seed)

        from app.cli.bench.offline import measure
        from app.cli.bench.report import PERCENTILES, percentiles, show, show_efficiency, write_json

        measured = measure(
            config,
            input,
            trace,
            count=batch_size,
            input_len=input_len,
            output_len=output_len,
            shared_prefix=shared_prefix,
            warmup=warmup,
            num_iters=num_iters,
        )
        values: dict[str, list[float]] = {"e2e_s": [], "ttft_s": [], "tpot_s": [], "batch_s": []}
        for each in measured.rounds:
            values["batch_s"].append(each.seconds)
            for output in each.outputs:
                timing = output.timing
                if timing is None or timing.first_token_at is None or timing.finished_at is None:
                    continue  # it failed
                values["e2e_s"].append(timing.finished_at - timing.queued_at)
                values["ttft_s"].append(timing.first_token_at - timing.queued_at)
                if timing.num_generated_tokens > 1:
                    decoding = timing.finished_at - timing.first_token_at
                    values["tpot_s"].append(decoding / (timing.num_generated_tokens - 1))
        figures = {name: percentiles(each) for name, each in values.items()}
        columns = ["mean", *(f"p{p}" for p in PERCENTILES)]
        rows = [
            [LABELS[name], *(f"{each[column]:.4f}" for column in columns)] for name, each in figures.items() if each
        ]
        count = len(measured.rounds[0].outputs)
        show(f"Latency: {count} requests at once, {num_iters} rounds", ("", *columns), rows)
        show_efficiency(measured.machine, measured.efficiency)
        write_json(
            json, "latency", ctx.params, config, measured.machine, {"efficiency": measured.efficiency, **figures}
        )
        if plot is not None:
            from app.cli.bench.plot import plot_distributions

            plot_distributions(plot, "Latency", {LABELS[name]: each for name, each in values.items() if each})
