"""Runs a workload on an engine in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from app.cli.bench.options import as_args
from app.cli.bench.roofline import Machine, efficiency, measure_machine
from app.cli.bench.workload import OUTPUT_LEN, Item, file_items, fitted, made_up_items
from engine import LLM, EngineConfig, RequestOutput, SamplingParams, StepProfiler, StepRecord
from engine.hub import load_model_config


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a workload, from a cold prefix cache.

    Attributes:
        seconds: from the first prompt's processing to the last token's text.
    """

    seconds: float
    outputs: list[RequestOutput]
    steps: list[StepRecord]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, those that came from the prefix cache."""
        return sum(output.num_cached_tokens for output in self.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Measured:
    """The rounds of a workload, and how near they came to the machine: see `roofline.efficiency`."""

    machine: Machine
    rounds: list[Round]
    efficiency: dict[str, Any]


def load(config: EngineConfig) -> tuple[LLM, Machine]:
    """The engine, and what the machine can do while that is not there yet.

    Raises:
        InvalidParameter, FetchError: see LLM.
    """
    machine = measure_machine(config, load_model_config(config).dtype)
    # The clock of a request's times, which are differences alone here.
    return LLM(config.model, clock=time.perf_counter, **as_args(config)), machine


def run(llm: LLM, items: Sequence[Item], *, use_tqdm: bool) -> Round:
    """All items at once, greedily, each to its output length."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, max_tokens=item.output_len, ignore_eos=True) for item in items]
    started = time.perf_counter()
    with StepProfiler(llm.core) as profiler:
        outputs = llm.generate([list(item.prompt_token_ids) for item in items], params, use_tqdm=use_tqdm)
    return Round(time.perf_counter() - started, outputs, profiler.steps)


def measure(
    config: EngineConfig,
    source: str,
    trace: Path | None,
    *,
    count: int | None,
    input_len: int,
    output_len: int | None,
    shared_prefix: int,
    warmup: int,
    num_iters: int,
) -> Measured:
    """Runs the workload that a benchmark's options describe.

    Args:
        source: `random`, or a file of prompts; a trace goes before it.
        count: most requests; None is all of a file or trace, and RANDOM_COUNT random ones.
        output_len: None is what a trace says, and OUTPUT_LEN otherwise.
        warmup: rounds before those that count.

    Raises:
        InvalidParameter, FetchError: see LLM; or a file or trace is not what it should be.
        OSError: it cannot be read.
    """
    llm, machine = load(config)
    with llm:
        items = _read_items(
            llm, source, trace, count=count, input_len=input_len, output_len=output_len, shared_prefix=shared_prefix
        )
        rounds = [run(llm, items, use_tqdm=sys.stderr.isatty()) for _ in range(warmup + num_iters)][warmup:]
    machine = machine.or_better(measure_machine(config, llm.model_config.dtype))
    near = efficiency(llm.model_config, machine, [step for each in rounds for step in each.steps])
    return Measured(machine, rounds, near)


def _read_items(
    llm: LLM,
    source: str,
    trace: Path | None,
    *,
    count: int | None,
    input_len: int,
    output_len: int | None,
    shared_prefix: int,
) -> list[Item]:
    """The workload that the options describe, cut to the model's context; see `measure`."""
    seed = llm.core.config.seed
    tokenizer = llm.get_tokenizer()
    vocab_size = min(llm.model_config.vocab_size, tokenizer.vocab_size)
    if trace is None and source != "random":
        items = file_items(Path(source), count, output_len or OUTPUT_LEN, tokenizer)
    else:
        items = made_up_items(
            trace,
            count=count,
            input_len=input_len,
            output_len=output_len,
            shared_prefix=shared_prefix,
            vocab_size=vocab_size,
            seed=seed,
        )
    items, shortened = fitted(items, llm.model_config.max_model_len)
    if shortened:
        typer.echo(f"{shortened} of {len(items)} requests were cut to the context, {llm.model_config.max_model_len:,}")
    return items
