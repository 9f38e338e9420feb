"""Requests whose step failed, and how it is found out which of them was the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.outputs import ScheduledStep
from engine.request import Request


class Probation:
    """The requests of a step that failed, each to be tried again in steps of its own. Owned by the Scheduler.

    What a failed step was to give is computed again by its requests one after another, in their order, each alone on
    the device; all others wait meanwhile. A request that comes through what it had to do in the failed step is a normal
    one again, whoever else the failure strikes later. One whose step fails while it is alone is the cause of it and
    ends with the error.

    Nobody joins before all have left, since without a batch there is no step whose failure leaves a doubt. So the wait
    of the others is bounded, and each failure that follows finds every innocent request at least one share further.
    """

    def __init__(self) -> None:
        self._ends: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Request]:
        """Who is to be tried next comes first."""
        return iter(self._ends)

    def __contains__(self, request: Request) -> bool:
        return request in self._ends

    def begin(self, request: Request, failed: ScheduledStep) -> None:
        """Puts a request behind the others.

        Args:
            failed: its share. The request has to be computed as far again; drafts are not made a second time.
        """
        self._ends[request] = min(failed.num_computed_tokens + failed.num_tokens, request.num_tokens)

    def note_passed(self, requests: Sequence[Request], steps: Sequence[ScheduledStep]) -> None:
        """A step went well, in which these had these shares; whoever has come far enough with it leaves."""
        for request, step in zip(requests, steps, strict=True):
            if step.num_computed_tokens + step.num_tokens >= self._ends.get(request, 0):
                self.leave(request)

    def leave(self, request: Request) -> None:
        """Forgets a request; nothing where it is not known."""
        self._ends.pop(request, None)
