"""The engine's loop body: schedule → submit → update, one step after another, or the next beside the one before."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from engine.config import EngineConfig, ModelConfig
from engine.executor.uniproc import UniProcExecutor
from engine.hub import load_model_config
from engine.kv_cache.block_hash import root_hash
from engine.kv_cache.events import BlockStored, KVEvent
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.metrics import EngineMetrics
from engine.outputs import EngineLoad, EngineOutput, SampledStep, ScheduledStart, ScheduledStep, SchedulerOutput
from engine.protocols import Executor, StepHandle
from engine.request import Clock, EngineRequest, FinishReason, Request, RequestStatus
from engine.sampling_params import InvalidParameter, SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler.results import last_output
from engine.scheduler.scheduler import NO_WORK
from engine.step_times import NO_STEPS

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

PROBE = EngineRequest(
    request_id="probe", prompt_token_ids=(0,), params=SamplingParams(temperature=0.0, max_tokens=1), seed=0
)


@dataclass(frozen=True, slots=True)
class CoreStep:
    """What a step gave.

    Attributes:
        outputs: one for each request that has news.
        kv_events: how the set of cached blocks changed, in order.
        load: after the step.
    """

    outputs: list[EngineOutput]
    kv_events: list[KVEvent]
    load: EngineLoad


class _Refused:
    """Handle of a step that the executor did not even start."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> list[SampledStep]:
        raise self._error


def _noting_interrupts(method: Callable[P, R]) -> Callable[P, R]:
    """A method of EngineCore after whose interruption (Ctrl-C) the engine starts over."""

    @wraps(method)
    def noting(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            core: Any = args[0]
            core._interrupted = True
            raise

    return noting


class EngineCore:
    """Scheduler, KV blocks and executor of one replica. Tokens in, tokens out.

    Where the executor overlaps steps, the device runs step N while this thread takes in the results of step N - 1 and
    schedules step N + 1; with an executor that does not, each step is taken in as soon as it was submitted:

        device       | step 1     | step 2     | step 3     |
        this thread  | schedule 2 | update 1, schedule 3 | update 2, ...

    A step that fails costs nothing but time, whatever failed in it: its requests go on probation, where each is tried
    again alone (see `scheduler.probation.Probation`). One that fails alone, too, is to blame, or the engine is. So
    before it is told its error, the engine computes one token of no request. If that works, the request is to blame and
    the engine goes on, however often such requests come. If it fails, every step does: the engine has ended, and none
    of its requests was told that it failed.

    All methods are called on one thread. The GIL is released in the executor's tensor work and nowhere else.

    Args:
        monotonic: seconds on a clock that is never set, by which steps are timed; by `clock` where there is none.

    Raises:
        InvalidParameter: a request of max_model_len would not fit the KV blocks that there is memory for.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        *,
        clock: Clock = time.time,
        monotonic: Clock | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self._executor = executor
        self._clock = clock
        self._monotonic = monotonic or clock
        self._num_blocks = _num_kv_blocks(config, model_config, executor)
        executor.allocate_kv_cache(self._num_blocks)
        self._kv_cache, self._scheduler = self._new_bookkeeping()
        self.metrics = EngineMetrics()
        self.metrics.observe_load(self._scheduler.load())
        self._ended: list[EngineOutput] = []
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle, float]] = deque()  # with when they were planned
        self._num_received = 0
        self._step_times = NO_STEPS
        self._last_step_ended = 0.0
        self._death: Exception | None = None
        self._interrupted = False

    def _new_bookkeeping(self) -> tuple[KVCacheManager, Scheduler]:
        config, model_config = self.config, self.model_config
        kv_cache = KVCacheManager(
            self._num_blocks,
            block_size=config.block_size,
            root=root_hash(model_config, config.block_size),
            enable_prefix_caching=config.enable_prefix_caching,
        )
        scheduler = Scheduler(
            kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=model_config.max_model_len,
            policy=config.scheduling_policy,
            clock=self._clock,
        )
        return kv_cache, scheduler

    @classmethod
    def from_config(cls, config: EngineConfig, *, clock: Clock = time.time) -> EngineCore:
        """Finds the model, loads it and reserves the KV blocks."""
        model_config = load_model_config(config)
        executor = UniProcExecutor(config, model_config)
        return cls(config, model_config, executor, clock=clock, monotonic=time.monotonic)

    @_noting_interrupts
    def add_request(self, spec: EngineRequest) -> None:
        """Queues a request.

        Raises:
            InvalidParameter: this engine cannot run it.
            ValueError: its id is in use.
            RuntimeError: the engine has ended.
        """
        self._num_received += 1
        self._check_alive()
        self.check_request(spec)
        if self._interrupted:
            self._ended = self._start_over()
        self._scheduler.add(Request.of(spec, self._clock()))
        self.metrics.observe_start(len(spec.prompt_token_ids))

    @_noting_interrupts
    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests and frees their blocks at once; unknown ids are ignored. The next step reports the end."""
        if self._interrupted:
            return  # all end with the next step
        for request_id in request_ids:
            request = self._scheduler.abort(request_id)
            if request is not None:
                self._ended.append(last_output(request, None))

    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        if self._death is not None:
            return False
        return bool(self._ended or self._in_flight or self._interrupted) or self._scheduler.has_unfinished()

    @_noting_interrupts
    def step(self) -> CoreStep:
        """Starts the next step and waits for the oldest in flight, which is the same one unless steps overlap.

        With overlap the first step of many gives nothing yet, and once there is nothing more to start, the last is
        waited for at once.

        Raises:
            Exception: of the executor, which failed without any request in it as well. The engine has ended then.
            RuntimeError: it had ended before.
        """
        self._check_alive()
        outputs = self._start_over() if self._interrupted else self._ended
        self._ended = []
        if self._in_flight or self._scheduler.has_unfinished():
            outputs += self._run()
        load = self.load()
        self.metrics.observe_load(load)
        self.metrics.observe_step(outputs, **self._scheduler.take_counts()._asdict())
        if self.config.debug_integrity and not self.has_work():
            self.check_integrity()
        events = self._scheduler.take_events()
        self._scheduler.ended.clear()
        return CoreStep(outputs, events, load)

    def load(self) -> EngineLoad:
        return replace(self._scheduler.load(), received=self._num_received, step_times=self._step_times)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; False, and nothing done, while requests run."""
        return self._kv_cache.reset_prefix_cache()

    def kv_snapshot(self) -> list[BlockStored]:
        """The blocks that are cached now, in no particular order."""
        return self._kv_cache.snapshot()

    def check_integrity(self) -> None:
        """Checks all bookkeeping; AssertionError where it contradicts itself."""
        self._scheduler.check_integrity()

    def check_request(self, spec: EngineRequest) -> None:
        """Refuses what this engine cannot run. Reads constants only, so any thread may call it.

        Raises:
            InvalidParameter: the prompt is empty or does not fit, a token is none of the model's, or the request stands
                for several.
        """
        limit = self.model_config.max_model_len
        num_tokens = len(spec.prompt_token_ids) + len(spec.output_token_ids)
        if not spec.prompt_token_ids:
            raise InvalidParameter("prompt", "prompt: must have at least one token")
        if num_tokens >= limit:
            raise InvalidParameter("prompt", f"prompt has {num_tokens:,} tokens; the model's context is {limit:,}")
        # One such token would fail the step of all requests beside it.
        size = self.model_config.vocab_size
        for token_ids in (spec.prompt_token_ids, spec.output_token_ids):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
                raise InvalidParameter(
                    "prompt", f"prompt has token ids beyond the model's, which are 0 to {size - 1:,}"
                )
        if spec.params.n != 1:
            raise InvalidParameter.of("n", spec.params.n, "an engine request is one sequence; the Processor splits n")

    def shutdown(self) -> None:
        """Gives the executor's memory back. May be called twice."""
        self._executor.shutdown()

    def _run(self) -> list[EngineOutput]:
        if self._in_flight and isinstance(self._in_flight[-1][1], _Refused):
            return self._take_in()  # the step before it was taken in; nothing starts before this one has failed
        planned = self._monotonic()
        work = self._scheduler.schedule()
        if work.steps:
            self._submit(work, planned)
        is_first = len(self._in_flight) == 1 and bool(work.steps)
        if not self._in_flight or (is_first and self._executor.overlaps):
            return self._scheduler.update(NO_WORK, ())
        return self._take_in()

    def _submit(self, work: SchedulerOutput, planned: float) -> None:
        try:
            handle = self._executor.submit(work)
            if self._in_flight:
                self.metrics.observe_overlap()
        except Exception as error:
            handle = _Refused(error)
        self._in_flight.append((work, handle, planned))

    def _take_in(self) -> list[EngineOutput]:
        """Waits for the oldest step in flight."""
        work, handle, planned = self._in_flight[0]
        self.metrics.observe_executed_step()
        try:
            sampled = handle.result()
        except Exception as error:
            self.metrics.observe_failed_step()
            logger.exception("step_failed requests=%d", len(work.steps))
            message = f"a step of the engine failed: {error}"
            # They hold the step's tensors, and it may be memory that was missing.
            traceback.clear_frames(error.__traceback__)
        else:
            self._in_flight.popleft()
            outputs = self._scheduler.update(work, sampled)
            self._note_time(work, planned)
            self.metrics.observe_computed(work.num_tokens)
            return outputs
        return self._recover(work, message)

    def _note_time(self, work: SchedulerOutput, planned: float) -> None:
        """A step's own time: one that was planned while the step before it ran counts from that one's end."""
        now = self._monotonic()
        self._step_times = self._step_times.after(work.num_tokens, max(0.0, now - max(planned, self._last_step_ended)))
        self._last_step_ended = now

    def _start_over(self) -> list[EngineOutput]:
        """After Ctrl-C nobody knows how far anything came: all requests end, and nothing cached is trusted.

        So do those that had ended, with outputs that may be lost: only that they were aborted is told as it was.
        Another one in here only makes the next call begin again.
        """
        self._executor.reset()
        requests = [*self._scheduler.ended, *self._scheduler.requests.values()]
        self._in_flight.clear()
        kv_cache, scheduler = self._new_bookkeeping()
        scheduler.ended += requests
        self._kv_cache, self._scheduler = kv_cache, scheduler
        self._kv_cache.reset_prefix_cache()  # for those who follow its events
        self._interrupted = False
        outputs = []
        for request in requests:
            is_aborted = request.finish_reason is FinishReason.ABORT
            if not is_aborted:
                request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ERROR
            outputs.append(last_output(request, None if is_aborted else "the step was interrupted"))
        return outputs

    def _check_alive(self) -> None:
        if self._death is not None:
            raise RuntimeError(f"the engine ended: {self._death!r}") from self._death

    def _recover(self, failed: SchedulerOutput, message: str) -> list[EngineOutput]:
        """After the oldest step in flight failed: the end of the request that is to blame, if that is known by now."""
        self._in_flight.clear()
        try:
            self._executor.reset()
            outputs = self._scheduler.fail_step(failed, message)
            if outputs:
                self._probe()
        except Exception as error:
            self._death = error
            raise
        return outputs

    def _probe(self) -> None:
        """Computes one token of no request. No other request is in the executor, and none has blocks."""
        pool = self._kv_cache.block_pool
        blocks = pool.take(1)
        start = ScheduledStart(PROBE, PROBE.prompt_token_ids, (blocks[0].block_id,), num_computed_tokens=0)
        step = ScheduledStep(PROBE.request_id, 0, 1, (), samples=True)
        self._executor.submit(SchedulerOutput((step,), (start,))).result()
        self._executor.reset()
        pool.free(blocks)


def _num_kv_blocks(config: EngineConfig, model_config: ModelConfig, executor: Executor) -> int:
    fitting = executor.kv_blocks_that_fit() if config.num_kv_blocks is None else config.num_kv_blocks
    needed = -(-model_config.max_model_len // config.block_size)
    if fitting < needed:
        room = fitting * config.block_size
        needed_bytes = needed * model_config.kv_block_bytes(config.block_size)
        raise InvalidParameter(
            "max_model_len",
            f"max_model_len={model_config.max_model_len:,}: one request of that length needs {needed:,} KV blocks "
            f"({needed_bytes:,} bytes) and there is room for {fitting:,}; set max_model_len to {room:,} or less, or "
            f"raise {'num_kv_blocks' if config.num_kv_blocks is not None else 'kv_cache_memory_bytes'} "
            "(on a GPU also gpu_memory_utilization)",
        )
    return fitting
