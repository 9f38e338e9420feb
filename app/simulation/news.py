"""What an ingress hears of a replica, and when: `app.ingress_session` on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.simulation.event_loop import EventLoop
from app.stream_buffer import QUIET_PERIOD_S, StreamBuffer
from app.transport import StreamItem
from engine import CoreStep, EngineLoad, EngineOutput


@dataclass(frozen=True, slots=True)
class NewsTimes:
    """
    Attributes:
        delay_s: from the end of a step to where its news arrive.
        quiet_s: a stream without outputs passes on loads and KV events once in so many seconds.
        gather_s: how long outputs between a request's first and last one wait at most, when there are many.
    """

    delay_s: float = 0.005
    quiet_s: float = QUIET_PERIOD_S
    gather_s: float = 0.08


class NewsStream:
    """From one replica to one ingress; opens with the replica's empty start.

    Args:
        deliver: called with each item when it arrives.
        load: of the replica before its first step.
    """

    def __init__(
        self, loop: EventLoop, times: NewsTimes, deliver: Callable[[StreamItem], object], load: EngineLoad
    ) -> None:
        self._loop = loop
        self._delay_s = times.delay_s
        self._deliver = deliver
        self._buffer = StreamBuffer(load, 0, loop.now, gather_s=times.gather_s, quiet_s=times.quiet_s)
        self._silent: set[str] = set()
        self._num_calls = 0
        self._send()

    def note_submitted(self, number: int, request_id: str) -> None:
        """A request of this ingress, a call of its own, is the core's number-th."""
        self._buffer.note_submitted(request_id, number)
        self._silent.add(request_id)
        self._num_calls += 1

    def take(self, output: EngineOutput) -> None:
        """Puts an output of this ingress's requests on the stream."""
        self._buffer.take(output, self._silent)
        if output.finished:
            self._num_calls -= 1

    def after_step(self, step: CoreStep) -> None:
        """Takes in what a step gave, once its outputs were taken."""
        due = self._buffer.after_step(step, self._num_calls, self._loop.now)
        if due is None:
            return
        if due <= self._loop.now:
            self._send()
        else:
            self._loop.at(due, partial(self._send_if_due, due))

    def _send_if_due(self, due: float) -> None:
        """Of a timer that was replaced, or whose items were sent, nothing is due."""
        if due == self._buffer.due:
            self._send()

    def _send(self) -> None:
        item = self._buffer.take_item(self._loop.now)
        self._loop.at(self._loop.now + self._delay_s, partial(self._deliver, item))
