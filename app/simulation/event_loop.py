"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class EventLoop:
    """Calls what is due, in the order of the times, and of those that are equal in the order in which they were given.

    Attributes:
        now: seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = itertools.count()

    def at(self, when: float, callback: Callable[[], object]) -> None:
        """Calls back at a time; at once, after all that is due already, where that has passed."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._sequence), callback))

    def run(self, until: float = math.inf) -> bool:
        """Lets time pass until nothing is left to come, or to a certain time. Returns whether anything is left then."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
        if until < math.inf:
            self.now = max(self.now, until)
        return bool(self._heap)
