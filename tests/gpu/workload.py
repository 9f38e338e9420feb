"""The throughput workload of nano-vllm, on this engine and on transformers' continuous batching.

256 requests of random tokens, inputs and outputs of 100 to 1,024 tokens each, temperature 0.6, no end of sequence.
"""

from __future__ import annotations

import dataclasses
import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.processor import TokensPrompt
from tests.gpu.models import Shape

TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and how many tokens to generate for each."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def draw(cls, count: int, shortest: int, longest: int, vocab: int, seed: int = 0) -> Work:
        numbers = random.Random(seed)
        prompts = [[numbers.randrange(vocab) for _ in range(numbers.randint(shortest, longest))] for _ in range(count)]
        return cls(prompts, [numbers.randint(shortest, longest) for _ in range(count)])

    def first(self, count: int) -> Work:
        return Work(self.prompts[:count], self.lengths[:count])


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a workload took. `finished` counts requests that came to their end in time; tokens are theirs."""

    seconds: float
    tokens: int
    finished: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run_engine(llm: LLM, work: Work) -> Throughput:
    """From the first prompt to the last token, text included."""
    params = [SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True) for n in work.lengths]
    llm.reset_prefix_cache()
    started = time.perf_counter()
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in work.prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    if tokens != work.lengths:
        error = next((output.error for output in outputs if output.error), None)
        raise RuntimeError(f"{sum(work.lengths)} tokens were asked for and {sum(tokens)} came: {error}")
    return Throughput(seconds, sum(tokens), len(tokens))


def run_transformers(
    shape: Shape, work: Work, device: torch.device, *, seconds: float, blocks: int, batch_tokens: int
) -> Throughput:
    """The same on transformers' continuous batching with torch's attention, bfloat16.

    All requests may run at once, loading and a warm-up are not counted, and prefix sharing, which random prompts cannot
    use, is off.

    Args:
        seconds: after which it is stopped.
        blocks: of KV cache, 256 tokens each.
        batch_tokens: most tokens of a step.
    """
    import transformers
    from transformers.generation import ContinuousBatchingConfig, GenerationConfig

    settings: dict[str, Any] = {
        "num_blocks": blocks,
        "max_batch_tokens": batch_tokens,
        "max_requests_per_batch": len(work.prompts),
        "allow_block_sharing": False,
    }
    # transformers 5.17 names an attention's paged form; later ones take the plain name, and a wish not to change it.
    attention = "paged|sdpa"
    if "auto_switch_to_flash" in {each.name for each in dataclasses.fields(ContinuousBatchingConfig)}:
        attention = "sdpa"
        settings["auto_switch_to_flash"] = False
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            shape.hf_config(), dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
    generation = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**settings), timeout=5
    ) as manager:
        _collect(manager, Work(work.prompts[:2], [4, 4]), time.monotonic() + seconds)
        return _collect(manager, work, time.monotonic() + seconds)


def _collect(manager: Any, work: Work, deadline: float) -> Throughput:
    started = time.monotonic()
    for prompt, length in zip(work.prompts, work.lengths, strict=True):
        manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
    tokens = finished = 0
    while finished < len(work.prompts) and time.monotonic() < deadline:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(f"transformers: {result.error}")
            finished += 1
            tokens += len(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' generation ended by itself")
    return Throughput(time.monotonic() - started, tokens, finished)
