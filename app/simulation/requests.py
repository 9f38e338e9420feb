"""A trace's requests as engine requests of the scaled world, in which lengths and times are divided by 32.

There a block of 512 tokens, which a Mooncake trace has hashes of, is one KV block of 16; rates, such as tokens/s, keep
their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from app.simulation.step_cost import LLAMA_8B
from app.traces import MOONCAKE_BLOCK, TraceRequest
from engine import EngineRequest, SamplingParams, hash_blocks, root_hash

BLOCK_SIZE = 16
SCALE = MOONCAKE_BLOCK // BLOCK_SIZE


def simulated_requests(trace: Iterable[TraceRequest]) -> list[EngineRequest]:
    """Requests that arrive at the trace's times, from its first one on, with block hashes.

    A prompt has a full block of equal tokens for each of its hash ids; without those, its tokens are its own.
    """
    numbers: dict[int, int] = {}  # a hash id may be no int32
    requests: list[EngineRequest] = []
    root = root_hash(LLAMA_8B, BLOCK_SIZE)
    num_unique = 0
    by_arrival = sorted(trace, key=lambda request: request.arrival_s)
    for index, each in enumerate(by_arrival):
        if each.hash_ids is None:
            num_unique += 1
            tokens = [num_unique] * max(1, round(each.prompt_len / SCALE))
        else:
            tokens = []
            for hash_id in each.hash_ids:
                tokens += [numbers.setdefault(hash_id, len(numbers))] * BLOCK_SIZE
        requests.append(
            EngineRequest(
                request_id=f"request-{index}",
                prompt_token_ids=tuple(tokens),
                params=SamplingParams(max_tokens=max(1, round(each.output_len / SCALE)), ignore_eos=True),
                seed=index,
                arrival_time=each.arrival_s - by_arrival[0].arrival_s,
                block_hashes=tuple(hash_blocks(tokens, BLOCK_SIZE, root)),
            )
        )
    return requests


def at_rate(requests: Sequence[EngineRequest], tokens_per_s: float) -> list[EngineRequest]:
    """The requests with times stretched, bursts and all, until so many prompt tokens arrive in a second on average.

    Those of a trace that has one moment only come at that.
    """
    lasts = requests[-1].arrival_time
    factor = num_prompt_tokens(requests) / tokens_per_s / lasts if lasts else 0.0
    return [replace(request, arrival_time=request.arrival_time * factor) for request in requests]


def num_prompt_tokens(requests: Iterable[EngineRequest]) -> int:
    return sum(len(request.prompt_token_ids) for request in requests)


def num_distinct_blocks(requests: Iterable[EngineRequest]) -> int:
    """Full blocks of prompts, equal ones counted once."""
    return len({block_hash for request in requests for block_hash in request.block_hashes})


def longest(requests: Iterable[EngineRequest]) -> int:
    """Tokens of the longest prompt and output together."""
    return max(len(request.prompt_token_ids) + (request.params.max_tokens or 0) for request in requests)
