"""What sampling costs: 32 requests in the C++ kernels and in numpy, in turn.

`python -m tests.perf.sampling` prints medians in milliseconds, on logits of the demo model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from engine import EngineConfig, SamplingParams
from engine.config import available_threads, cache_folder
from engine.hub import load_model_config
from engine.request import EngineRequest
from engine.sampling.sampler import sample
from engine.sampling.state import SamplingState
from engine.tokenizer import load_tokenizer
from kernels.cpu.build import build, supported_levels
from kernels.cpu.library import CpuKernels
from tests.engine.models.tiny import Runner

REQUESTS = 32
ROUNDS = 9
PROMPT = "The quick brown fox jumps over the lazy dog, and then it sits down to think about what it has done so far. "
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "top_k=20": SamplingParams(top_k=20),
    "temperature=0.7, top_k=40, top_p=0.9": SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    "temperature=1": SamplingParams(temperature=1),
    "top_p=0.95": SamplingParams(top_p=0.95),
    "min_p=0.05": SamplingParams(min_p=0.05),
    "greedy with penalties": SamplingParams(temperature=0, presence_penalty=0.5, repetition_penalty=1.1),
    "greedy with 5 logprobs": SamplingParams(temperature=0, logprobs=5),
}


def state_of(
    params: Sequence[SamplingParams], prompt: Sequence[int], vocab: int, kernels: CpuKernels | None
) -> SamplingState:
    state = SamplingState(len(params), vocab, kernels)
    for row, of_row in enumerate(params):
        spec = EngineRequest(
            request_id=str(row), prompt_token_ids=tuple(prompt), params=of_row, seed=row, eos_token_ids=(0,)
        )
        state.add(row, spec, prompt)
    return state


def main() -> None:
    config = load_model_config(EngineConfig(model="demo", dtype="float32", max_model_len=256))
    prompt = load_tokenizer(config.path).encode(PROMPT * 2)
    threads = available_threads()
    kernels = CpuKernels(build(supported_levels()[0], cache_folder() / "kernels"), threads)
    logits = Runner(config, kernels=kernels).logits(prompt, [len(prompt)])[-REQUESTS:].contiguous()
    rows, lengths = np.arange(REQUESTS), np.full(REQUESTS, len(prompt))
    kinds = {name: [params] * REQUESTS for name, params in KINDS.items()}
    kinds["mixed"] = [list(KINDS.values())[row % len(KINDS)] for row in range(REQUESTS)]

    table = Table("parameters", "C++, ms", "numpy, ms", title=f"{REQUESTS} requests, {threads} threads")
    for name, params in kinds.items():
        states = [state_of(params, prompt, config.vocab_size, each) for each in (kernels, None)]
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for state, taken in zip(states, seconds, strict=True):
                started = time.perf_counter()
                sample(logits, state, rows, lengths)
                taken.append(time.perf_counter() - started)
        table.add_row(name, *(f"{1000 * median(taken):.2f}" for taken in seconds))
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
