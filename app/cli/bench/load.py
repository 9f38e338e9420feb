"""When the requests of `manta bench serve` are sent: at the times of a schedule, with so many at once at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from app.cli.bench.client import Answer, Call


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times of a Poisson process of `rate` a second, in seconds after its first one."""
    import numpy as np

    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    gaps[:1] = 0
    arrivals: list[float] = gaps.cumsum().tolist()
    return arrivals


def at_times(calls: Sequence[Call], arrivals: Sequence[float]) -> list[Call]:
    """The calls with other arrivals."""
    return [replace(call, arrival=arrival) for call, arrival in zip(calls, arrivals, strict=True)]


async def run_load(
    calls: Sequence[Call],
    send: Callable[[Call], Awaitable[Answer]],
    *,
    concurrency: int | None,
    on_answer: Callable[[Answer], object] = lambda answer: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> tuple[list[Answer], float]:
    """Sends each call when it is due and fewer than `concurrency` others are under way, in their order.

    Without arrivals that is a closed loop: a call follows as one ends. Without a limit it is an open one: calls come
    whatever becomes of those before. A call that had to wait for the limit is sent, and its times begin, after that.

    Args:
        calls: by arrival.

    Returns:
        The answers in the order of the calls, and the seconds from the first call to the last answer.
    """
    free = None if concurrency is None else asyncio.Semaphore(concurrency)

    async def answered(call: Call) -> Answer:
        try:
            answer = await send(call)
        finally:
            if free is not None:
                free.release()
        on_answer(answer)
        return answer

    started = clock()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for call in calls:
            if (early := started + call.arrival - clock()) > 0:
                await sleep(early)
            if free is not None:
                await free.acquire()
            tasks.append(group.create_task(answered(call)))
    return [task.result() for task in tasks], clock() - started
