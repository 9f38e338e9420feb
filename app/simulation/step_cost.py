"""How long a step takes, and an executor that knows nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import ModelConfig
from engine.outputs import SampledStep, SchedulerOutput

LLAMA_8B = ModelConfig(
    name="simulated Llama-3.1-8B",
    path=Path(),
    architecture="LlamaForCausalLM",
    vocab_size=2**31,  # tokens are as many as a trace has blocks
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=131_072,
    dtype="bfloat16",
)
"""What the simulated replicas serve; of its numbers only the bytes of a KV block count."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: step_s + token_s * tokens + block_s * KV blocks that its requests read."""

    step_s: float
    token_s: float
    block_s: float

    def seconds(self, work: SchedulerOutput, block_size: int) -> float:
        tokens = blocks = 0
        for step in work.steps:
            tokens += step.num_tokens
            blocks += -(-(step.num_computed_tokens + step.num_tokens) // block_size)
        return self.step_s + self.token_s * tokens + self.block_s * blocks

    def prefill_rate(self, max_num_batched_tokens: int) -> float:
        """Prompt tokens that full steps compute in a second; what they read is left out."""
        return max_num_batched_tokens / (self.step_s + self.token_s * max_num_batched_tokens)


H200 = StepCost(step_s=0.005, token_s=1 / 50_000, block_s=LLAMA_8B.kv_block_bytes(16) / 4e12)
"""An H200 class with an 8B model: 5 ms a step, 50,000 prompt tokens/s, KV blocks of 2 MiB at 4 TB/s."""


class _Done:
    """A step that is over; see `engine.protocols.StepHandle`."""

    def __init__(self, sampled: list[SampledStep]) -> None:
        self._sampled = sampled

    def result(self) -> list[SampledStep]:
        return self._sampled


SAMPLED = SampledStep((0,))
NOT_SAMPLED = SampledStep()


class SimulatedExecutor:
    """See `engine.protocols.Executor`. A step passes its time to `pass_time`, and always samples the token 0.

    Steps do not overlap: what the host does beside them takes no time here.
    """

    overlaps = False

    def __init__(self, cost: StepCost, block_size: int, pass_time: Callable[[float], object]) -> None:
        self._cost = cost
        self._block_size = block_size
        self._pass_time = pass_time

    def kv_blocks_that_fit(self) -> int:
        raise NotImplementedError("the config says how many")

    def allocate_kv_cache(self, num_blocks: int) -> None:
        pass

    def submit(self, work: SchedulerOutput) -> _Done:
        self._pass_time(self._cost.seconds(work, self._block_size))
        return _Done([SAMPLED if step.samples else NOT_SAMPLED for step in work.steps])

    def reset(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
