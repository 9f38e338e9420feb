"""The deployment that holds an engine, and what it owes to each ingress."""

import asyncio
import faulthandler
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Metric
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from app.admission import StartEstimate
from app.autoscaling_stats import Counts, StatsRecorder
from app.ingress_session import IngressSession, PromptCall
from app.logs import log_through_serve
from app.metrics import collect_families
from app.transport import (
    CallEnd,
    EngineFailed,
    KVSnapshot,
    QueueFull,
    ReplicaDied,
    ReplicaLost,
    TrialBusy,
    pack,
)
from engine.config import EngineConfig
from engine.outputs import EngineOutput
from engine.request import EngineRequest, FinishReason
from engine.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from engine import AsyncEngineCore, CoreStep

logger = logging.getLogger("ray.serve")

STREAM_WAIT_S = 10.0
"""How long a call that came before its ingress's stream waits for it."""

LEASE_CHECKS = 10
"""How often in the length of a lease an ingress is asked whether it lives, at least once a second."""

TRIAL_PAUSE_S = 0.1
"""How long a request on trial waits for its first step: others that come for the same meanwhile must be told that they
have to wait before the replica dies."""

WATCH_PERIOD_S = 1.0
"""The longest time between two looks at the engine; short stall timeouts are looked at ten times."""

STDERR = 2
"""The file descriptor: Serve may put an object that has none in sys.stderr's place."""


class LLMReplica:
    """One engine behind Ray Serve. All methods run on Serve's loop for user code; the engine has its own thread.

    Args:
        config: the engine's.
        max_queued_requests: from so many waiting requests on it refuses more.
        max_queue_wait_s: it refuses what would start later than that; None refuses nothing for it.
        lease_s: how long an ingress that does not answer keeps its requests; one that died loses them at once.
        stall_timeout_s: how long the engine may have work without ending a step; None is for ever.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_queued_requests: int,
        lease_s: float,
        stall_timeout_s: float | None = None,
        max_queue_wait_s: float | None = None,
    ) -> None:
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._max_queued_requests = max_queued_requests
        self._max_queue_wait_s = max_queue_wait_s
        self._lease_s = lease_s
        log_through_serve()
        started = time.monotonic()
        # Blocks the loop, on which nothing else runs until this constructor has returned.
        self._core = self._load_engine(config, stall_timeout_s)
        logger.info("engine_started model=%s seconds=%.1f", config.model, time.monotonic() - started)
        self._core.add_step_listener(self._after_step)
        self._start_estimate = StartEstimate.of(config, max_queue_wait_s)
        self._refused = Counter(
            "manta_requests_refused", "Prompts not taken, by reason", ["reason"], registry=self._core.registry
        )
        for reason in ("queue_full", "queue_wait"):
            self._refused.labels(reason)
        self._stats = StatsRecorder()
        self._sessions: dict[str, IngressSession] = {}
        self._session_opened = asyncio.Condition()
        self._kv_seq = 0
        self._num_submitted = 0
        self._num_unfinished = 0
        self._on_trial: PromptCall | None = None
        self._engine_watch = asyncio.get_running_loop().create_task(self._watch_engine(stall_timeout_s))

    def _load_engine(self, config: EngineConfig, stall_timeout_s: float | None) -> "AsyncEngineCore":
        # Imported only here: whoever builds the application or holds a handle must not load the engine.
        from engine import AsyncEngineCore

        return AsyncEngineCore.from_config(config, stall_timeout_s=stall_timeout_s)

    # ---- called by ingresses ----

    async def generate(self, requests: tuple[EngineRequest, ...], ingress_id: str, on_trial: bool = False) -> CallEnd:
        """Runs the children of one prompt; their outputs go to the ingress's stream.

        Returns at their end. Being cancelled aborts what is unfinished.

        Args:
            on_trial: other replicas died under it; only one such prompt at a time is taken until it has proven itself.
        """
        session = await self._session_of(ingress_id)
        if session is None:
            return CallEnd("", ReplicaLost(f"the ingress opened no stream within {STREAM_WAIT_S:g} s"))
        for running in session.calls:
            if running.call_id == requests[0].request_id:
                # Ray sends a call again where it did not hear that it was accepted. Being cancelled cancels the first.
                error = await running.ended
                await session.responsive.wait()
                return CallEnd(session.stream_id, error)
        if (refusal := self._refusal(requests)) is not None:
            return CallEnd(session.stream_id, refusal)
        if on_trial and self._on_trial is not None:
            return CallEnd(session.stream_id, TrialBusy("a replica tries another request first"))
        call = PromptCall(session, requests, on_trial=on_trial)
        session.calls.add(call)
        self._num_unfinished += len(requests)
        try:
            if on_trial:
                self._on_trial = call
                await asyncio.sleep(TRIAL_PAUSE_S)
            for request in requests:
                self._core.submit(request, partial(self._take, call))
                self._num_submitted += 1
                if self._start_estimate is not None:
                    self._start_estimate.submit(request)
            session.note_submitted(call.call_id, self._num_submitted)
            error = await call.ended
            # Ray waits, and with it the whole replica, for the ingress to confirm a call's end.
            await session.responsive.wait()
        except InvalidParameter as refused:
            error = refused
        except Exception as failure:
            error = self._failure(failure)
        finally:
            self._num_unfinished -= len(call.unfinished)
            session.calls.discard(call)
            self._acquit(call)
            call.end()
            self._core.abort(call.unfinished)
        return CallEnd(session.stream_id, error)

    async def outputs(
        self,
        ingress_id: str,
        stream_id: str,
        ingress: ActorHandle[Any] | None,
        pinned_to: str,
        gather_s: float = 0.0,
    ) -> AsyncIterator[bytes]:
        """The stream of everything that one ingress's requests put out: packed StreamItems.

        A second stream of the same ingress ends the first one and its calls. So does the ingress's death.

        Args:
            ingress: the ingress's actor, which is asked whether it lives; None asks nobody.
            pinned_to: the replica that is meant.
            gather_s: how long outputs may wait for others, when the ingress has many prompts here.
        """
        self._check_pin(pinned_to)
        self._close_session(self._sessions.get(ingress_id), ingress_id, "the ingress opened another stream")
        session = self._sessions[ingress_id] = IngressSession(stream_id, self._core.load(), self._kv_seq, gather_s)
        lease = None if ingress is None else asyncio.create_task(self._watch(session, ingress_id, ingress))
        try:
            async with self._session_opened:
                self._session_opened.notify_all()
            async for item in session.items():
                yield pack(item)
        finally:
            if lease is not None:
                lease.cancel()
            self._close_session(session, ingress_id, "the stream between the ingress and the replica broke")

    async def abort(self, request_ids: tuple[str, ...], pinned_to: str) -> None:
        """Ends some of a prompt's children early; the outputs of their ends come through the stream."""
        self._check_pin(pinned_to)
        self._core.abort(request_ids)

    async def kv_snapshot(self, pinned_to: str) -> KVSnapshot:
        """The prefix cache, for an ingress that missed events."""
        self._check_pin(pinned_to)
        # Taken first: steps may end before the snapshot is here, and applying an event twice is harmless.
        seq = self._kv_seq
        return KVSnapshot(seq, await self._core.kv_snapshot())

    async def metrics(self, pinned_to: str) -> list[Metric]:
        """The engine's metrics."""
        self._check_pin(pinned_to)
        return collect_families(self._core.registry)

    # ---- called by Serve ----

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy reads. Ray asks only where there is one."""
        return self._stats.record(time.monotonic(), self._core.load(), Counts.of(self._core.registry))

    def check_health(self) -> None:
        """Raises where the engine does nothing more."""
        self._core.check_health()

    async def __del__(self) -> None:
        if watch := getattr(self, "_engine_watch", None):
            watch.cancel()
            faulthandler.cancel_dump_traceback_later()
        core = getattr(self, "_core", None)
        if core is not None:
            await core.shutdown()

    # ---- the engine's end ----

    async def _watch_engine(self, stall_timeout_s: float | None) -> None:
        """Ends this process once the engine does nothing more.

        Serve would come to the same end by three failed health checks, but then waits for the calls that are open, and
        those of an engine that hangs never end. A process that is gone is replaced at once, and ingresses hear of it at
        once: what ran here goes on elsewhere.

        Where this loop itself comes no further, say for a step that hangs with the interpreter's lock, faulthandler's
        own thread ends the process and leaves the stacks on stderr: it needs no Python.
        """
        period_s = WATCH_PERIOD_S if stall_timeout_s is None else min(WATCH_PERIOD_S, stall_timeout_s / 10)
        while True:
            if stall_timeout_s is not None:
                faulthandler.dump_traceback_later(stall_timeout_s, exit=True, file=STDERR)
            await asyncio.sleep(period_s)
            try:
                self._core.check_health()
            except Exception as error:
                stacks = "".join(
                    f"thread {thread}:\n" + "".join(traceback.format_stack(frame))
                    for thread, frame in sys._current_frames().items()
                )
                logger.error("replica_gives_up reason=%s unfinished=%d\n%s", error, self._num_unfinished, stacks)
                self._exit_process()

    def _exit_process(self) -> None:
        logging.shutdown()
        # Not sys.exit: nothing that is still to be cleaned up can be waited for, the engine's thread least of all.
        os._exit(1)

    # ---- bookkeeping ----

    def _take(self, call: PromptCall, output: EngineOutput) -> None:
        if self._start_estimate is not None:
            self._start_estimate.take(output)
        if self._on_trial is call and call.is_proven_by(output):
            self._acquit(call)
        if output.finish_reason is FinishReason.ERROR and self._core.has_ended:
            # Not this request's fault: it can go on elsewhere.
            call.end(ReplicaDied("the replica's engine ended"))
        else:
            before = len(call.unfinished)
            call.take(output)
            self._num_unfinished -= before - len(call.unfinished)

    def _acquit(self, call: PromptCall) -> None:
        """Makes room for the next trial where this call is on trial."""
        if self._on_trial is call:
            self._on_trial = None

    def _is_dead(self) -> bool:
        try:
            self._core.check_health()
        except Exception:
            return True
        return False

    def _after_step(self, step: "CoreStep") -> None:
        self._kv_seq += len(step.kv_events)
        if self._start_estimate is not None:
            self._start_estimate.after_step(step.load)
        for session in self._sessions.values():
            session.after_step(step)

    def _refusal(self, requests: tuple[EngineRequest, ...]) -> QueueFull | None:
        """Why a prompt is not taken. One that is resumed has waited elsewhere, and its client a part of the answer."""
        if any(request.output_token_ids for request in requests):
            return None
        if self._is_full(len(requests)):
            self._refused.labels("queue_full").inc()
            return QueueFull("the model's queue is full; try again in a moment")
        if self._start_estimate is None or self._max_queue_wait_s is None:
            return None
        wait_s = self._start_estimate.wait_s(requests[0].priority)
        if wait_s <= self._max_queue_wait_s:
            return None
        self._refused.labels("queue_wait").inc()
        excess_s = max(1, math.ceil(wait_s - self._max_queue_wait_s))
        return QueueFull(
            f"the model is busy: the request would start in {wait_s:.0f} s, and none may wait more than "
            f"{self._max_queue_wait_s:g}; try again in {excess_s} s",
            excess_s,
        )

    def _is_full(self, num_new: int) -> bool:
        if self._num_unfinished == 0:
            # A prompt with more children than the queue holds must be able to run at some time.
            return False
        load = self._core.load()
        # Requests that came since the last step are in no report. While nobody waited in it, they are waiting only
        # beyond the number that can run; otherwise all that do not run yet are waiting.
        runnable = load.running if load.waiting else max(load.running, self._core.config.max_num_seqs)
        return self._num_unfinished + num_new - runnable > self._max_queued_requests

    async def _session_of(self, ingress_id: str) -> IngressSession | None:
        if ingress_id not in self._sessions:
            async with self._session_opened:
                try:
                    await asyncio.wait_for(
                        self._session_opened.wait_for(lambda: ingress_id in self._sessions), STREAM_WAIT_S
                    )
                except TimeoutError:
                    return None
        return self._sessions.get(ingress_id)

    def _close_session(self, session: IngressSession | None, ingress_id: str, reason: str) -> None:
        if session is None:
            return
        session.close(reason)
        if self._sessions.get(ingress_id) is session:
            del self._sessions[ingress_id]

    async def _watch(self, session: IngressSession, ingress_id: str, ingress: ActorHandle[Any]) -> None:
        """Takes back what an ingress leaves behind: at once where it died, after its lease where it is silent.

        The replica asks, rather than the ingress renewing: Ray knows at once that an actor died, and a replica that
        is draining, to which Serve routes no calls, keeps the leases of those that still read from it.

        A silent ingress (stopped, or cut off) loses its requests in the engine, but its calls stay open until it
        answers or dies: ending them would make Ray wait for it, and stop the replica for everybody.
        """
        loop = asyncio.get_running_loop()
        period = min(self._lease_s / LEASE_CHECKS, 1.0)
        renewed = loop.time()
        while True:
            await asyncio.sleep(period)
            answer = asyncio.ensure_future(_is_alive(ingress))
            if not (await asyncio.wait({answer}, timeout=period))[0]:
                session.responsive.clear()
                await asyncio.wait({answer}, timeout=max(0.0, renewed + self._lease_s - loop.time()))
            if not answer.done() or (answer.result() is None and loop.time() - renewed >= self._lease_s):
                self._suspend(session, ingress_id)
            alive = await answer
            if alive is None:
                continue
            session.responsive.set()
            renewed = loop.time()
            if session.suspended or not alive:
                break
        self._suspend(session, ingress_id)
        self._close_session(session, ingress_id, "the ingress was out of reach")

    def _suspend(self, session: IngressSession, ingress_id: str) -> None:
        if session.suspended:
            return
        session.suspended = True
        if session.calls:
            logger.warning("ingress_lost ingress=%s unfinished_prompts=%d", ingress_id, len(session.calls))
        for call in session.calls:
            self._core.abort(call.unfinished)

    def _check_pin(self, pinned_to: str) -> None:
        if pinned_to != self._replica_id:
            raise ReplicaLost(f"replica {pinned_to} is gone")

    def _failure(self, error: Exception) -> Exception:
        """What an ingress is told of a failed submit: the end of the engine, or of this request alone."""
        if self._is_dead():
            return ReplicaDied("the replica's engine ended")
        logger.exception("submit_failed")
        return EngineFailed(str(error))


async def _is_alive(actor: ActorHandle[Any]) -> bool | None:
    """Asks an actor; None where nobody knows. Returns when it answers or Ray knows that it will not."""
    try:
        await actor.__ray_ready__.remote()
    except (ActorDiedError, OutOfMemoryError):  # the latter is what Ray's memory monitor killed
        return False
    except RayError:
        return None
    return True
