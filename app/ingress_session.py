"""What a replica owes to each ingress: outputs on one stream, and an end for each call."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from app.stream_buffer import StreamBuffer
from app.transport import PROVEN_TOKENS, ReplicaLost, StreamItem
from engine.outputs import EngineLoad, EngineOutput
from engine.request import EngineRequest

if TYPE_CHECKING:
    from engine import CoreStep

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
            self.session.buffer.take(output, self._silent, is_urgent=self.on_trial)
            if not self.unfinished:
                self.end()


class IngressSession:
    """What one ingress is owed, for as long as its stream is open. Lives on the replica's event loop.

    Args:
        gather_s: how long outputs that are not urgent wait at most, when there are many prompts.
    """

    def __init__(self, stream_id: str, load: EngineLoad, kv_seq: int, gather_s: float = 0.0) -> None:
        self.stream_id = stream_id
        self.calls: set[PromptCall] = set()
        self.closed = False
        self.suspended = False
        # Cleared while the ingress does not answer.
        self.responsive = asyncio.Event()
        self.responsive.set()
        self._loop = asyncio.get_running_loop()
        self.buffer = StreamBuffer(load, kv_seq, self._loop.time(), gather_s=gather_s)
        self._is_due = asyncio.Event()
        self._is_due.set()
        self._timer: asyncio.TimerHandle | None = None

    def note_submitted(self, call_id: str, number: int) -> None:
        """Notes that a call's last request is the engine's number-th of all."""
        self.buffer.note_submitted(call_id, number)

    def after_step(self, step: "CoreStep") -> None:
        """Takes in what a step gave, once the sinks have been called."""
        if self.suspended:
            return
        now = self._loop.time()
        due = self.buffer.after_step(step, len(self.calls), now)
        if due is None:
            return
        if due <= now:
            self._is_due.set()
        else:
            self._stop_timer()
            self._timer = self._loop.call_at(due, self._is_due.set)

    async def items(self) -> AsyncIterator[StreamItem]:
        """One item a step that has outputs for this ingress, or several where they are gathered or read slowly.

        Ends when the session is closed.
        """
        while True:
            await self._is_due.wait()
            if self.closed:
                return
            self._is_due.clear()
            self._stop_timer()
            yield self.buffer.take_item(self._loop.time())

    def close(self, reason: str) -> None:
        """Ends the stream and all calls whose outputs would have come through it."""
        self.closed = True
        self._is_due.set()
        # Nobody asks the ingress any more, and calls that wait for its answer would wait for ever.
        self.responsive.set()
        self._stop_timer()
        for call in self.calls:
            call.end(ReplicaLost(reason))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
