"""What an ingress hears of a replica, and when: `app.ingress_session` on a virtual clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.ingress_session import QUIET_PERIOD_S
from app.simulation.event_loop import EventLoop
from app.transport import StreamItem, gathering_s
from engine import CoreStep, EngineLoad, EngineOutput, KVEvent


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
        self._times = times
        self._deliver = deliver
        self._load = load
        self._outputs: list[EngineOutput] = []
        self._kv_events: list[KVEvent] = []
        self._kv_seq = 0
        self._unknown: deque[tuple[int, str]] = deque()
        self._silent: set[str] = set()
        self._num_calls = 0
        self._is_urgent = False
        self._sent_at = loop.now
        self._timer = math.inf
        self._send()

    def note_submitted(self, number: int, request_id: str) -> None:
        """A request of this ingress is the core's number-th."""
        self._unknown.append((number, request_id))
        self._silent.add(request_id)
        self._num_calls += 1

    def take(self, output: EngineOutput) -> None:
        """Puts an output of this ingress's requests on the stream."""
        self._outputs.append(output)
        if output.finished or output.request_id in self._silent:
            self._silent.discard(output.request_id)
            self._is_urgent = True
        if output.finished:
            self._num_calls -= 1

    def after_step(self, step: CoreStep) -> None:
        """Takes in what a step gave, once its outputs were taken."""
        self._kv_events.extend(step.kv_events)
        self._load = step.load
        if self._is_urgent:
            self._send()
        elif self._outputs:
            self._send_at(self._sent_at + gathering_s(self._num_calls, self._times.gather_s))
        else:
            self._send_at(self._loop.now + self._times.quiet_s)

    def _send_at(self, when: float) -> None:
        if when <= self._loop.now:
            self._send()
        elif when < self._timer:
            self._timer = when
            self._loop.at(when, partial(self._send_if_due, when))

    def _send_if_due(self, when: float) -> None:
        """Of a timer that was replaced, or whose items were sent, nothing is due."""
        if when == self._timer:
            self._send()

    def _send(self) -> None:
        known = []
        while self._unknown and self._unknown[0][0] <= self._load.received:
            known.append(self._unknown.popleft()[1])
        item = StreamItem(self._outputs, self._kv_seq, self._kv_events, self._load, known)
        self._kv_seq += len(self._kv_events)
        self._outputs, self._kv_events = [], []
        self._is_urgent, self._sent_at, self._timer = False, self._loop.now, math.inf
        self._loop.at(self._loop.now + self._times.delay_s, partial(self._deliver, item))
