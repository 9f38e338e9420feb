"""The engine for an asyncio program: tokens in, tokens out. What a replica holds."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from engine.config import EngineConfig, ModelConfig
from engine.core import CoreStep, EngineCore
from engine.kv_cache.events import BlockStored
from engine.outputs import EngineLoad, EngineOutput
from engine.request import Clock, EngineRequest, FinishReason

logger = logging.getLogger(__name__)

Sink = Callable[[EngineOutput], None]
T = TypeVar("T")


class EngineDeadError(RuntimeError):
    """The engine's thread has ended; nothing more will come from it."""


class EngineStalled(EngineDeadError):
    """The engine has work and makes no progress; a step that hangs cannot be interrupted."""


class AsyncEngineCore:
    """Runs an EngineCore on a thread of its own and hands its outputs to one asyncio loop.

    All methods are called on that loop; only the thread touches the core. Each step wakes the loop once.

    Args:
        stall_timeout_s: how long the engine may have work without ending a step before check_health says that it
            hangs; None is for ever.
        monotonic: seconds on a clock that is never set.
    """

    def __init__(
        self, core: EngineCore, *, stall_timeout_s: float | None = None, monotonic: Clock = time.monotonic
    ) -> None:
        self._core = core
        self._stall_timeout_s = stall_timeout_s
        self._monotonic = monotonic
        # When the thread last ended something, or began after a rest; None while it rests. Written by the thread.
        self._progress_at: float | None = None
        self._load = core.load()
        self._sinks: dict[str, Sink] = {}
        self._step_listeners: list[Callable[[CoreStep], None]] = []
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._death: BaseException | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="manta-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, clock: Clock = time.time, stall_timeout_s: float | None = None
    ) -> AsyncEngineCore:
        """Loads the model; blocks for as long as that takes."""
        return cls(EngineCore.from_config(config, clock=clock), stall_timeout_s=stall_timeout_s)

    @property
    def config(self) -> EngineConfig:
        return self._core.config

    @property
    def model_config(self) -> ModelConfig:
        return self._core.model_config

    @property
    def registry(self) -> CollectorRegistry:
        """This engine's metrics."""
        return self._core.metrics.registry

    @property
    def has_ended(self) -> bool:
        """Whether the engine failed for good. Outputs with an error that come before it is true are of their requests'
        own faults; those that come after it are of the engine's."""
        return self._has_ended

    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queues a request.

        Args:
            sink: called on the loop with every output of the request; the last one has a finish_reason.

        Raises:
            InvalidParameter: the engine cannot run it.
            ValueError: its id is in use.
            RuntimeError: this is not the loop that the engine is used on.
            EngineDeadError: the engine has ended or is shutting down.
        """
        self.check_health()
        if self._closing:
            raise EngineDeadError("the engine is shutting down and takes no new requests")
        self._core.check_request(request)
        if request.request_id in self._sinks:
            raise ValueError(f"request id {request.request_id!r} is in use")
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError("the engine is used on another event loop; it stays with the first one")
        self._loop = loop
        self._sinks[request.request_id] = sink
        self._idle.clear()
        self._commands.put(partial(self._core.add_request, request))

    async def generate(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        """Runs requests to their end, one item for each step that had news of them.

        Closing the iterator early aborts what is unfinished.
        """
        arrived: list[EngineOutput] = []
        news = asyncio.Event()

        def sink(output: EngineOutput) -> None:
            arrived.append(output)
            news.set()

        pending: set[str] = set()
        try:
            for request in requests:
                self.submit(request, sink)
                pending.add(request.request_id)
            while pending:
                await news.wait()
                news.clear()
                outputs, arrived = arrived, []
                pending.difference_update(output.request_id for output in outputs if output.finished)
                yield outputs
        finally:
            self.abort(pending)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; each one's sink gets an output with the reason `abort`. Unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._sinks]
        if known:
            self._commands.put(partial(self._core.abort, known))

    def add_step_listener(self, listener: Callable[[CoreStep], None]) -> None:
        """Calls the listener on the loop after each step, once the step's sinks have been called."""
        self._step_listeners.append(listener)

    async def kv_snapshot(self) -> list[BlockStored]:
        """The blocks that are cached now, in no particular order: for a reader who missed events."""
        return await self._on_thread(self._core.kv_snapshot)

    async def check_integrity(self) -> None:
        """Checks all bookkeeping; AssertionError where it contradicts itself."""
        await self._on_thread(self._core.check_integrity)

    def check_health(self) -> None:
        """Raises where the engine does nothing more. A step that hangs does not keep this from answering.

        Raises:
            EngineStalled: it had work for stall_timeout_s and ended no step.
            EngineDeadError: it has ended.
        """
        if self._death is not None:
            raise EngineDeadError(f"the engine ended: {self._death!r}") from self._death
        if not self._thread.is_alive():
            raise EngineDeadError("the engine was shut down")
        progress_at = self._progress_at
        if self._stall_timeout_s is not None and progress_at is not None:
            seconds = self._monotonic() - progress_at
            if seconds >= self._stall_timeout_s:
                raise EngineStalled(f"the engine has work and has made no step for {seconds:.1f} s")

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for drain_timeout seconds, aborts the rest and ends."""
        self._closing = True
        if drain_timeout > 0 and self._sinks:
            try:
                await asyncio.wait_for(self._idle.wait(), drain_timeout)
            except TimeoutError:
                logger.warning("drain_timeout seconds=%.1f unfinished=%d", drain_timeout, len(self._sinks))
        self.abort(list(self._sinks))
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._fail_answers()

    async def _on_thread(self, fn: Callable[[], T]) -> T:
        self.check_health()
        loop = self._loop = self._loop or asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        # The thread may end before it comes to this.
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

        def settle(outcome: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(outcome)  # type: ignore[arg-type]

        def run() -> None:
            try:
                outcome = fn()
            except Exception as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, outcome, None)

        self._commands.put(run)
        return await answer

    # ---- on the engine's thread ----

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_work():
                    self._step()
            while self._core.has_work():
                self._step()
        except BaseException as error:
            logger.exception("engine_died")
            self._death = error
            self._post(self._deliver_death)
        finally:
            self._core.shutdown()

    def _step(self) -> None:
        step = self._core.step()
        self._progress_at = self._monotonic()
        self._post(self._deliver, step)

    def _take_commands(self) -> bool:
        """Runs what was asked for, waiting for it where there is nothing else to do. False: the engine is to end."""
        block = not self._core.has_work()
        if block:
            self._progress_at = None
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if block:
                self._progress_at = self._monotonic()
            if command is None:
                return False
            command()
            block = False

    def _post(self, fn: Callable[..., None], *args: object) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            # The loop has been closed: there is nobody left to tell.
            self._loop = None

    # ---- on the loop ----

    def _deliver(self, step: CoreStep) -> None:
        self._load = step.load
        for output in step.outputs:
            sink = self._sinks.pop(output.request_id, None) if output.finished else self._sinks.get(output.request_id)
            if sink is not None:
                _call(sink, output)
        if not self._sinks:
            self._idle.set()
        for listener in self._step_listeners:
            _call(listener, step)

    def _deliver_death(self) -> None:
        self._has_ended = True
        error = f"the engine ended: {self._death!r}"
        outputs = [
            EngineOutput(request_id, finish_reason=FinishReason.ERROR, error=error) for request_id in self._sinks
        ]
        self._deliver(CoreStep(outputs, [], self._load))
        self._fail_answers()

    def _fail_answers(self) -> None:
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine has ended"))


def _call(receiver: Callable[[T], None], news: T) -> None:
    """One receiver's fault must not keep the news from the others."""
    try:
        receiver(news)
    except Exception:
        logger.exception("receiver_failed")
