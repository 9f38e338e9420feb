"""How requests reach engines and how their tokens come back, whatever lies between.

An ingress and a replica share one stream for all tokens, while each prompt has a unary call of its own that stays
open until its end. Ray counts, drains and cancels those calls and reports a replica's death through them; the stream
costs one message a step, however many requests run.

    ingress                                                  replica
    generate(requests, ingress_id) ──── unary, routed ─────▶ engine.submit
                                   ◀─── stream, pinned ───── step: outputs, KV events, load
                                   ◀─── unary returns ────── CallEnd: which stream had its last outputs
"""

import pickle
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple, Protocol

from engine.kv_cache.events import BlockStored, KVEvent
from engine.outputs import EngineLoad, EngineOutput
from engine.request import EngineRequest
from engine.step_times import StepTimes


class TransportError(Exception):
    """Why an engine did not serve a request. `str(error)` may be shown to a client."""


class QueueFull(TransportError):
    """No replica takes more waiting requests; the client should come back (429).

    Attributes:
        retry_after_s: when it is worth trying again.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type["QueueFull"], tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class NoReplica(TransportError):
    """No replica of the model is up (503)."""


class TrialBusy(QueueFull):
    """A replica has another request on trial (see ReplicaClient)."""


class ReplicaLost(TransportError):
    """The replica that served the request is out of reach (503, unless the request is resumed elsewhere).

    Whoever reads the iterator has every token that was delivered; nothing is lost that it could have had.

    Attributes:
        replica_id: which it was, where that is known.
    """

    replica_id: str | None = None


class ReplicaDied(ReplicaLost):
    """Its process ended, or its engine did."""


class EngineFailed(TransportError):
    """The engine met a fault of its own while it served the request (500)."""


class EngineClient(Protocol):
    """What serves EngineRequests: an engine in this process, or the replicas of a deployment."""

    def generate(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """The outputs of a prompt's children, one item a step; it ends when all of them have.

        Closing the iterator aborts what is unfinished.

        Raises:
            QueueFull, NoReplica, InvalidParameter: before the first item.
            ReplicaLost, EngineFailed: at any time.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests early; unknown and finished ones are left alone.

        Each that was running still gets its last output, with FinishReason.ABORT.
        """
        ...


PROVEN_TOKENS = 8
"""A sequence that has got so many tokens from a replica, or its end, is not what the replica dies of afterwards.

The first one says little: what dies in a decode step dies behind the prefill of each attempt.
"""


class ReplicaClient(EngineClient, Protocol):
    """The replicas of a deployment: engines that may die."""

    def generate(
        self, requests: Sequence[EngineRequest], *, on_trial: bool = False
    ) -> AsyncIterator[list[EngineOutput]]:
        """See EngineClient.

        Args:
            on_trial: the requests may be what replicas died of. A replica takes one such prompt at a time, until each
                of its sequences has PROVEN_TOKENS: where it dies, it was that one, and what was merely beside it is
                known to be innocent.
        """
        ...


# ---- how often ----

FEW_STREAMS = 8
SECONDS_PER_STREAM = 0.0025


def gathering_s(streams: int, longest: float) -> float:
    """How long tokens are gathered before they go on: not at all with few streams, longer with each one more.

    A message costs everyone on its way the same whatever the number of its tokens. This bounds how often all streams
    together pay it at 1 / SECONDS_PER_STREAM a second, while that keeps a token's wait below `longest`.
    """
    return 0.0 if streams <= FEW_STREAMS else min(longest, streams * SECONDS_PER_STREAM)


# ---- what crosses between an ingress and a replica ----


class StreamItem(NamedTuple):
    """What a replica has to tell one ingress after a step.

    Attributes:
        outputs: of that ingress's requests.
        kv_seq: number of the first of kv_events, or of the next one where there are none.
        kv_events: of the replica's prefix cache, in order.
        known: calls of that ingress that `load` counts for the first time.
    """

    outputs: list[EngineOutput]
    kv_seq: int
    kv_events: list[KVEvent]
    load: EngineLoad
    known: Sequence[str] = ()


class CallEnd(NamedTuple):
    """How a `generate` call ended on its replica.

    Attributes:
        stream_id: the stream that its outputs were put on, all of them before the call ended.
        error: why it ended without last outputs.
    """

    stream_id: str
    error: Exception | None = None


class KVSnapshot(NamedTuple):
    """A replica's prefix cache.

    Attributes:
        seq: every event below this number is in it.
        stored: in no particular order.
    """

    seq: int
    stored: list[BlockStored]


_NO_EXTRAS = (None, None, None, None)
_load_numbers = attrgetter(*(each.name for each in fields(EngineLoad)[:-1]))  # all but step_times, the last


def pack(item: StreamItem) -> bytes:
    """An item as bytes, which Ray passes on as they are.

    Most outputs are an id and its tokens: as plain tuples they cost a third of what pickled dataclasses do.
    """
    outputs: list[tuple[str, tuple[int, ...], int] | EngineOutput] = []
    for output in item.outputs:
        extras = (output.finish_reason, output.logprobs, output.prompt_logprobs, output.timing)
        if extras == _NO_EXTRAS:
            outputs.append((output.request_id, output.new_token_ids, output.num_cached_tokens))
        else:
            outputs.append(output)
    numbers, step_times = _load_numbers(item.load), tuple(item.load.step_times)
    message = (outputs, item.kv_seq, item.kv_events, numbers, step_times, item.known)
    return pickle.dumps(message, protocol=5)


def unpack(data: bytes) -> StreamItem:
    """The item of `pack`."""
    packed, kv_seq, kv_events, numbers, step_times, known = pickle.loads(data)
    outputs = [
        EngineOutput(entry[0], entry[1], num_cached_tokens=entry[2]) if type(entry) is tuple else entry
        for entry in packed
    ]
    load = EngineLoad(*(*numbers, StepTimes(*step_times)))
    return StreamItem(outputs, kv_seq, kv_events, load, known)
