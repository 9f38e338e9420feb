"""What code costs, counted in lines that run: the measure that no busy machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
