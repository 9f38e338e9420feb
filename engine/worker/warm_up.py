"""Steps that use every kernel once, before the first request has to wait for their compilation."""

from __future__ import annotations

from collections.abc import Iterator

from engine.outputs import ScheduledStart, ScheduledStep, SchedulerOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

PROMPT_LEN = 40
"""Tokens that attention counts as a long prompt."""

_WAYS = (
    SamplingParams(temperature=0.0, prompt_logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, logprobs=1),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, min_tokens=2, stop_token_ids=(1,)),
)
"""Of sampling, which take other kernels each."""


def warm_up_steps(block_size: int, max_tokens: int) -> Iterator[SchedulerOutput]:
    """A prompt and a decode for each way of sampling, one request after another, in the first KV blocks.

    They are to run before any block is in use. Whoever runs them resets the worker afterwards.

    Args:
        max_tokens: that a step, a request's context and the KV blocks have room for.
    """
    length = min(PROMPT_LEN, max_tokens - 1)
    if length < 1:
        return
    prompt = tuple(0 for _ in range(length))
    blocks = tuple(range(-(-(length + 1) // block_size)))
    released: tuple[str, ...] = ()
    for index, params in enumerate(_WAYS):
        name = f"warm-up {index}"
        spec = EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0)
        start = ScheduledStart(spec, prompt, blocks, num_computed_tokens=0)
        yield SchedulerOutput((ScheduledStep(name, 0, length, (), True),), (start,), released)
        yield SchedulerOutput((ScheduledStep(name, length, 1, (), True),))
        released = (name,)
