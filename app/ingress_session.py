"""What a replica owes to each ingress: outputs on one stream, and an end for each call."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from app.transport import PROVEN_TOKENS, ReplicaLost, StreamItem, gathering_s
from engine.kv_cache.events import KVEvent
from engine.outputs import EngineLoad, EngineOutput
from engine.request import EngineRequest

if TYPE_CHECKING:
    from engine import CoreStep

QUIET_PERIOD_S = 0.1
"""A stream without outputs passes on loads and KV events once in so many seconds."""

TRIAL_TOKENS = 2 * PROVEN_TOKENS
"""When a trial ends: what the ingress counts as proven must have arrived there by then."""


class PromptCall:
    """One `generate`: the children of a prompt, from when the engine has them until all have ended."""

    def __init__(
        self, session: "IngressSession", requests: tuple[EngineRequest, ...], *, on_trial: bool = False
    ) -> None:
        self.session = session
        self.call_id = requests[0].request_id
        self.on_trial = on_trial
        self.unfinished = {request.request_id for request in requests}
        self._silent = set(self.unfinished)
        self._unproven = dict.fromkeys(self.unfinished, TRIAL_TOKENS)
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception | None = None) -> None:
        """Lets the call return. Later ends change nothing."""
        if not self.ended.done():
            self.ended.set_result(error)

    def is_proven_by(self, output: EngineOutput) -> bool:
        """Notes an output of a call on trial. True: each sequence has TRIAL_TOKENS now, or its end."""
        left = self._unproven.get(output.request_id, 0) - len(output.new_token_ids)
        if output.finished or left <= 0:
            self._unproven.pop(output.request_id, None)
        else:
            self._unproven[output.request_id] = left
        return not self._unproven

    def take(self, output: EngineOutput) -> None:
        """Puts an output on the stream; dropped once the call has ended or its ingress is lost."""
        if self.ended.done():
            return
        if output.finished:
            self.unfinished.discard(output.request_id)
        if not self.session.suspended:
            self.session.outputs.append(output)
            if output.finished or self.on_trial or output.request_id in self._silent:
                self._silent.discard(output.request_id)
                self.session.is_urgent = True
            if not self.unfinished:
                self.end()


class IngressSession:
    """What one ingress is owed, for as long as its stream is open. Lives on the replica's event loop.

    Attributes:
        is_urgent: a request's first output or its last one is there, which waits for no others, or one on trial.

    Args:
        gather_s: how long other outputs wait at most, when there are many prompts.
    """

    def __init__(self, stream_id: str, load: EngineLoad, kv_seq: int, gather_s: float = 0.0) -> None:
        self.stream_id = stream_id
        self.calls: set[PromptCall] = set()
        self.outputs: list[EngineOutput] = []
        self.is_urgent = False
        self.closed = False
        self.suspended = False
        # Cleared while the ingress does not answer.
        self.responsive = asyncio.Event()
        self.responsive.set()
        self._load = load
        # Calls that no load on this stream has counted yet, with how many requests the engine must have received.
        self._unknown: deque[tuple[int, str]] = deque()
        self._kv_seq = kv_seq
        self._kv_events: list[KVEvent] = []
        # Set from the start: the first item says that the stream is open.
        self._news = asyncio.Event()
        self._news.set()
        self._gather_s = gather_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def note_submitted(self, call_id: str, number: int) -> None:
        """Notes that a call's last request is the engine's number-th of all."""
        self._unknown.append((number, call_id))

    def after_step(self, step: "CoreStep") -> None:
        """Takes in what a step gave, once the sinks have been called."""
        if self.suspended:
            return
        self._kv_events.extend(step.kv_events)
        self._load = step.load
        now = self._loop.time()
        if not self.outputs:
            self._send_at(now + QUIET_PERIOD_S, now)
        elif self.is_urgent:
            self._send_at(now, now)
        else:
            self._send_at(self._sent_at + gathering_s(len(self.calls), self._gather_s), now)

    async def items(self) -> AsyncIterator[StreamItem]:
        """One item a step that has outputs for this ingress, or several where they are gathered or read slowly.

        Ends when the session is closed.
        """
        while True:
            await self._news.wait()
            if self.closed:
                return
            self._news.clear()
            self._stop_timer()
            self._sent_at = self._loop.time()
            self.is_urgent = False
            item = StreamItem(self.outputs, self._kv_seq, self._kv_events, self._load, self._take_known())
            self._kv_seq += len(self._kv_events)
            self.outputs, self._kv_events = [], []
            yield item

    def close(self, reason: str) -> None:
        """Ends the stream and all calls whose outputs would have come through it."""
        self.closed = True
        self._news.set()
        # Nobody asks the ingress any more, and calls that wait for its answer would wait for ever.
        self.responsive.set()
        self._stop_timer()
        for call in self.calls:
            call.end(ReplicaLost(reason))

    def _take_known(self) -> tuple[str, ...]:
        known = []
        while self._unknown and self._unknown[0][0] <= self._load.received:
            known.append(self._unknown.popleft()[1])
        return tuple(known)

    def _send_at(self, when: float, now: float) -> None:
        if when <= now:
            self._news.set()
        elif self._timer is None or when < self._timer.when():
            self._stop_timer()
            self._timer = self._loop.call_at(when, self._news.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
