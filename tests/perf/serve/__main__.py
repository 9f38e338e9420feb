"""The demo service over HTTP beside its own engine.

python -m tests.perf.serve [--json FILE] [--rounds N] [--beside NAME ...]

In each round, in turn: the engine alone (`LLM`, then `AsyncEngine` for the first token); the demo service under
`serve run`; and what else is asked for, other ways through Ray Serve or vLLM's own server. All services get the same
work from the client of `manta bench serve`: 32 requests at once, then requests one after another over one kept
connection. Figures are medians over the rounds, ratios are of these; the machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from app.cli.bench.calls import Form
from app.cli.bench.client import ServiceClient
from app.cli.bench.goodput import figures
from app.cli.bench.load import run_load
from tests.perf.serve.processor_time import between, times
from tests.perf.serve.services import MODEL, ROOT, SERVICES, Service, running
from tests.perf.serve.workload import MANY, OUTPUT_LEN, SINGLE_OUTPUT_LEN, SINGLES, prompts

ENGINE = "engine"
REQUEST_SECONDS = 300
ENGINE_SECONDS = 600

Figures = dict[str, Any]
"""output_tok_s; ttft_ms of one request; events_per_token; cpu_us_per_token, by part for a service."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.serve", description="The demo service over HTTP.")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--beside", nargs="*", choices=SERVICES[1:], default=[], help="what else takes turns")
    options = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    result = summarise(take_turns([ENGINE, "manta", *options.beside], options.rounds, console))
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def take_turns(names: Sequence[str], rounds: int, console: Console) -> dict[str, list[Figures]]:
    """The figures of all turns, by name; without those that failed, unless that is Manta itself."""
    turns: dict[str, list[Figures]] = {name: [] for name in names}
    for turn in range(1, rounds + 1):
        for name in list(turns):
            try:
                turns[name].append(measured(name, 100 * turn, console))
            except (subprocess.SubprocessError, psutil.Error, OSError, RuntimeError) as error:
                if name in (ENGINE, "manta"):
                    raise
                del turns[name]
                console.print(f"{name} is left out: {error}", style="red", markup=False)
            else:
                console.print(f"round {turn} of {rounds}: {name}, {turns[name][-1]['output_tok_s']:,.0f} tokens/s")
    return turns


def measured(name: str, seed: int, console: Console) -> Figures:
    """One turn."""
    if name == ENGINE:
        return engine(seed)
    with running(name, console) as service:
        return asyncio.run(load(service, seed))


def engine(seed: int) -> Figures:
    """See tests/perf/serve/offline.py.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "tests.perf.serve.offline", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return json.loads(line.removeprefix("FIGURES "))
    raise RuntimeError(f"the engine ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


async def load(service: Service, seed: int) -> Figures:
    """What a client gets of a service.

    Raises:
        RuntimeError: a request failed.
    """
    form = Form("completions", MODEL, as_text=False, ignore_eos=True)
    async with ServiceClient(service.url, "completions", timeout=REQUEST_SECONDS) as client:

        async def run(count: int, output_len: int, concurrency: int, seed: int) -> Figures:
            calls = [form.call(prompt, output_len) for prompt in prompts(count, seed)]
            answers, seconds = await run_load(calls, client.send, concurrency=concurrency)
            result = figures(answers, seconds, {})
            if result["failed"]:
                raise RuntimeError(f"{result['failed']} requests failed: {result['failure']}")
            return result | {"events": sum(len(answer.token_times) for answer in answers)}

        await run(MANY, OUTPUT_LEN, MANY, seed - 1)
        before = times(service.process.pid)
        many = await run(MANY, OUTPUT_LEN, MANY, seed)
        used = between(before, times(service.process.pid), many["output_tokens"])
        await run(1, SINGLE_OUTPUT_LEN, 1, seed + 1)
        single = await run(SINGLES, SINGLE_OUTPUT_LEN, 1, seed + 2)
    return {
        "output_tok_s": many["output_tok_s"],
        "ttft_ms": single["ttft_ms"]["p50"],
        "events_per_token": many["events"] / many["output_tokens"],
        "cpu_us_per_token": used,
    }


def summarise(turns: dict[str, list[Figures]]) -> dict[str, Figures]:
    """Medians by name, and what a service's are to the engine's: a ratio of tokens/s, a difference of first tokens."""
    result: dict[str, Figures] = {}
    for name, each in turns.items():
        row = result[name] = {
            key: statistics.median(figures[key] for figures in each)
            for key in ("output_tok_s", "ttft_ms", "events_per_token")
            if key in each[0]
        }
        row["cpu_us_per_token"] = _cpu_medians([figures["cpu_us_per_token"] for figures in each])
        if name != ENGINE:
            row["of_engine"] = row["output_tok_s"] / result[ENGINE]["output_tok_s"]
            row["ttft_over_engine_ms"] = row["ttft_ms"] - result[ENGINE]["ttft_ms"]
    if "vllm" in result:
        result["manta"]["of_vllm"] = result["manta"]["output_tok_s"] / result["vllm"]["output_tok_s"]
    return result


def show(result: dict[str, Figures]) -> None:
    console = Console(width=200)
    table = Table(title=f"{MANY} requests; first token of one request", box=box.SIMPLE, title_justify="left")
    for column in ("", "tokens/s", "of the engine", "first token, ms", "over the engine", "events a token"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, row in result.items():
        over = [f"{row['of_engine']:.0%}"] if "of_engine" in row else [""]
        late = [f"{row['ttft_over_engine_ms']:+.1f}"] if "ttft_over_engine_ms" in row else [""]
        events = [f"{row['events_per_token']:.2f}"] if "events_per_token" in row else [""]
        table.add_row(name, f"{row['output_tok_s']:,.0f}", *over, f"{row['ttft_ms']:.1f}", *late, *events)
    console.print(table)
    if "of_vllm" in result["manta"]:
        console.print(f"to vLLM's server: {result['manta']['of_vllm']:.2f} times its tokens/s\n")
    table = Table(title="Processor time, us a token", box=box.SIMPLE, title_justify="left")
    parts = list(dict.fromkeys(part for row in result.values() for part in row["cpu_us_per_token"]))
    for column in ("", *parts):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, row in result.items():
        used = row["cpu_us_per_token"]
        table.add_row(name, *(f"{used[part]:,.0f}" if part in used else "" for part in parts))
    console.print(table)


def _cpu_medians(turns: Sequence[float | dict[str, float]]) -> dict[str, float]:
    """By part; the engine alone is one."""
    rows = [each if isinstance(each, dict) else {ENGINE: each} for each in turns]
    parts = dict.fromkeys(part for row in rows for part in row)
    return {part: statistics.median(row.get(part, 0.0) for row in rows) for part in parts}


if __name__ == "__main__":
    main()
