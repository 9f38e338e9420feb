"""`manta bench throughput`: all requests at once, as many tokens a second as there are to be had."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from app.cli.bench.offline import Round


def throughput(
    ctx: typer.Context,
    model: Model = "demo",
    input: Input = "random",
    trace: Trace = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests.", show_default="32 random ones, or all of a file")
    ] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = None,
    shared_prefix: SharedPrefix = 0,
    num_iters: Annotated[int, typer.Option(min=1, help="Measured rounds; the figures are their medians.")] = 1,
    warmup: Warmup = 1,
    dtype: DType = "auto",
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Run requests that are all there at once; tokens and requests per second.

    Sampling is greedy, outputs do not end before their length, and each round starts with an empty prefix cache.
    Options not named here are arguments of the engine (--max-num-seqs 64, --no-enable-prefix-caching).

    --json: an object with command, version, machine, settings, roofline (gb_per_s, gflop_per_s, …), efficiency (decode
    and prefill: steps, seconds, gb_per_s, gflop_per_s, …_percent), and rounds and median: seconds, requests,
    prompt_tokens, cached_tokens, output_tokens, steps, requests_per_s, prompt_tokens_per_s, output_tokens_per_s,
    total_tokens_per_s.
    """
    with checked((json,), plot):
        config = engine_config(ctx, model, dtype, seed)

        from app.cli.bench.offline import measure
        from app.cli.bench.report import show, show_efficiency, write_json

        measured = measure(
            config,
            input,
            trace,
            count=num_prompts,
            input_len=input_len,
            output_len=output_len,
            shared_prefix=shared_prefix,
            warmup=warmup,
            num_iters=num_iters,
        )
        figures = [_figures(each) for each in measured.rounds]
        middle = {name: median(each[name] for each in figures) for name in figures[0]}
        show("Throughput", ("", "median"), [[name.replace("_", " "), value] for name, value in middle.items()])
        show_efficiency(measured.machine, measured.efficiency)
        write_json(
            json,
            "throughput",
            ctx.params,
            config,
            measured.machine,
            {"efficiency": measured.efficiency, "rounds": figures, "median": middle},
        )
        if plot is not None:
            _draw(plot, measured.rounds[-1])


def _figures(each: Round) -> dict[str, Any]:
    counts = {
        "requests": len(each.outputs),
        "prompt_tokens": each.prompt_tokens,
        "cached_tokens": each.cached_tokens,
        "output_tokens": each.output_tokens,
        "steps": len(each.steps),
    }
    total = each.prompt_tokens + each.output_tokens
    return {
        "seconds": each.seconds,
        **counts,
        "requests_per_s": len(each.outputs) / each.seconds,
        "prompt_tokens_per_s": each.prompt_tokens / each.seconds,
        "output_tokens_per_s": each.output_tokens / each.seconds,
        "total_tokens_per_s": total / each.seconds,
    }


def _draw(path: Path, each: Round) -> None:
    from app.cli.bench.plot import plot_timeline

    steps = each.steps
    plot_timeline(
        path,
        "Throughput: one round, step by step",
        [step.start - steps[0].start for step in steps],
        {
            "requests": [step.num_requests for step in steps],
            "tokens": [step.num_tokens for step in steps],
            "tokens/s": [step.num_tokens / step.seconds for step in steps],
            "milliseconds": [1000 * step.seconds for step in steps],
        },
    )
