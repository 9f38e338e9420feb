"""Times calls by putting a stopwatch around attributes of objects and modules, and takes it off again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

Listener = Callable[[tuple[Any, ...], Any], None]
"""Told of a call's arguments and result, after the call."""


class Span(NamedTuple):
    """One call.

    Attributes:
        start: seconds by the recorder's clock.
        seconds: of the call, those in it included.
        own_seconds: without the recorded calls in it.
    """

    phase: str
    start: float
    seconds: float
    own_seconds: float


class SpanRecorder:
    """Records the calls of what it was told to watch, until it is closed. Used on one thread.

    A watched call costs about a microsecond.

    Attributes:
        spans: in the order in which the calls ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spans: list[Span] = []
        self._clock = clock
        self._inner_seconds = [0.0]  # of the calls in each call that goes on
        self._restore: list[Callable[[], None]] = []

    def watch(self, owner: Any, name: str, phase: str, listener: Listener | None = None) -> None:
        """Counts the calls of a method, or of what a module holds, to a phase.

        Args:
            owner: an object without slots, a class (for all its objects; static and class methods are not for this), or
                a module.
        """
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_seconds.append(0.0)
            start = self._clock()
            try:
                result = original(*args, **kwargs)
            finally:
                seconds = self._clock() - start
                inner = self._inner_seconds.pop()
                self._inner_seconds[-1] += seconds
                self.spans.append(Span(phase, start, seconds, seconds - inner))
            if listener is not None:
                listener(args, result)
            return result

        if name in vars(owner):
            self._restore.append(lambda: setattr(owner, name, original))
        else:
            self._restore.append(lambda: delattr(owner, name))
        setattr(owner, name, timed)

    def close(self) -> None:
        """Leaves everything as it was found; the spans stay."""
        while self._restore:
            self._restore.pop()()
