"""What runs in the next step, and what becomes of its results."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from engine.config import SchedulingPolicy
from engine.kv_cache.events import KVEvent
from engine.kv_cache.free_block_queue import KVCacheBlock
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.outputs import (
    EngineLoad,
    EngineOutput,
    SampledStep,
    ScheduledStep,
    SchedulerOutput,
)
from engine.request import Clock, FinishReason, Request, RequestStatus
from engine.sampling_params import InvalidParameter
from engine.scheduler.request_queue import MIN_DEAD_TO_COMPACT, RequestQueue
from engine.scheduler.results import apply_result, last_output, timing_of, token_limit
from engine.scheduler.step_plan import StepPlan

BY_ORDER = attrgetter("order")


class SchedulerCounts(NamedTuple):
    """What happened since the last call of take_counts.

    Attributes:
        preemptions: times that a request lost its blocks.
        prefix_queried: tokens of requests that started for the first time and could use the prefix cache.
        prefix_hit: those of them that it had.
    """

    preemptions: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0


class Scheduler:
    """Decides, step by step, how many tokens of which request are computed.

    There is one rule: every request asks for num_tokens (with drafts) - num_computed_tokens, clipped to what the step
    has room for; running requests first, then waiting ones. Chunked prefill, decoding, mixed batches, verification of
    drafts and recomputation after a preemption all follow from it.

    And there is one order, `Request.order`: arrival in the queue under `fcfs`; priority, arrival time and arrival in
    the queue under `priority`. By it requests start, are served within a step, and (backwards) are preempted.

    Every running request has a part in every step: one token of the budget is kept for each.

    A step is a schedule(), its execution, and an update() or a fail_step() with the same SchedulerOutput; add() and
    abort() may come between any of these. The owner is the EngineCore; all is touched on its thread alone. The cost of
    a step follows the requests in it, not the number of blocks or of waiting requests.

    Attributes:
        requests: all that have not ended, by id.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: SchedulingPolicy = "fcfs",
        clock: Clock,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise InvalidParameter.of(
                "max_num_batched_tokens", max_num_batched_tokens, f"must be at least max_num_seqs, {max_num_seqs}"
            )
        self._kv = kv_cache_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._policy = policy
        self._clock = clock
        self.requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting = RequestQueue()
        self._sequence = itertools.count()
        self._deadlines: list[tuple[float, str]] = []
        self._released: list[str] = []
        self._early_outputs: list[EngineOutput] = []
        self._counts = SchedulerCounts()

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is in use.
        """
        spec = request.spec
        if spec.request_id in self.requests:
            raise ValueError(f"request_id={spec.request_id!r}: is in use")
        sequence = next(self._sequence)
        ranked = self._policy == "priority"
        request.order = (spec.priority, spec.arrival_time, sequence) if ranked else (0, 0.0, sequence)
        self.requests[spec.request_id] = request
        if request.num_tokens >= token_limit(request, self._max_model_len):
            self._end_early(request, FinishReason.LENGTH, self._clock())
            return
        self._kv.prepare(request)
        self._waiting.push(request)
        if spec.deadline is not None:
            self._add_deadline(spec.deadline, spec.request_id)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request without an output, and frees its blocks; None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self._remove(request)
            self._finish(request, FinishReason.ABORT, self._clock())
        return request

    def fail_step(self, output: SchedulerOutput, error: str) -> list[EngineOutput]:
        """Ends the requests of a step that failed. The others wait on; the executor must have forgotten all.

        Nothing that the step computed can be matched by a later request: blocks get their names in update().
        """
        now = self._clock()
        outputs, self._early_outputs = self._early_outputs, []
        for step in output.steps:
            request = self.requests.get(step.request_id)
            if request is None:
                continue  # aborted while the step ran
            self._remove(request)
            self._finish(request, FinishReason.ERROR, now)
            outputs.append(last_output(request, error))
        self._released.clear()
        return outputs

    # ---- a step ----

    def schedule(self) -> SchedulerOutput:
        """Plans the next step and gives its requests their blocks.

        Without steps there is nothing to execute, but update() is due all the same: it reports what ended unrun.
        """
        plan = StepPlan(self._max_num_batched_tokens, self._clock())
        self._abort_overdue(plan.now)
        self._continue_running(plan)
        self._start_waiting(plan)
        released: tuple[str, ...] = ()
        if plan.steps:
            released, self._released = tuple(self._released), []
        return SchedulerOutput(tuple(plan.steps), tuple(plan.starts), released)

    def update(self, output: SchedulerOutput, sampled: Sequence[SampledStep]) -> list[EngineOutput]:
        """Takes in the results of a step that ran; one output for each request that has news.

        Args:
            sampled: one for each of output.steps. Verified drafts give their accepted part and one token more.
        """
        now = self._clock()
        outputs, self._early_outputs = self._early_outputs, []
        any_finished = False
        for step, result in zip(output.steps, sampled, strict=True):
            request = self.requests.get(step.request_id)
            if request is None:
                continue  # aborted while the step ran
            news = self._report(request, step, result, now)
            if news is not None:
                outputs.append(news)
                any_finished = any_finished or news.finish_reason is not None
        if any_finished:
            self._running = [request for request in self._running if not request.is_finished]
        return outputs

    # ---- what others want to know ----

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self.requests or self._early_outputs)

    def load(self) -> EngineLoad:
        """How busy the engine is. O(running)."""
        missing = (request.num_tokens - request.num_computed_tokens for request in self._running)
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prefill_tokens=self._waiting.num_tokens + sum(count for count in missing if count > 1),
            kv_blocks_used=self._kv.block_pool.num_used,
            kv_blocks_total=self._kv.block_pool.num_blocks,
        )

    def take_events(self) -> list[KVEvent]:
        """Changes of the prefix cache since the last call. To be called after every step: they are kept until then."""
        return self._kv.take_events()

    def take_counts(self) -> SchedulerCounts:
        counts, self._counts = self._counts, SchedulerCounts()
        return counts

    def check_integrity(self) -> None:
        """Checks all bookkeeping, that of the KV blocks included. For tests and an idle engine.

        Raises:
            AssertionError: it contradicts itself.
        """
        self._kv.check_integrity()
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting), "a request waits twice"
        assert sum(request.num_tokens for request in waiting) == self._waiting.num_tokens, (
            "waiting tokens are miscounted"
        )
        assert self._running == sorted(self._running, key=BY_ORDER), "running requests are out of order"
        assert len(self._running) <= self._max_num_seqs, "more requests run than may"
        known = {request.request_id: request for request in (*waiting, *self._running)}
        assert known == self.requests, "a request is neither waiting nor running, or it is both"
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request.request_id} waits"
            assert request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"
        running = {request.request_id for request in self._running}
        assert running == self._kv.req_to_blocks.keys(), "not exactly the running requests have blocks"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING, f"{request.request_id} runs"
            assert request.num_computed_tokens < request.num_tokens, f"{request.request_id} has nothing to compute"
            blocks = self._kv.req_to_blocks[request.request_id]
            assert len(blocks) * self._kv.block_size >= request.num_computed_tokens, (
                f"{request.request_id} lacks blocks"
            )
            for index, block in enumerate(blocks):
                known_hash = block.block_hash in (None, *request.block_hashes[index : index + 1])
                assert known_hash, f"{request.request_id} has {block} with another content"

    # ---- schedule ----

    def _continue_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self._running):
            request = self._running[index]
            kept_for_others = len(self._running) - index - 1
            wanted = request.num_tokens - request.num_computed_tokens
            drafts = request.spec_token_ids
            if drafts:
                # The last token that can be put out is sampled, not drafted.
                drafts = drafts[: max(token_limit(request, self._max_model_len) - request.num_tokens - 1, 0)]
            count = min(wanted + len(drafts), plan.budget - kept_for_others)
            blocks = self._allocate_or_preempt(request, count, plan)
            if blocks is None:
                return  # it was the last in order
            plan.add_step(
                request,
                count,
                blocks_to_come=self._blocks_between(request.num_computed_tokens + count, request.num_tokens),
                new_blocks=blocks,
                drafts=drafts[: max(count - wanted, 0)],
            )
            index += 1

    def _allocate_or_preempt(self, request: Request, count: int, plan: StepPlan) -> list[KVCacheBlock] | None:
        """Blocks for the request, if need be those of requests behind it; None if it had to go itself."""
        while (blocks := self._kv.allocate_slots(request, count)) is None:
            victim = self._running.pop()
            if not self._running:
                self._fail_oversized(victim, plan.now)
                return None
            self._preempt(victim)
            if victim is request:
                return None
        return blocks

    def _start_waiting(self, plan: StepPlan) -> None:
        if not self._waiting or len(self._running) >= self._max_num_seqs:
            return
        being_computed: set[bytes] = set()
        for request, step in zip(self._running, plan.steps, strict=True):
            being_computed.update(self._hashes_of(request, step))
        held: list[Request] = []
        while self._waiting and plan.budget > 0 and len(self._running) + len(held) < self._max_num_seqs:
            request = self._waiting.peek()
            cached, missing = self._kv.match_prefix(request)
            if missing in being_computed:
                # The next step finds that block (or a failure ends all), so this wait cannot go on without progress.
                held.append(self._waiting.pop())
                continue
            num_cached = len(cached) * self._kv.block_size
            count = min(request.num_tokens - num_cached, plan.budget)
            # It starts only if all of its tokens have room, else it would lose its first blocks before its last chunk.
            blocks_to_come = self._blocks_between(num_cached + count, request.num_tokens)
            blocks = self._kv.allocate_slots(request, count, cached, reserve=plan.promised + blocks_to_come)
            if blocks is None and self._running:
                break
            self._waiting.pop()
            if blocks is None:
                self._fail_oversized(request, plan.now)
                continue
            self._start(request, num_cached, plan.now)
            plan.add_start(request, self._kv.req_to_blocks[request.request_id])
            plan.add_step(request, count, blocks_to_come=blocks_to_come)
            being_computed.update(self._hashes_of(request, plan.steps[-1]))
        for request in held:
            self._waiting.push(request)

    def _start(self, request: Request, num_cached: int, now: float) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached
        if request.scheduled_at is None:
            request.scheduled_at = now
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            if self._kv.enable_prefix_caching and not request.owes_prompt_logprobs:
                preemptions, queried, hit = self._counts
                self._counts = SchedulerCounts(preemptions, queried + request.num_tokens, hit + num_cached)
        insort(self._running, request, key=BY_ORDER)

    def _blocks_between(self, done: int, total: int) -> int:
        return self._kv.blocks_for(total) - self._kv.blocks_for(done) if done < total else 0

    def _hashes_of(self, request: Request, step: ScheduledStep) -> list[bytes]:
        """Of the blocks that a step makes full."""
        size, first = self._kv.block_size, step.num_computed_tokens
        return request.block_hashes[first // size : (first + step.num_tokens) // size]

    def _add_deadline(self, deadline: float, request_id: str) -> None:
        heapq.heappush(self._deadlines, (deadline, request_id))
        # Most requests end long before their deadline, and their entries must not pile up until then.
        if len(self._deadlines) > 2 * len(self.requests) + MIN_DEAD_TO_COMPACT:
            alive = ((request.spec.deadline, request_id) for request_id, request in self.requests.items())
            self._deadlines = [(deadline, request_id) for deadline, request_id in alive if deadline is not None]
            heapq.heapify(self._deadlines)

    def _abort_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            # An entry may be that of an earlier request with the same id.
            if request is not None and request.spec.deadline == deadline:
                self._remove(request)
                self._end_early(request, FinishReason.ABORT, now)

    def _preempt(self, request: Request) -> None:
        self._kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._released.append(request.request_id)
        self._waiting.push(request)
        self._counts = self._counts._replace(preemptions=self._counts.preemptions + 1)

    # ---- update ----

    def _report(self, request: Request, step: ScheduledStep, result: SampledStep, now: float) -> EngineOutput | None:
        if result.error is not None:
            # What it computed is not stored: whatever made the logits unusable stands in its blocks.
            self._finish(request, FinishReason.ERROR, now)
            return last_output(request, result.error)
        new, logprobs, stop = apply_result(request, step, result, self._max_model_len)
        self._kv.store_blocks(request, step.num_computed_tokens)
        if not new and result.prompt_logprobs is None:
            return None
        is_first = bool(new) and request.first_token_at is None
        if is_first:
            request.first_token_at = now
        if stop is not None:
            self._finish(request, stop.reason, now)
        return EngineOutput(
            step.request_id,
            new,
            logprobs,
            result.prompt_logprobs,
            stop.reason if stop else None,
            stop.stop_reason if stop else None,
            request.num_cached_tokens,
            timing_of(request) if is_first or stop else None,
        )

    # ---- ends ----

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """Frees what it holds. To take it out of those that run or wait is the caller's part."""
        if request.status is RequestStatus.RUNNING:
            self._kv.free(request)
            self._released.append(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_at = now
        del self.requests[request.request_id]

    def _remove(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)

    def _end_early(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Finishes a request outside of update(), which will report it."""
        self._finish(request, reason, now)
        self._early_outputs.append(last_output(request, error))

    def _fail_oversized(self, request: Request, now: float) -> None:
        pool = self._kv.block_pool.num_blocks
        error = f"request has {request.num_tokens:,} tokens; all {pool:,} KV blocks hold {pool * self._kv.block_size:,}"
        self._end_early(request, FinishReason.ERROR, now, error)
