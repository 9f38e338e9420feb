"""`manta bench step`: what a decoding step's time is made of."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from app.cli.bench.options import DType, Json, Model, Plot, Seed, Warmup, checked, engine_config, positive_numbers


def step(
    ctx: typer.Context,
    model: Model = "demo",
    running: Annotated[str, typer.Option(help="Requests in a step, several with commas.")] = "1,32,256",
    context: Annotated[str, typer.Option(help="Tokens that each has before it.")] = "128",
    waiting: Annotated[str, typer.Option(help="Requests in the queue, of the bookkeeping part.")] = "10,10000",
    blocks: Annotated[str, typer.Option(help="KV blocks in the pool, of the bookkeeping part.")] = "16000,500000",
    num_iters: Annotated[int, typer.Option(min=1, help="Measured steps of each kind.")] = 50,
    warmup: Warmup = 5,
    dtype: DType = "auto",
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write the model's steps here as a trace for Perfetto or chrome://tracing.")
    ] = None,
) -> None:
    """Let requests decode and split their steps: once with no model, for the bookkeeping, once with it.

    schedule, inputs (rows, tokens, positions, block tables), forward, logits, sample, update, and the rest. Where there
    is no model, sampling chooses among 64 tokens. max_num_seqs and num_kv_blocks are set to what is measured; other
    options not named here are arguments of the engine.

    --json: an object with command, version, machine, settings, roofline, and lists: bookkeeping (running, context,
    waiting, blocks) and engine (running, context, efficiency), each entry with phases_ms (a phase to its mean, p10 …
    p99 in milliseconds; bookkeeping is schedule, inputs and update together, total is the step). Efficiency is that
    of the median step. And steps, all that the engine made, those with prompts too, each with tokens, keys (that its
    requests see) and seconds, which `manta bench routing --fit` takes.
    """
    with checked((json, profile), plot):
        counts = positive_numbers("running", running)
        contexts = positive_numbers("context", context)
        queues = positive_numbers("waiting", waiting)
        pools = positive_numbers("blocks", blocks)
        config = engine_config(ctx, model, dtype, seed)

        from app.cli.bench.report import show_efficiency, write_json
        from app.cli.bench.roofline import measure_machine
        from app.cli.bench.steps import bookkeeping_steps, engine_steps, show_phases
        from engine.hub import load_model_config

        model_config = load_model_config(config)
        machine = measure_machine(config, model_config.dtype)
        bookkeeping = [
            bookkeeping_steps(config, count, length, queue, pool, warmup=warmup, steps=num_iters)
            for count in counts
            for length in contexts
            for queue in queues
            for pool in pools
        ]
        show_phases("Bookkeeping, without a model: median ms", ("running", "context", "waiting", "blocks"), bookkeeping)
        measured, machine, steps, trace = engine_steps(
            config, model_config, machine, counts, contexts, warmup=warmup, steps=num_iters
        )
        show_phases("The engine: median ms", ("running", "context"), measured)
        near = {f"{each['running']} requests of {each['context']}": each["efficiency"] for each in measured}
        show_efficiency(machine, near)
        sizes = [{"tokens": each.num_tokens, "keys": each.num_keys, "seconds": each.seconds} for each in steps]
        result = {"bookkeeping": bookkeeping, "engine": measured, "steps": sizes}
        write_json(json, "step", ctx.params, config, machine, result)
        if profile is not None:
            profile.write_text(json_format.dumps(trace), encoding="utf-8")
        if plot is not None:
            from app.cli.bench.plot import plot_parts
            from app.cli.bench.steps import medians

            bars = {f"{each['running']} of {each['context']}": medians(each) for each in measured}
            plot_parts(plot, "A decoding step: requests and their context", "milliseconds", bars)
