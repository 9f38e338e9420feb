"""The ingress's side of the transport: an EngineClient over the replicas of a Ray Serve deployment."""

import asyncio
import contextvars
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from app.replica_link import Call, Link, is_death, retry_after, transport_error
from app.router.index import ReplicaIndex, replica_index
from app.transport import (
    CallEnd,
    KVSnapshot,
    NoReplica,
    QueueFull,
    ReplicaDied,
    ReplicaLost,
    StreamItem,
    TransportError,
    unpack,
)
from engine.outputs import EngineOutput
from engine.request import EngineRequest, FinishReason

logger = logging.getLogger("ray.serve")

RETIRE_AFTER_S = 1.0
"""How long the stream of a replica that takes no more requests stays open after the last one that is known to run
there: a call that was sent just before may not be known yet."""

MAX_REFUSALS = 4
"""Replicas whose queues may be full before a request is refused: enough to find room where there is some, and a bound
on what a service that is full has to do for each request."""

REOPEN_PAUSE_S = 0.2
ABORT_RETRY_S = 0.05
SNAPSHOT_TIMEOUT_S = 30.0


class RayEngineClient:
    """Serves EngineRequests by the replicas of one deployment. Lives on one event loop.

    Args:
        handle: of an LLMReplica deployment whose request router is the PrefixCacheRouter.
        ingress_id: this process's name towards the replicas, unique over time.
        ingress: this process's actor; replicas abort what it leaves behind. None where there is no actor.
        replica_wait_s: how long a request waits while no replica is up, one may be starting.
        gather_s: how long tokens may wait for others on a replica that has many of this ingress's prompts.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        *,
        ingress_id: str,
        ingress: ActorHandle[Any] | None,
        replica_wait_s: float,
        gather_s: float = 0.0,
    ) -> None:
        self._handle = handle
        self._ingress_id = ingress_id
        self._ingress = ingress
        self._replica_wait_s = replica_wait_s
        self._gather_s = gather_s
        self._index = replica_index(handle.app_name, handle.deployment_name)
        self._links: dict[str, Link] = {}
        self._calls: dict[str, Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._unsubscribe = self._index.subscribe(self._members_changed)
        # Ray makes the router, which then learns of the replicas, when a handle's options are first asked for.
        self._generate = handle.options(method_name="generate")
        self._outputs = handle.options(method_name="outputs", stream=True)
        self._sync_links()

    @property
    def replicas(self) -> ReplicaIndex:
        """What is known of the replicas."""
        return self._index

    async def generate(
        self, requests: Sequence[EngineRequest], *, on_trial: bool = False
    ) -> AsyncIterator[list[EngineOutput]]:
        """See ReplicaClient. Close the iterator (`aclosing`) where it is left early."""
        call = Call(tuple(requests), self._loop.time(), on_trial=on_trial)
        self._index.begin(call.call_id, requests)
        for request in requests:
            self._calls[request.request_id] = call
        if not self._index.members:
            self._expect_replica()
        try:
            call.task = self._start(self._run(call))
            while True:
                if call.outputs:
                    outputs, call.outputs = call.outputs, []
                    yield outputs
                elif not call.unfinished:
                    return
                elif call.error is not None:
                    if isinstance(call.error, ReplicaLost):
                        call.error.replica_id = self._index.replica_of(call.call_id)
                    raise call.error
                else:
                    call.news.clear()
                    await call.news.wait()
        finally:
            for request in requests:
                self._calls.pop(request.request_id, None)
            if call.unfinished:
                call.cancel()
            self._index.end(call.call_id, [request.request_id for request in requests])

    def abort(self, request_ids: Iterable[str]) -> None:
        """See EngineClient. Some of a prompt's children on a replica that is draining run to their end nevertheless."""
        by_call: dict[Call, set[str]] = {}
        for request_id in request_ids:
            call = self._calls.get(request_id)
            if call is not None and request_id in call.unfinished:
                by_call.setdefault(call, set()).add(request_id)
        for call, ids in by_call.items():
            if ids == call.unfinished:
                # Taking the whole call back is cheaper than a message, and reaches it wherever it is.
                call.cancel()
                for request_id in sorted(ids):
                    call.take(EngineOutput(request_id, finish_reason=FinishReason.ABORT))
                continue
            link = self._links.get(self._index.replica_of(call.call_id) or "")
            if link is None:
                self._loop.call_later(ABORT_RETRY_S, self.abort, ids)
                continue
            link.aborts |= ids
            if link.abort_task is None or link.abort_task.done():
                link.abort_task = self._start(self._send_aborts(link))

    async def call_replicas(self, method: str, timeout_s: float) -> dict[str, Any]:
        """Calls a method of every replica; those that fail or take too long are left out."""

        async def call(replica_id: str) -> Any:
            return await asyncio.wait_for(self._call_pinned(method, replica_id), timeout_s)

        replica_ids = sorted(self._index.members)
        tasks = [self._loop.create_task(call(i), context=contextvars.Context()) for i in replica_ids]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for replica_id, result in zip(replica_ids, results, strict=True):
            if isinstance(result, BaseException):
                logger.warning("replica_call_failed method=%s replica=%s error=%r", method, replica_id, result)
        return {i: r for i, r in zip(replica_ids, results, strict=True) if not isinstance(r, BaseException)}

    async def close(self) -> None:
        """Closes the streams, which aborts what is unfinished on the replicas, and fails the calls."""
        self._closed = True
        self._unsubscribe()
        for call in list(self._calls.values()):
            call.cancel()
            call.fail(NoReplica("the service is shutting down"))
        for link in self._links.values():
            link.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- calls ----

    async def _run(self, call: Call) -> None:
        """The unary call of a prompt, from its start to its end."""
        try:
            end = await self._place(call)
        except asyncio.CancelledError:
            # Where nobody cancelled us, Ray cancelled the call: its replica was stopped.
            call.fail(ReplicaLost("the replica was stopped"))
            return
        except Exception as error:
            call.fail(transport_error(error, call.call_id))
            return
        if end.error is not None:
            # Where Ray sent the call to two replicas, one may refuse what the other serves.
            if call.stream_id in (None, end.stream_id):
                call.fail(end.error)
        elif call.unfinished:
            call.stream_id = call.stream_id or end.stream_id
            if all(link.stream_id != call.stream_id for link in self._links.values()):
                call.fail(ReplicaLost("the stream from the replica broke"))

    async def _place(self, call: Call) -> CallEnd:
        """Finds a replica that takes a call; its end there. The call goes on to others while it is refused.

        Of several refusals the one stands that promises room soonest.
        """
        ends: list[CallEnd] = []
        while True:
            call.response = self._generate.remote(call.requests, self._ingress_id, call.on_trial)
            end: CallEnd = await call.response
            if not isinstance(end.error, QueueFull):
                return end
            ends.append(end)
            if not self._index.refuse(call.call_id) or len(ends) == MAX_REFUSALS:
                return min(ends, key=retry_after)

    def _expect_replica(self) -> None:
        self._loop.call_later(self._replica_wait_s, self._fail_unrouted)

    def _fail_unrouted(self) -> None:
        if self._index.members:
            return
        # With the inaccuracy of the loop's timers: the call that set this one must not be missed.
        latest = self._loop.time() - self._replica_wait_s + 0.01
        for call in set(self._calls.values()):
            if call.started <= latest and self._index.replica_of(call.call_id) is None:
                call.cancel()
                call.fail(NoReplica("no replica of the model is up; try again in a moment"))

    # ---- streams ----

    def _members_changed(self) -> None:
        """Called on the router's thread."""
        try:
            self._loop.call_soon_threadsafe(self._sync_links)
        except RuntimeError:
            # The loop was closed without close(): nobody is left to care.
            return

    def _sync_links(self) -> None:
        if self._closed:
            return
        members = self._index.members
        for replica_id in self._index.known - members - self._links.keys():
            self._index.drop(replica_id)  # it came and went before this loop heard of it
        for replica_id in members - self._links.keys():
            link = self._links[replica_id] = Link(replica_id)
            link.task = self._start(self._read(link))
        for replica_id, link in self._links.items():
            if replica_id not in members and link.retiring is None:
                link.retiring = self._start(self._retire(link))
        if not members:
            self._expect_replica()

    async def _read(self, link: Link) -> None:
        """Keeps a replica's stream open and hands out what it brings."""
        while link.retiring is None:
            link.stream_id = uuid.uuid4().hex
            loss = ReplicaLost("the service is shutting down")
            stream: Any = None
            try:
                stream = self._outputs.remote(
                    self._ingress_id,
                    link.stream_id,
                    self._ingress,
                    pinned_to=link.replica_id,
                    gather_s=self._gather_s,
                )
                async for data in stream:
                    self._receive(link, unpack(data))
                loss = ReplicaLost("the replica closed the stream")
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                loss = ReplicaLost("Ray cancelled the stream")
            except (RayError, RayServeException, TransportError) as error:
                died = is_death(error)
                reason = str(error).strip().rsplit("\n", 1)[-1]
                loss = ReplicaDied("the replica died") if died else ReplicaLost(f"the stream broke: {reason}")
            except Exception as error:
                # Whatever it is: without its stream the replica would be lost to this ingress for good.
                logger.exception("stream_failed replica=%s", link.replica_id)
                loss = ReplicaLost(f"the stream broke: {error!r}")
            finally:
                if stream is not None:
                    stream.cancel()
                self._lost(link, loss)
            if link.replica_id in self._index.members:
                logger.warning("stream_lost replica=%s reason=%s", link.replica_id, loss)
            await asyncio.sleep(REOPEN_PAUSE_S)

    def _receive(self, link: Link, item: StreamItem) -> None:
        for output in item.outputs:
            call = self._calls.get(output.request_id)
            if call is not None:
                call.take_from(link.stream_id, output)
        if self._index.receive(link.replica_id, item):
            link.snapshot_task = self._start(self._fetch_snapshot(link))

    def _lost(self, link: Link, loss: ReplicaLost) -> None:
        """Ends the calls whose outputs were on a stream that broke. Those without any hear it from the replica."""
        stream_id, link.stream_id = link.stream_id, ""
        if link.snapshot_task is not None:
            # It would come into a later stream's events.
            link.snapshot_task.cancel()
        self._index.lose(link.replica_id)
        for call in set(self._calls.values()):
            if call.stream_id == stream_id:
                call.fail(type(loss)(str(loss)))

    async def _retire(self, link: Link) -> None:
        """Closes the stream of a replica that takes no more requests, once ours have ended."""
        idle_s = 0.0
        while idle_s < RETIRE_AFTER_S:
            await asyncio.sleep(RETIRE_AFTER_S / 5)
            if link.replica_id in self._index.members:
                # It was only out of Ray's sight for a moment.
                link.retiring = None
                if link.task is None or link.task.done():
                    link.task = self._start(self._read(link))
                return
            idle_s = 0.0 if self._index.in_flight(link.replica_id) else idle_s + RETIRE_AFTER_S / 5
            if link.task is None or link.task.done():
                break
        del self._links[link.replica_id]
        self._index.drop(link.replica_id)
        link.retiring = None
        link.cancel()

    # ---- messages to one replica ----

    async def _call_pinned(self, method: str, replica_id: str, *args: Any) -> Any:
        return await self._handle.options(method_name=method).remote(*args, pinned_to=replica_id)

    async def _send_aborts(self, link: Link) -> None:
        while link.aborts:
            ids, link.aborts = tuple(link.aborts), set()
            try:
                await self._call_pinned("abort", link.replica_id, ids)
            except (RayError, RayServeException, TransportError) as error:
                logger.warning("abort_failed replica=%s error=%s", link.replica_id, type(error).__name__)

    async def _fetch_snapshot(self, link: Link) -> None:
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                snapshot: KVSnapshot = await self._call_pinned("kv_snapshot", link.replica_id)
        except (RayError, RayServeException, TransportError, TimeoutError) as error:
            logger.warning("kv_snapshot_failed replica=%s error=%s", link.replica_id, type(error).__name__)
            self._index.forget_blocks(link.replica_id)
        else:
            self._index.restore_blocks(link.replica_id, snapshot.seq, snapshot.stored)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine that makes handle calls in a context of its own.

        Ray keeps a request's internal id in the context, and a router confuses calls that share one.
        """
        task = self._loop.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
