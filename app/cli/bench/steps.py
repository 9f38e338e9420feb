"""Decoding steps of given kinds, and their phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from app.cli.bench.report import percentiles, show
from app.cli.bench.roofline import Machine, measure_machine, reached
from engine import (
    EngineConfig,
    EngineCore,
    EngineRequest,
    ModelConfig,
    SamplingParams,
    StepProfiler,
    StepRecord,
    bookkeeping_core,
)
from engine.sampling_params import InvalidParameter

NOTHING_MS = 0.005
BOOKKEEPING = ("schedule", "inputs", "update")


def bookkeeping_steps(
    config: EngineConfig, running: int, context: int, waiting: int, blocks: int, *, warmup: int, steps: int
) -> dict[str, Any]:
    """Phases of steps in which `running` requests decode and `waiting` ones queue, over a pool of `blocks`.

    Raises:
        InvalidParameter: the pool is too small for them.
    """
    output_len = _output_len(config, running, context, warmup + steps)
    needed = running * -(-(context + output_len) // config.block_size)
    if blocks < needed:
        raise InvalidParameter.of("blocks", blocks, f"{running} requests of {context} tokens need {needed:,}")
    core = bookkeeping_core(_sized(config, running, blocks), max_model_len=context + output_len)
    with StepProfiler(core) as profiler:
        _decode(core, running, context, waiting, output_len, warmup + steps)
    kind = {"running": running, "context": context, "waiting": waiting, "blocks": blocks}
    return {**kind, "phases_ms": _phases(profiler.steps[-steps:])}


def engine_steps(
    config: EngineConfig,
    model_config: ModelConfig,
    machine: Machine,
    counts: Sequence[int],
    contexts: Sequence[int],
    *,
    warmup: int,
    steps: int,
) -> tuple[list[dict[str, Any]], Machine, list[StepRecord], dict[str, Any]]:
    """Phases of the model's steps, the machine as it was at its best before and after them, and a list and a trace of
    all steps, those with prompts included.

    Raises:
        InvalidParameter: see LLM; or the model's context is too short.
        FetchError: see LLM.
    """
    running = max(counts)
    longest = max(contexts) + _output_len(config, running, max(contexts), warmup + steps)
    if longest > model_config.max_model_len:
        limit = model_config.max_model_len
        raise InvalidParameter.of(
            "context", max(contexts), f"needs {longest:,} tokens; the model's context is {limit:,}"
        )
    needed = running * -(-longest // config.block_size)
    core = EngineCore.from_config(
        _sized(config, running, max(needed, -(-model_config.max_model_len // config.block_size)))
    )
    runs: list[tuple[dict[str, int], list[StepRecord]]] = []
    with StepProfiler(core) as profiler:
        for count in counts:
            for context in contexts:
                output_len = _output_len(config, count, context, warmup + steps)
                _decode(core, count, context, 0, output_len, warmup + steps)
                runs.append(({"running": count, "context": context}, profiler.steps[-steps:]))
    core.shutdown()
    machine = machine.or_better(measure_machine(config, model_config.dtype))
    results = [
        {**kind, "phases_ms": _phases(run), "efficiency": reached_at_median(model_config, machine, run)}
        for kind, run in runs
    ]
    return results, machine, profiler.steps, profiler.chrome_trace()


def reached_at_median(model: ModelConfig, machine: Machine, steps: Sequence[StepRecord]) -> dict[str, float]:
    """`roofline.reached` if each of these like steps had taken as long as their median: one may be a stall."""
    return reached(model, machine, steps, len(steps) * median(step.seconds for step in steps))


def medians(result: dict[str, Any]) -> dict[str, float]:
    """Phase to milliseconds, without the sums."""
    return {name: each["p50"] for name, each in result["phases_ms"].items() if name not in ("bookkeeping", "total")}


def show_phases(title: str, kind: Sequence[str], results: Sequence[dict[str, Any]]) -> None:
    """A row a result; medians in milliseconds, a column a phase that takes any time."""
    phases = [p for p in results[0]["phases_ms"] if any(each["phases_ms"][p]["p50"] >= NOTHING_MS for each in results)]
    rows = [
        [*(f"{each[name]:,}" for name in kind), *(f"{each['phases_ms'][phase]['p50']:.3f}" for phase in phases)]
        for each in results
    ]
    show(title, (*kind, *phases), rows)


def _batched_tokens(config: EngineConfig, running: int) -> int:
    """Of a step, so that prompts are computed even while nearly all requests decode."""
    return max(config.max_num_batched_tokens, 2 * running)


def _output_len(config: EngineConfig, running: int, context: int, steps: int) -> int:
    """Tokens that the first request gives before the last one has decoded for so many steps."""
    prefill_steps = -(-running * context // (_batched_tokens(config, running) - running))
    return prefill_steps + steps + 1


def _sized(config: EngineConfig, running: int, blocks: int) -> EngineConfig:
    return replace(
        config,
        max_num_seqs=running,
        max_num_batched_tokens=_batched_tokens(config, running),
        num_kv_blocks=blocks,
    )


def _decode(core: EngineCore, running: int, context: int, waiting: int, output_len: int, steps: int) -> None:
    """Brings requests to their contexts, lets the others queue, takes the steps and ends them all."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)

    def add(index: int) -> str:
        # Their lengths differ by less than a block, so that not all blocks become full in the same step.
        length = max(context - index % core.config.block_size, 1)
        tokens = tuple(rng.integers(0, core.model_config.vocab_size, length).tolist())
        request = EngineRequest(request_id=str(index), prompt_token_ids=tokens, params=params, seed=0)
        core.add_request(request)
        return request.request_id

    ids = [add(index) for index in range(running)]
    while core.load().queued_prefill_tokens:
        core.step()
    ids += [add(index) for index in range(running, running + waiting)]
    for _ in range(steps):
        core.step()
    core.abort(ids)
    while core.has_work():
        core.step()


def _phases(steps: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    values = {phase: [1000 * step.phases[phase] for step in steps] for phase in steps[0].phases}
    values["bookkeeping"] = [sum(1000 * step.phases[phase] for phase in BOOKKEEPING) for step in steps]
    values["total"] = [1000 * step.seconds for step in steps]
    return {phase: percentiles(each) for phase, each in values.items()}
