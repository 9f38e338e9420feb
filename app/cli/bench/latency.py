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
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each output.", show_default="128, or the trace's")
    ] = None,
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
        config = engine_config(model, dtype, seed, ctx.args)

        from app.cli.bench.offline import load, read_items, run_rounds
        from app.cli.bench.report import PERCENTILES, percentiles, show, show_efficiency, write_json
        from app.cli.bench.roofline import efficiency

        llm, machine = load(config)
        with llm:
            items = read_items(
                llm,
                input,
                trace,
                count=batch_size,
                random_count=batch_size,
                input_len=input_len,
                output_len=output_len,
                default_output_len=128,
                shared_prefix=shared_prefix,
                seed=seed,
            )
            rounds = run_rounds(llm, items, warmup, num_iters)
            near = efficiency(llm.model_config, machine, [step for each in rounds for step in each.steps])
        values: dict[str, list[float]] = {"e2e_s": [], "ttft_s": [], "tpot_s": [], "batch_s": []}
        for each in rounds:
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
        show(f"Latency: {len(items)} requests at once, {num_iters} rounds", ("", *columns), rows)
        show_efficiency(machine, near)
        write_json(json, "latency", ctx.params, config, machine, {"efficiency": near, **figures})
        if plot is not None:
            from app.cli.bench.plot import plot_distributions

            plot_distributions(plot, "Latency", {LABELS[name]: each for name, each in values.items() if each})
