"""What runs in the next step, and what becomes of its results."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Sequence
from operator import attrgetter

from engine.config import SchedulingPolicy
from engine.kv_cache.events import KVEvent
from engine.kv_cache.free_block_queue import KVCacheBlock
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.outputs import EngineLoad, EngineOutput, SampledStep, ScheduledStep, SchedulerOutput
from engine.request import Clock, FinishReason, Request, RequestStatus
from engine.sampling_params import InvalidParameter
from engine.scheduler.claims import PromptClaims
from engine.scheduler.counts import SchedulerCounts, load_of
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.integrity import check_requests
from engine.scheduler.probation import Probation
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.results import apply_result, last_output, timing_of, token_limit, waits_for_result
from engine.scheduler.scheduled_batch import ScheduledBatch, StepsInFlight

BY_ORDER = attrgetter("order")
NO_WORK = SchedulerOutput(())


class Scheduler:
    """Decides, step by step, how many tokens of which request are computed.

    There is one rule: every request asks for num_tokens (pending ones and drafts included) - num_computed_tokens,
    clipped to what the step has room for; running requests first, then waiting ones. Chunked prefill, decoding, mixed
    batches, verification of drafts and recomputation after a preemption all follow from it.

    And there is one order, `Request.order`: arrival in the queue under `fcfs`; priority, arrival time and arrival in
    the queue under `priority`. By it requests start, are served within a step, and (backwards) are preempted.

    Every running request has a part in every step, for which one token of the budget is kept, unless it has to wait for
    a step in flight, or for requests on probation: after a step that failed (see Probation).

    A step is a schedule(), its execution, and an update() or a fail_step() with the same SchedulerOutput; add() and
    abort() may come between any of these, and so may the schedule() of later steps: the device runs steps in their
    order, and in it their results are taken in. What a step in flight samples is pending. A request whose last token is
    pending computes it in the next step, though nobody here knows yet which one it is. Where that token ends the
    request, what later steps computed for it is dropped: stops are noticed late, lengths are not.

    The owner is the EngineCore; all is touched on its thread alone. The cost of a step follows the requests in it, not
    the number of blocks or of waiting requests.

    Attributes:
        requests: all that have not ended, by id.
        ended: those whose end nobody was told yet; the owner clears it once he has.
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
        self.ended: list[Request] = []
        self._running: list[Request] = []
        self._waiting = RequestQueue()
        self._sequence = itertools.count()
        self._deadlines = Deadlines()
        self._in_flight = StepsInFlight()
        self._probation = Probation()
        self._released: list[str] = []
        self._early_outputs: list[EngineOutput] = []
        self._claims = PromptClaims()
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
        if self._kv.enable_prefix_caching:
            self._claims.claim(request, len(self._kv.match_prefix(request).blocks), self._kv.block_size)
        self._waiting.push(request)
        if spec.deadline is not None:
            self._deadlines.add(spec.deadline, request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request without an output, and frees its blocks; None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self._remove(request)
            self._finish(request, FinishReason.ABORT, self._clock())
        return request

    # ---- a step ----

    def schedule(self) -> SchedulerOutput:
        """Plans the next step and gives its requests their blocks.

        Without steps there is nothing to execute, but update() is due all the same: it reports what ended unrun.
        """
        batch = ScheduledBatch(self._max_num_batched_tokens, self._clock())
        for request in self._deadlines.pop_overdue(batch.now):
            self._remove(request)
            self._end_early(request, FinishReason.ABORT, batch.now)
        if self._probation:
            self._try_alone(batch)
        else:
            self._continue_running(batch)
            self._start_waiting(batch)
        if not batch.steps:
            return NO_WORK
        released, self._released = tuple(self._released), []
        return self._in_flight.add(batch, released)

    def update(self, output: SchedulerOutput, sampled: Sequence[SampledStep]) -> list[EngineOutput]:
        """Takes in the results of the oldest step in flight; one output for each request that has news.

        Args:
            sampled: one for each of output.steps. Verified drafts give their accepted part and one token more.
        """
        now, any_finished = self._clock(), False
        outputs, self._early_outputs = self._early_outputs, []
        requests = self._in_flight.land(output)
        for request, step, result in zip(requests, output.steps, sampled, strict=True):
            if request.is_finished:
                continue  # aborted while the step ran, or ended by the step before
            news = self._report(request, step, result, now)
            if news is not None:
                outputs.append(news)
                any_finished = any_finished or news.finish_reason is not None
        if any_finished:
            self._running = [request for request in self._running if not request.is_finished]
        if self._probation:
            self._probation.note_passed(requests, output.steps)
        return outputs

    def fail_step(self, output: SchedulerOutput, error: str) -> list[EngineOutput]:
        """Puts the requests of the oldest step in flight, which failed, on probation, and forgets the steps after it.

        All that run are preempted: the executor must have forgotten them. Nothing that these steps computed can be
        matched by a later request: blocks get their names in update().

        Returns:
            The end of the one that failed alone while it was on probation, if there is one.
        """
        outputs = []
        failed = zip(self._in_flight.drop(output), output.steps, strict=True)
        for request, step in sorted(failed, key=lambda share: share[0].order):
            if request in self._probation:
                self._remove(request)
                self._finish(request, FinishReason.ERROR, self._clock())
                outputs.append(last_output(request, error))
            elif not request.is_finished:
                self._probation.begin(request, step)
        while self._running:
            self._preempt(self._running.pop())
        self._released.clear()
        return outputs

    # ---- what others want to know ----

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        """Whether a step would do or report something. Steps in flight may be left all the same."""
        return bool(self.requests or self._early_outputs)

    def load(self) -> EngineLoad:
        """How busy the engine is. O(running)."""
        return load_of(self._running, self._waiting, self._kv.block_pool)

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
        assert len(self._running) <= self._max_num_seqs, "more requests run than may"
        check_requests(self.requests, self._running, self._waiting, self._in_flight, self._kv)
        assert set(self._probation) <= set(self.requests.values()), "a request that has ended is on probation"

    # ---- schedule ----

    def _continue_running(self, batch: ScheduledBatch) -> None:
        index = 0
        while index < len(self._running):
            request = self._running[index]
            kept_for_others = len(self._running) - index - 1
            if request.num_pending_tokens and waits_for_result(request, self._max_model_len):
                # It may ask for a block when it goes on.
                batch.promised += 1
                index += 1
                continue
            wanted, drafts = request.num_wanted_tokens, request.spec_token_ids
            if drafts:
                # The last token that can be put out is sampled, not drafted.
                drafts = drafts[: max(token_limit(request, self._max_model_len) - request.num_tokens - 1, 0)]
            count = min(wanted + len(drafts), batch.budget - kept_for_others)
            if not self._continue(request, count, batch, drafts[: max(count - wanted, 0)]):
                return  # it was the last in order
            index += 1

    def _continue(self, request: Request, count: int, batch: ScheduledBatch, drafts: Sequence[int] = ()) -> bool:
        """A running request's part in the step, if need be with blocks of those behind it; False if it had to go."""
        while (blocks := self._kv.allocate_slots(request, count)) is None:
            victim = self._running.pop()
            # One whose pending token ends it needs no more room; any other fails when it is to start again.
            if not self._running and not victim.num_pending_tokens:
                self._fail_oversized(victim, batch.now)
                return False
            self._preempt(victim)
            if victim is request:
                return False
        blocks_to_come = self._blocks_to_come(request, request.num_computed_tokens + count)
        batch.add_step(request, count, blocks_to_come=blocks_to_come, new_blocks=blocks, drafts=drafts)
        return True

    def _start_waiting(self, batch: ScheduledBatch) -> None:
        if not self._waiting or len(self._running) >= self._max_num_seqs:
            return
        size = self._kv.block_size
        being_computed = {*batch.blocks_made_full(size), *self._in_flight.blocks_made_full(size)}
        held: list[Request] = []
        while self._waiting and batch.budget > 0 and len(self._running) + len(held) < self._max_num_seqs:
            request = self._waiting.peek()
            if request.status is RequestStatus.PREEMPTED and request in self._in_flight:
                break  # its result may add to its tokens, or end it
            cached, missing = self._kv.match_prefix(request)
            if missing in being_computed:
                # A step soon finds that block (or a failure ends all), so this wait cannot go on without progress.
                held.append(self._waiting.pop())
            elif self._start(request, cached, batch):
                being_computed.update(request.block_hashes[len(cached) : request.num_computed_tokens // size])
            elif self._running:
                break
            else:
                self._waiting.remove(request)
                self._fail_oversized(request, batch.now)
        for request in held:
            self._waiting.push(request)

    def _try_alone(self, batch: ScheduledBatch) -> None:
        """The next part of the first request on probation, as soon as nothing else runs on the device."""
        if self._in_flight:
            return
        request = next(iter(self._probation))
        if request.is_running:
            self._continue(request, min(request.num_wanted_tokens, batch.budget), batch)
            return
        cached, _ = self._kv.match_prefix(request)
        while not self._start(request, cached, batch):
            # Those that have passed make room. There is enough at last: it had room in the step that failed.
            self._preempt(self._running.pop())

    def _start(self, request: Request, cached: Sequence[KVCacheBlock], batch: ScheduledBatch) -> bool:
        """Lets a waiting request run; False, and nothing done, where its tokens have no room."""
        num_cached = len(cached) * self._kv.block_size
        count = min(request.num_tokens - num_cached, batch.budget)
        # It starts only if all of its tokens have room, else it would lose its first blocks before its last chunk.
        blocks_to_come = self._blocks_to_come(request, num_cached + count)
        if self._kv.allocate_slots(request, count, cached, reserve=batch.promised + blocks_to_come) is None:
            return False
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached
        if request.scheduled_at is None:
            request.scheduled_at = batch.now
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            if self._kv.enable_prefix_caching and not request.owes_prompt_logprobs:
                preemptions, queried, hit = self._counts
                self._counts = SchedulerCounts(preemptions, queried + request.num_tokens, hit + num_cached)
        insort(self._running, request, key=BY_ORDER)
        batch.add_start(request, self._kv.req_to_blocks[request.request_id])
        batch.add_step(request, count, blocks_to_come=blocks_to_come)
        return True

    def _blocks_to_come(self, request: Request, num_computed: int) -> int:
        """That its present tokens need beyond those for the first num_computed."""
        total = request.num_tokens + request.num_pending_tokens
        return self._kv.blocks_for(total) - self._kv.blocks_for(num_computed) if num_computed < total else 0

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
            self._finish_in_update(request, FinishReason.ERROR, now)
            return last_output(request, result.error)
        new, logprobs, stop, num_computed = apply_result(request, step, result, self._max_model_len)
        if request.is_running:
            self._kv.store_blocks(request, step.num_computed_tokens, num_computed)
        else:
            self._waiting.grow(len(new))  # it was preempted while the step ran
        if not new and result.prompt_logprobs is None:
            return None
        is_first = bool(new) and request.first_token_at is None
        if is_first:
            request.first_token_at = now
            self._claims.release(request)
        if stop is not None:
            self._finish_in_update(request, stop.reason, now)
        end: tuple[FinishReason | None, int | None] = (stop.reason, stop.stop_reason) if stop else (None, None)
        timing = timing_of(request) if is_first or stop else None
        return EngineOutput(
            step.request_id, new, logprobs, result.prompt_logprobs, *end, request.num_cached_tokens, timing
        )

    # ---- ends ----

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """Frees what it holds. To take it out of those that run or wait is the caller's part.

        Its blocks may pass to another request while a step in flight still writes to them: that write lands before any
        of a step that is yet to be scheduled, and only in blocks whose content has no name.
        """
        if request.is_running:
            self._kv.free(request)
            self._released.append(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_at = now
        self._claims.release(request)
        self._probation.leave(request)
        del self.requests[request.request_id]
        self.ended.append(request)

    def _finish_in_update(self, request: Request, reason: FinishReason, now: float) -> None:
        """Finishes a request; update() then takes all such out of those that run, at once."""
        if not request.is_running:
            self._waiting.remove(request)
        self._finish(request, reason, now)

    def _remove(self, request: Request) -> None:
        if request.is_running:
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
