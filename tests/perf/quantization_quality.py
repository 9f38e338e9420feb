"""What quantization costs and gives: how far next-token distributions move from float32, and how fast the engine is.

`python -m tests.perf.quantization_quality` prints a table, in a few minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine import LLM, EngineConfig, ModelConfig, SamplingParams
from engine.config import available_threads, cache_folder
from engine.hub import load_model_config
from engine.tokenizer import Tokenizer
from engine.worker.cpu_kernels import PACKINGS
from kernels.cpu.build import build, supported_levels
from kernels.cpu.library import CpuKernels
from tests.engine.models.tiny import Runner
from tests.engine.questions import questions

ROOT = Path(__file__).parents[2]
QUANTIZATIONS = tuple(PACKINGS)
WINDOW = 256
"""Tokens that are read in one go, the first of them without any before it."""

ROUNDS = 3
WORKLOADS = ((1, 128), (32, 128))
"""Requests, each of 128 random tokens, and the tokens that each gets."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a model's next-token distributions against those of another one, over all positions of some windows.

    Attributes:
        divergence: mean Kullback-Leibler divergence of this model from the other one, in nats.
        agreement: share of positions at which both find the same token the best.
    """

    divergence: float
    agreement: float


def windows_of(token_ids: Sequence[int]) -> list[list[int]]:
    """The whole windows of a text."""
    return [list(token_ids[at : at + WINDOW]) for at in range(0, len(token_ids) - WINDOW + 1, WINDOW)]


def read_documents(tokenizer: Tokenizer) -> list[list[int]]:
    """The project's own documents."""
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    return windows_of(tokenizer.encode("\n\n".join(texts)))


def write_answers(llm: LLM) -> list[list[int]]:
    """Questions of MT-Bench with the model's own greedy answers, each as one conversation."""
    chats = [[{"role": "user", "content": question}] for question in questions(20)]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=WINDOW, ignore_eos=True), use_tqdm=False)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids][:WINDOW] for output in outputs]


def measure_quality(
    config: ModelConfig, kernels: CpuKernels, windows: Sequence[Sequence[int]], quantizations: Sequence[str | None]
) -> dict[str | None, Quality]:
    """Of bfloat16 with each quantization, against float32 without."""
    config = replace(config, dtype="float32", max_model_len=max(map(len, windows)))
    reference = Runner(config, num_requests=len(windows), kernels=kernels)
    runners = {
        quantization: Runner(
            replace(config, dtype="bfloat16"),
            num_requests=len(windows),
            kernels=kernels,
            packing=PACKINGS[quantization],  # type: ignore[index]
        )
        for quantization in quantizations
    }
    divergence = dict.fromkeys(quantizations, 0.0)
    agreement = dict.fromkeys(quantizations, 0)
    for index, window in enumerate(windows):
        expected = reference.step({index: window})[index].log_softmax(-1)
        for quantization, runner in runners.items():
            found = runner.step({index: window})[index].log_softmax(-1)
            divergence[quantization] += float((expected.exp() * (expected - found)).sum(dtype=torch.float64))
            agreement[quantization] += int((expected.argmax(-1) == found.argmax(-1)).sum())
    count = sum(map(len, windows))
    return {each: Quality(divergence[each] / count, agreement[each] / count) for each in quantizations}


def measure_speed(model: str) -> dict[str | None, list[float]]:
    """Output tokens per second of each workload, the best of some rounds in which all take their turns."""
    generator = random.Random(0)
    prompts = [{"prompt_token_ids": generator.choices(range(100, 40_000), k=128)} for _ in range(32)]
    engines = {
        each: LLM(
            model, dtype="bfloat16", enable_prefix_caching=False, quantization=each, kv_cache_memory_bytes=1 << 29
        )
        for each in QUANTIZATIONS
    }
    best = {each: [0.0] * len(WORKLOADS) for each in QUANTIZATIONS}
    for _ in range(ROUNDS):
        for index, (requests, tokens) in enumerate(WORKLOADS):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            for each, llm in engines.items():
                started = time.perf_counter()
                llm.generate(prompts[:requests], params, use_tqdm=False)
                speed = requests * tokens / (time.perf_counter() - started)
                best[each][index] = max(best[each][index], speed)
    for llm in engines.values():
        llm.shutdown()
    return best


def weight_bytes(config: ModelConfig, kernels: CpuKernels, quantization: str | None) -> int:
    """Bytes of all weights of a step plan, in bfloat16 where they are not quantised."""
    config = replace(config, dtype="bfloat16", max_model_len=WINDOW)
    runner = Runner(config, kernels=kernels, packing=PACKINGS[quantization])  # type: ignore[index]
    caches = {each.data_ptr() for cache in runner._caches for each in (cache.keys, cache.values)}
    weights = {each.data_ptr(): each.nbytes for each in runner.model.kept}
    return sum(size for address, size in weights.items() if address not in caches)


def main(model: str = "demo") -> None:
    config = load_model_config(EngineConfig(model=model))
    kernels = CpuKernels(build(supported_levels()[0], cache_folder() / "kernels"), available_threads())
    sizes = {each: weight_bytes(config, kernels, each) / 1e6 for each in QUANTIZATIONS}
    with LLM(model, dtype="float32", max_model_len=2 * WINDOW) as llm:
        windows = read_documents(llm.get_tokenizer()) + write_answers(llm)
    quality = measure_quality(config, kernels, windows, QUANTIZATIONS)
    speed = measure_speed(model)
    print(f"{sum(map(len, windows)):,} tokens of text; bfloat16 activations, against float32\n")
    print("| quantization | KL, nats | same best token | 1 request, tokens/s | 32 requests, tokens/s | weights, MB |")
    print("|---|---|---|---|---|---|")
    for each in QUANTIZATIONS:
        one, many = speed[each]
        row = f"{quality[each].divergence:.5f} | {quality[each].agreement:.2%} | {one:.0f} | {many:.0f}"
        print(f"| {each or 'none'} | {row} | {sizes[each]:.0f} |")


if __name__ == "__main__":
    main()
