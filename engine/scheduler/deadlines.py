"""When requests are no longer wanted."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.request import Request

MIN_DEAD_TO_COMPACT = 64


class Deadlines:
    """Requests by their deadline, earliest first. Owned by the Scheduler.

    Most requests end long before their deadline; their entries stay until they are due, or until they outnumber the
    others. Adding and taking are O(log n) on average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, float, int], Request]] = []
        self._compact_at = MIN_DEAD_TO_COMPACT

    def __len__(self) -> int:
        """Entries, those of ended requests included."""
        return len(self._heap)

    def add(self, deadline: float, request: Request) -> None:
        heapq.heappush(self._heap, (deadline, request.order, request))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + MIN_DEAD_TO_COMPACT

    def pop_overdue(self, now: float) -> Iterator[Request]:
        """Takes out those that have not ended and should have by now."""
        while self._heap and self._heap[0][0] <= now:
            *_, request = heapq.heappop(self._heap)
            if not request.is_finished:
                yield request
