"""A trace's load in replicas, and as many copies of the trace as make a fleet of a given size."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from app.simulation.requests import SCALE, simulated_requests
from app.simulation.step_cost import LLAMA_8B, StepCost
from app.traces import MOONCAKE_BLOCK, TraceRequest
from engine import EngineRequest
from engine.sampling_params import InvalidParameter

SHARED_BY = 16
"""Sequences that share a step, for an estimate of what decoding costs."""

LONGEST_SHIFT_S = 30.0
"""Copies of a trace are moved against each other by up to so many seconds: longer than its bursts, shorter than its
waves."""


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """A kind of replica, with Llama-3.1-8B in bfloat16.

    Attributes:
        cost: of a step. A KV block of the scaled world stands for MOONCAKE_BLOCK tokens; what they hold is read at each
            token, there as here.
        num_kv_blocks: of MOONCAKE_BLOCK tokens, in 90 % of the GPU's memory beside the model and what a step needs.
        max_num_batched_tokens: of its engine.
    """

    name: str
    cost: StepCost
    num_kv_blocks: int
    max_num_batched_tokens: int

    def demand(self, trace: Sequence[TraceRequest]) -> float:
        """Seconds that a replica which is always busy would need for these requests, without a prefix cache.

        Prompts are computed in full steps; decoding shares each step among SHARED_BY sequences.
        """
        prompt_s = 1 / self.cost.prefill_rate(self.max_num_batched_tokens)
        token_s = self.cost.token_s + self.cost.step_s / SHARED_BY
        read_s = self.cost.block_s / MOONCAKE_BLOCK
        return sum(
            each.prompt_len * prompt_s + each.output_len * (token_s + (each.prompt_len + each.output_len / 2) * read_s)
            for each in trace
        )


def _read_s(bytes_per_s: float) -> float:
    return LLAMA_8B.kv_block_bytes(MOONCAKE_BLOCK) / bytes_per_s


CLASSES = (
    ReplicaClass("h200", StepCost(0.005, 1 / 50_000, _read_s(4e12)), 1_600, 2_048),
    ReplicaClass("l40s", StepCost(0.020, 1 / 10_000, _read_s(0.8e12)), 370, 512),
)
"""Fastest first. An H200 reads the model in 4 ms, an L40S (48 GB, 0.86 TB/s, 181 TFLOP/s) in 19 ms."""


def copies_for(trace: Sequence[TraceRequest], replica: ReplicaClass, mean_replicas: float) -> float:
    """How many times the trace's requests are to come for so many replicas to have enough to do.

    Raises:
        InvalidParameter: they all come at one moment.
    """
    times = [each.arrival_s for each in trace]
    seconds = max(times) - min(times)
    if seconds <= 0:
        raise InvalidParameter("trace", "trace: its requests all come at one moment; there is nothing to follow")
    return mean_replicas * seconds / replica.demand(trace)


def superposed(trace: Sequence[TraceRequest], copies: float, seed: int) -> list[TraceRequest]:
    """A trace's requests several times over, in order of their arrival, which begins with 0.

    Each copy comes a little later than the trace, by a random time, and shares no prefix with the others; of a copy
    that is not whole, each request is there with that probability.
    """
    rng = random.Random(seed)
    num_ids = 1 + max((max(each.hash_ids) for each in trace if each.hash_ids), default=0)
    result: list[TraceRequest] = []
    for number in range(math.ceil(copies)):
        share, shift = copies - number, rng.uniform(0, LONGEST_SHIFT_S)
        for each in trace:
            if share >= 1 or rng.random() < share:
                ids = each.hash_ids and tuple(hash_id + number * num_ids for hash_id in each.hash_ids)
                result.append(each._replace(arrival_s=each.arrival_s + shift, hash_ids=ids))
    result.sort(key=lambda each: each.arrival_s)
    start = result[0].arrival_s if result else 0.0
    return [each._replace(arrival_s=each.arrival_s - start) for each in result]


def scaled_requests(trace: Sequence[TraceRequest]) -> list[EngineRequest]:
    """Engine requests of the scaled world, whose time goes by SCALE times as fast."""
    return simulated_requests([each._replace(arrival_s=each.arrival_s / SCALE) for each in trace])
