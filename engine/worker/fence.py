"""Waiting for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def fence(device: torch.device) -> Callable[[], None]:
    """A call that returns when all that has been enqueued on the device so far is done. It releases the GIL."""
    if device.type != "cuda":
        return _done
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def _done() -> None:
    """On a CPU nothing is left to wait for."""
