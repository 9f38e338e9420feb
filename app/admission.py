"""When a new request would start, from what a replica has seen of those before it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Self

from engine.config import EngineConfig
from engine.outputs import EngineLoad, EngineOutput
from engine.request import Clock, EngineRequest


@dataclass(slots=True)
class StartEstimate:
    """How long a new request would wait for its turn. Lives on the replica's event loop.

    A request waits for two things, and for the longer of the two: that the prompts before it are computed, at the speed
    at which they were lately; and, where no seat (max_num_seqs, or room in the KV blocks) is free for it, that as many
    requests end as stand before it. By Little's law S seats in which a request stays D seconds are given up S / D times
    a second. D is the mean over requests that ended and those in the seats, as if these ended now: what is not known
    yet counts for the new request, and who knows nothing estimates 0.

    What was seen fades with `memory_s`, whether or not there is anything to see, so that an estimate cannot outlive the
    load that it was made from.

    Attributes:
        step_tokens: max_num_batched_tokens. The speed is measured only while more than a step's worth of prompts is
            queued; a step that is not full says nothing about it.
        by_priority: requests start in the order of their priority, and only then of their arrival.
        clock: in seconds, never set.
    """

    max_num_seqs: int
    step_tokens: int
    block_size: int
    by_priority: bool
    memory_s: float
    clock: Clock
    _now: float = field(init=False)
    # Requests without a token yet, in the order of their arrival: priority and tokens to compute.
    _pending: dict[str, tuple[int, int]] = field(init=False, default_factory=dict)
    _pending_tokens: int = field(init=False, default=0)
    _started: set[str] = field(init=False, default_factory=set)
    _running: int = field(init=False, default=0)
    _is_held_up: bool = field(init=False, default=False)
    _is_prefill_bound: bool = field(init=False, default=False)
    _seat_seconds: float = field(init=False, default=0.0)
    _ends: float = field(init=False, default=0.0)
    _prefill_seconds: float = field(init=False, default=0.0)
    _prefill_tokens: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._now = self.clock()

    @classmethod
    def of(cls, config: EngineConfig, max_wait_s: float | None, clock: Clock = time.monotonic) -> Self | None:
        """For an engine of that configuration; None where no wait is too long.

        With a memory of two limits, requests are refused from about the number on that start within the limit.
        """
        if max_wait_s is None:
            return None
        return cls(
            max_num_seqs=config.max_num_seqs,
            step_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            by_priority=config.scheduling_policy == "priority",
            memory_s=2 * max_wait_s,
            clock=clock,
        )

    def submit(self, request: EngineRequest) -> None:
        """Notes a request that the engine got."""
        self._advance()
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._pending[request.request_id] = (request.priority, num_tokens)
        self._pending_tokens += num_tokens
        self._find_bounds()

    def take(self, output: EngineOutput) -> None:
        """Notes what a request put out: its first tokens, or its end."""
        self._advance()
        request_id = output.request_id
        if output.new_token_ids and request_id in self._pending:
            num_tokens = self._leave_queue(request_id)
            self._started.add(request_id)
            if self._is_prefill_bound:
                self._prefill_tokens += num_tokens
        if output.finished and request_id in self._started:
            self._started.remove(request_id)
            self._ends += 1
        elif output.finished and request_id in self._pending:
            self._leave_queue(request_id)

    def after_step(self, load: EngineLoad) -> None:
        """Notes how busy the engine is, once the outputs of the step are taken."""
        self._advance()
        self._running = load.running
        free_tokens = (load.kv_blocks_total - load.kv_blocks_used) * self.block_size
        self._is_held_up = load.waiting > 0 and (
            load.running >= self.max_num_seqs or free_tokens < self._tokens_of_next(load.waiting)
        )
        self._find_bounds()

    def wait_s(self, priority: int) -> float:
        """Seconds until a request of that priority would start, if it came now."""
        self._advance()
        ahead = [tokens for other, tokens in self._pending.values() if not self.by_priority or other <= priority]
        return max(self._wait_for_prompts(sum(ahead)), self._wait_for_seat(len(ahead)))

    def _wait_for_prompts(self, tokens_ahead: int) -> float:
        if not self._prefill_seconds or not self._pending:
            return 0.0
        # The oldest one may be all but done.
        _, in_progress = next(iter(self._pending.values()))
        return tokens_ahead * self._prefill_seconds / (self._prefill_tokens + in_progress)

    def _wait_for_seat(self, num_ahead: int) -> float:
        seats = max(1, self._running) if self._is_held_up else self.max_num_seqs
        missing = len(self._started) + num_ahead + 1 - seats
        if missing <= 0:
            return 0.0
        seconds_in_seat = self._seat_seconds / (self._ends + seats)
        return missing * seconds_in_seat / seats

    def _tokens_of_next(self, waiting: int) -> int:
        """Of the request that would start next: those that wait came last."""
        tokens = [each for _, each in self._pending.values()]
        return tokens[-min(waiting, len(tokens))] if tokens else 0

    def _leave_queue(self, request_id: str) -> int:
        _, num_tokens = self._pending.pop(request_id)
        self._pending_tokens -= num_tokens
        return num_tokens

    def _find_bounds(self) -> None:
        self._is_prefill_bound = self._pending_tokens > self.step_tokens and not self._is_held_up

    def _advance(self) -> None:
        """Adds the time since the last call to what it was spent on."""
        before, self._now = self._now, self.clock()
        seconds = self._now - before
        kept = math.exp(-seconds / self.memory_s)
        self._ends *= kept
        self._prefill_tokens *= kept
        self._seat_seconds = self._seat_seconds * kept + len(self._started) * seconds
        self._prefill_seconds = self._prefill_seconds * kept + (seconds if self._is_prefill_bound else 0.0)
