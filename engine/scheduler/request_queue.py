"""The line of requests that wait for their turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.request import Request

Order = tuple[int, float, int]
Entry = tuple[Order, Request]

MIN_DEAD_TO_COMPACT = 64


class RequestQueue:
    """Waiting requests by `Request.order`, lowest first.

    A request keeps its order for life, so one that was preempted comes out before all that never ran (under `fcfs`), or
    takes its place among them (under `priority`). If its tokens grow while it waits, `grow` is to be told. Owned by the
    Scheduler.

    Adding and taking are O(log n). Removing is O(1) on average: the heap's entry stays behind until it comes up, or
    until such entries outnumber the others.

    Attributes:
        num_tokens: that all who wait are expected to compute.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._waiting: dict[Order, Entry] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no order."""
        return (request for _, request in self._waiting.values())

    def push(self, request: Request) -> None:
        entry = self._waiting[request.order] = (request.order, request)
        self.num_tokens += request.num_expected_tokens
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """The one whose turn is next.

        Raises:
            IndexError: nobody waits.
        """
        while not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Takes out the one whose turn is next.

        Raises:
            IndexError: nobody waits.
        """
        request = self.peek()
        heapq.heappop(self._heap)
        self._drop(request)
        return request

    def grow(self, count: int) -> None:
        """One of those that wait was given so many tokens, by a step that was in flight when it was preempted."""
        self.num_tokens += count

    def remove(self, request: Request) -> None:
        """Takes one out of anywhere in the line.

        Raises:
            KeyError: it does not wait.
        """
        self._drop(request)
        dead = len(self._heap) - len(self._waiting)
        if dead > max(len(self._waiting), MIN_DEAD_TO_COMPACT):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: Entry) -> bool:
        """Whether it waits, and by this entry: it may have been removed and have come back."""
        return self._waiting.get(entry[0]) is entry

    def _drop(self, request: Request) -> None:
        del self._waiting[request.order]
        self.num_tokens -= request.num_expected_tokens
