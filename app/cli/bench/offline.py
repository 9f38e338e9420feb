"""Runs a workload on an engine in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from app.cli.bench.options import as_args
from app.cli.bench.roofline import Machine, measure_machine
from app.cli.bench.workload import Item, file_items, fitted, random_items, trace_items
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


def load(config: EngineConfig) -> tuple[LLM, Machine]:
    """The engine, and what the machine can do while that is not there yet.

    Raises:
        InvalidParameter, FetchError: see LLM.
    """
    machine = measure_machine(config, load_model_config(config).dtype)
    # The clock of a request's times, which are differences alone here.
    return LLM(config.model, clock=time.perf_counter, **as_args(config)), machine


def read_items(
    llm: LLM,
    source: str,
    trace: Path | None,
    *,
    count: int | None,
    random_count: int,
    input_len: int,
    output_len: int | None,
    default_output_len: int,
    shared_prefix: int,
    seed: int,
) -> list[Item]:
    """The workload that the options describe, cut to the model's context.

    Args:
        count: most requests; None is all of a file or trace, and random_count random ones.
        output_len: None is what a trace says, and default_output_len otherwise.

    Raises:
        InvalidParameter: a file or trace is not what it should be.
        OSError: it cannot be read.
    """
    tokenizer = llm.get_tokenizer()
    vocab_size = min(llm.model_config.vocab_size, tokenizer.vocab_size)
    length = default_output_len if output_len is None else output_len
    if trace is not None:
        items = trace_items(trace, count, vocab_size=vocab_size, seed=seed)
        if output_len is not None:
            items = [Item(item.prompt_token_ids, output_len, item.arrival) for item in items]
    elif source == "random":
        number = random_count if count is None else count
        items = random_items(number, input_len, length, shared_prefix=shared_prefix, vocab_size=vocab_size, seed=seed)
    else:
        items = file_items(Path(source), count, length, tokenizer)
    items, shortened = fitted(items, llm.model_config.max_model_len)
    if shortened:
        typer.echo(f"{shortened} of {len(items)} requests were cut to the context, {llm.model_config.max_model_len:,}")
    return items


def run(llm: LLM, items: Sequence[Item]) -> Round:
    """All items at once, greedily, each to its output length."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, max_tokens=item.output_len, ignore_eos=True) for item in items]
    started = time.perf_counter()
    with StepProfiler(llm.core) as profiler:
        outputs = llm.generate([list(item.prompt_token_ids) for item in items], params, use_tqdm=sys.stderr.isatty())
    return Round(time.perf_counter() - started, outputs, profiler.steps)


def run_rounds(llm: LLM, items: Sequence[Item], warmup: int, num_iters: int) -> list[Round]:
    """The measured rounds, after others that are not."""
    for _ in range(warmup):
        run(llm, items)
    return [run(llm, items) for _ in range(num_iters)]
