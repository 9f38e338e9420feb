"""What goes on a replica's stream to one ingress, and when."""

import math
from collections import deque
from typing import TYPE_CHECKING

from app.transport import StreamItem, gathering_s
from engine.kv_cache.events import KVEvent
from engine.outputs import EngineLoad, EngineOutput

if TYPE_CHECKING:
    from engine import CoreStep

QUIET_PERIOD_S = 0.1
"""A stream without outputs passes on loads and KV events once in so many seconds."""


class StreamBuffer:
    """What has gathered since the last item, and when the next one is due. Whoever sends it has the clock.

    The first item is due at once: it says that the stream is open.

    Args:
        load: of the replica now.
        kv_seq: number of the next KV event.
        now: in seconds, by the clock of all other times here.
        gather_s: how long outputs between a request's first and last one wait at most, when there are many calls.
        quiet_s: how long loads and KV events wait while there are no outputs.
    """

    def __init__(
        self, load: EngineLoad, kv_seq: int, now: float, *, gather_s: float, quiet_s: float = QUIET_PERIOD_S
    ) -> None:
        self._gather_s = gather_s
        self._quiet_s = quiet_s
        self._outputs: list[EngineOutput] = []
        self._is_urgent = False
        self._load = load
        self._kv_seq = kv_seq
        self._kv_events: list[KVEvent] = []
        # Calls that no load on this stream has counted yet, with how many requests the engine must have received.
        self._unknown: deque[tuple[int, str]] = deque()
        self._taken_at = now
        self.due = now
        """When the next item is to be sent; infinite while there is nothing to send."""

    def note_submitted(self, call_id: str, number: int) -> None:
        """Notes that a call's last request is the engine's number-th of all."""
        self._unknown.append((number, call_id))

    def take(self, output: EngineOutput, silent: set[str], *, is_urgent: bool = False) -> None:
        """Adds an output, which waits for no others where it is urgent, or a request's first or last one.

        Args:
            silent: ids of requests without an output so far; this one's is removed.
        """
        self._outputs.append(output)
        if is_urgent or output.finish_reason is not None or output.request_id in silent:
            silent.discard(output.request_id)
            self._is_urgent = True

    def after_step(self, step: "CoreStep", num_calls: int, now: float) -> float | None:
        """Adds what else a step gave, once its outputs were taken.

        Returns:
            When the next item is due, where that is sooner than it was.
        """
        self._kv_events.extend(step.kv_events)
        self._load = step.load
        if not self._outputs:
            due = now + self._quiet_s
        elif self._is_urgent:
            due = now
        else:
            due = self._taken_at + gathering_s(num_calls, self._gather_s)
        if due >= self.due:
            return None
        self.due = due
        return due

    def take_item(self, now: float) -> StreamItem:
        """All that has gathered."""
        known = []
        while self._unknown and self._unknown[0][0] <= self._load.received:
            known.append(self._unknown.popleft()[1])
        item = StreamItem(self._outputs, self._kv_seq, self._kv_events, self._load, tuple(known))
        self._kv_seq += len(self._kv_events)
        self._outputs, self._kv_events = [], []
        self._is_urgent, self._taken_at, self.due = False, now, math.inf
        return item
