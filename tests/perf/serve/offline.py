"""The engine without a service around it: python -m tests.perf.serve.offline SEED; prints its figures as JSON."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

from engine import LLM, AsyncEngine, SamplingParams
from tests.perf.serve.workload import MANY, OUTPUT_LEN, SINGLE_OUTPUT_LEN, SINGLES, prompts

ENGINE = {"max_model_len": 8192, "max_num_seqs": 64, "kv_cache_memory_bytes": 384 << 20}
"""As in serve_configs/demo.yaml."""


def throughput(seed: int) -> dict[str, float]:
    """Output tokens/s of MANY requests at once, and the processor time of one of their tokens."""
    llm = LLM("demo", **ENGINE)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    tokens = MANY * OUTPUT_LEN
    llm.generate([{"prompt_token_ids": each} for each in prompts(MANY, seed - 1)], params, use_tqdm=False)
    work = [{"prompt_token_ids": each} for each in prompts(MANY, seed)]
    started, cpu = time.perf_counter(), time.process_time()
    llm.generate(work, params, use_tqdm=False)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"output_tok_s": tokens / seconds, "cpu_us_per_token": 1e6 * cpu / tokens}


async def first_token_ms(seed: int) -> float:
    """Median time to the first token of requests one after another, in ms."""
    engine = AsyncEngine("demo", **ENGINE)
    params = SamplingParams(temperature=0, max_tokens=SINGLE_OUTPUT_LEN, ignore_eos=True)
    times = []
    for number, prompt in enumerate(prompts(SINGLES + 1, seed)):
        sent, first = time.perf_counter(), None
        async for _ in engine.generate({"prompt_token_ids": prompt}, params):
            first = first or time.perf_counter()
        if number:  # the first one warms up
            times.append(1000 * (first - sent))
    await engine.shutdown()
    return statistics.median(times)


if __name__ == "__main__":
    seed = int(sys.argv[1])
    figures = throughput(seed)
    print("FIGURES " + json.dumps({**figures, "ttft_ms": asyncio.run(first_token_ms(seed + 2))}), flush=True)
