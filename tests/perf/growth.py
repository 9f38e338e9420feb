"""How the engine's speed grows with concurrency and falls with context, on the demo model in bfloat16.

`python -m tests.perf.growth [--json FILE] [--plot FILE]` prints two tables, in about five minutes. Each round goes
through all work but the largest, so that the machine's drift meets it alike; the figures are medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import typer
from tqdm import tqdm

from app.cli.bench.offline import Round, load, run
from app.cli.bench.options import Json, Plot, checked, positive_numbers
from app.cli.bench.plot import Panel, plot_growth
from app.cli.bench.report import show, show_efficiency, write_json
from app.cli.bench.workload import random_items
from engine import LLM, EngineConfig
from engine.hub import load_model_config

PROMPT_LEN, OUTPUT_LEN = 128, 128
"""Tokens of each request where concurrency grows."""

BATCH = 8
"""Requests that decode at each context, beside a single one."""

DECODED = 64
"""Tokens that each of them gets. The first of eight longest prompts has some 30 of them before the last one is through;
the steps after that count."""

ONCE = 50_000
"""Work of more tokens than these takes as long as all other work of a round, and runs in the first one alone."""


class Work(NamedTuple):
    """Requests that come at once."""

    requests: int
    prompt_len: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        return self.requests * (self.prompt_len + self.output_len)


class Speed(NamedTuple):
    """Tokens/s.

    Attributes:
        prefill: of prompts, in the steps that compute any of them.
        decode: of outputs, in the median of the steps in which all requests decode.
        end_to_end: of outputs, from the first prompt's processing to the last token's text.
    """

    prefill: float
    decode: float
    end_to_end: float


def speed_of(result: Round, requests: int) -> Speed:
    """A run's speeds."""
    prefill = [step for step in result.steps if not step.is_decode]
    decode = [step.seconds for step in result.steps if step.is_decode and step.num_requests == requests]
    return Speed(
        result.prompt_tokens / sum(step.seconds for step in prefill),
        requests / statistics.median(decode),
        result.output_tokens / result.seconds,
    )


def measure(llm: LLM, works: Sequence[Work], rounds: int) -> dict[Work, Speed]:
    """Medians over the rounds, after a short run that warms up."""

    def run_once(work: Work, seed: int) -> Speed:
        items = random_items(*work, vocab_size=llm.model_config.vocab_size, seed=seed)
        return speed_of(run(llm, items, use_tqdm=False), work.requests)

    run_once(Work(BATCH, PROMPT_LEN, DECODED), rounds)
    speeds: dict[Work, list[Speed]] = {work: [] for work in works}
    runs = [(work, turn) for turn in range(rounds) for work in works if turn == 0 or work.num_tokens <= ONCE]
    total = sum(work.num_tokens for work, _ in runs)
    with tqdm(total=total, unit="token", unit_scale=True, dynamic_ncols=True) as bar:
        for work, turn in runs:
            bar.set_description(f"round {turn + 1} of {rounds}: {work.requests} of {work.prompt_len:,} tokens")
            speeds[work].append(run_once(work, turn))
            bar.update(work.num_tokens)
    return {work: Speed(*map(statistics.median, zip(*each, strict=True))) for work, each in speeds.items()}


def engine_config(works: Sequence[Work]) -> EngineConfig:
    """Of an engine that has room for any of it."""
    config = EngineConfig(model="demo", dtype="bfloat16", enable_prefix_caching=False)
    sizes = [(work.requests, work.prompt_len + work.output_len) for work in works]
    sizes.append((1, load_model_config(config).max_model_len))  # no engine starts with less
    return replace(
        config,
        max_num_seqs=max(work.requests for work in works),
        num_kv_blocks=max(requests * -(-length // config.block_size) for requests, length in sizes),
    )


def panel(size: str, figures: Sequence[Mapping[str, float]], names: Sequence[str]) -> Panel:
    """Some columns of a table, over its first one."""
    first = next(iter(figures[0]))
    series = {name.replace("_", " "): [each[name] for each in figures] for name in names}
    return Panel(size, [int(each[first]) for each in figures], series)


def growth(
    concurrency: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8,16,32,64,128,256",
    context: Annotated[str, typer.Option(help="Tokens of a prompt.")] = "128,256,512,1024,2048,4096,8192",
    rounds: Annotated[int, typer.Option(min=1, help="The figures are their medians.")] = 3,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Tokens/s of the demo model in bfloat16, by concurrency and by context.

    Contexts are cut so that the model's own has room for what is decoded.
    """
    with checked((json,), plot):
        counts = positive_numbers("concurrency", concurrency)
        limit = load_model_config(EngineConfig(model="demo")).max_model_len - DECODED
        contexts = [min(each, limit) for each in positive_numbers("context", context)]
        at_once = {count: Work(count, PROMPT_LEN, OUTPUT_LEN) for count in counts}
        single, batch = ({each: Work(requests, each, DECODED) for each in contexts} for requests in (1, BATCH))
        works = [*at_once.values(), *single.values(), *batch.values()]
        config = engine_config(works)
        llm, machine = load(config)
        with llm:
            speeds = measure(llm, works, rounds)
        by_concurrency = [
            {"concurrency": count, "decode": speeds[work].decode, "end_to_end": speeds[work].end_to_end}
            for count, work in at_once.items()
        ]
        by_context = [
            {
                "context": each,
                "decode_batch_1": speeds[single[each]].decode,
                f"decode_batch_{BATCH}": speeds[batch[each]].decode,
                "prefill": speeds[single[each]].prefill,
            }
            for each in contexts
        ]
        for figures in (by_concurrency, by_context):
            size, *names = figures[0]
            rows = [[f"{each[size]:,}", *(each[name] for name in names)] for each in figures]
            show(f"Tokens/s by {size}", [name.replace("_", " ") for name in figures[0]], rows)
        show_efficiency(machine, {})
        options = {"concurrency": counts, "context": contexts, "rounds": rounds}
        write_json(
            json, "growth", options, config, machine, {"by_concurrency": by_concurrency, "by_context": by_context}
        )
        if plot is not None:
            panels = [
                panel(
                    f"requests at once, {PROMPT_LEN} + {OUTPUT_LEN} tokens each",
                    by_concurrency,
                    ["decode", "end_to_end"],
                ),
                panel("tokens of each prompt", by_context, ["decode_batch_1", f"decode_batch_{BATCH}"]),
                panel("tokens of a prompt", by_context, ["prefill"]),
            ]
            plot_growth(plot, "Tokens/s of the demo model in bfloat16", panels)


if __name__ == "__main__":
    typer.run(growth)
