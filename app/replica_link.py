"""What an ingress knows of its calls and of its streams from replicas."""

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from app.transport import CallEnd, EngineFailed, NoReplica, QueueFull, ReplicaDied, ReplicaLost, TransportError
from engine.outputs import EngineOutput
from engine.request import EngineRequest

logger = logging.getLogger("ray.serve")


class Call:
    """One prompt's way through a replica, as the ingress sees it."""

    def __init__(self, requests: tuple[EngineRequest, ...], started: float, *, on_trial: bool = False) -> None:
        self.requests = requests
        self.started = started
        self.on_trial = on_trial
        self.unfinished = {request.request_id for request in requests}
        self.outputs: list[EngineOutput] = []
        self.error: Exception | None = None
        self.news = asyncio.Event()
        self.response: Any = None
        self.task: asyncio.Task[None] | None = None
        # The stream that brings its outputs, once one has brought the first or the replica has said which it is.
        self.stream_id: str | None = None

    @property
    def call_id(self) -> str:
        return self.requests[0].request_id

    def take(self, output: EngineOutput) -> None:
        if output.request_id in self.unfinished:
            self.outputs.append(output)
            if output.finished:
                self.unfinished.discard(output.request_id)
            self.news.set()

    def take_from(self, stream_id: str, output: EngineOutput) -> None:
        """Takes an output off a stream, and no other stream's from then on.

        Where a replica got the call but its answer was lost, Ray sends the call to another one as well.
        """
        self.stream_id = self.stream_id or stream_id
        if self.stream_id == stream_id:
            self.take(output)

    def fail(self, error: Exception) -> None:
        """Ends it with an error, after whatever has already come. Later ends change nothing."""
        if self.unfinished and self.error is None:
            self.error = error
            self.news.set()

    def cancel(self) -> None:
        """Takes the call back from wherever it is; the replica aborts what it had of it."""
        if self.task is not None and not self.task.done():
            if self.response is not None:
                self.response.cancel()
            self.task.cancel()


class Link:
    """The stream from one replica, opened again when it breaks, for as long as the replica is a member."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.stream_id = ""
        self.task: asyncio.Task[None] | None = None
        self.retiring: asyncio.Task[None] | None = None
        self.aborts: set[str] = set()
        self.abort_task: asyncio.Task[None] | None = None
        self.snapshot_task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        for task in (self.task, self.retiring, self.abort_task, self.snapshot_task):
            if task is not None:
                task.cancel()


def retry_after(end: CallEnd) -> float:
    return end.error.retry_after_s if isinstance(end.error, QueueFull) else 0.0


def is_death(error: BaseException) -> bool:
    """Whether Ray says that an actor is gone: by a RayActorError, or an OutOfMemoryError of Ray's memory monitor."""
    return isinstance(error, RayError) and not isinstance(error, (RayTaskError, TaskCancelledError))


def transport_error(error: Exception, call_id: str) -> Exception:
    """What a failed handle call means to the request that it carried."""
    cause = getattr(error, "cause", None) or error
    match cause:
        case TransportError():
            return cause
        case RequestCancelledError() | TaskCancelledError():
            return ReplicaLost("the replica was stopped")
        case RayServeException():
            return NoReplica(f"no replica takes the request: {cause}")
    if is_death(error):
        return ReplicaDied("the replica died while it served the request")
    logger.error("generate_failed request_id=%s", call_id, exc_info=error)
    return EngineFailed("the engine met a fault of its own")
