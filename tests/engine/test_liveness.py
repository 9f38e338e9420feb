"""Whether an engine makes progress, as its owner sees it while the engine's thread hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine import AsyncEngineCore, CoreStep, EngineDeadError, EngineRequest, EngineStalled, SamplingParams
from engine.outputs import EngineLoad, EngineOutput
from engine.request import FinishReason

TIMEOUT_S = 10.0
NO_LOAD = EngineLoad(0, 0, 0, 0, 1)


class Steps:
    """An EngineCore whose steps begin, and end, when a test says so; each request takes `steps_each` of them."""

    def __init__(self, steps_each: int = 1) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.error: Exception | None = None
        self._steps_each = steps_each
        self._left: dict[str, int] = {}

    def load(self) -> EngineLoad:
        return NO_LOAD

    def check_request(self, spec: EngineRequest) -> None:
        """Takes all."""

    def add_request(self, spec: EngineRequest) -> None:
        self._left[spec.request_id] = self._steps_each

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> CoreStep:
        self.begun.release()
        self.may_end.acquire()
        if self.error is not None:
            raise self.error
        self._left = {request_id: left - 1 for request_id, left in self._left.items()}
        ended = [request_id for request_id, left in self._left.items() if left == 0]
        for request_id in ended:
            del self._left[request_id]
        outputs = [EngineOutput(request_id, (1,), finish_reason=FinishReason.LENGTH) for request_id in ended]
        return CoreStep(outputs, [], NO_LOAD)

    def shutdown(self) -> None:
        """Has nothing."""


class Hand:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps(steps_each=3)
    yield steps
    steps.may_end.release(1000)  # the engine's thread must not outlive its test


def engine_of(steps: Steps, clock: Hand, stall_timeout_s: float | None = TIMEOUT_S) -> AsyncEngineCore:
    core: Any = steps
    return AsyncEngineCore(core, stall_timeout_s=stall_timeout_s, monotonic=clock)


def submit(engine: AsyncEngineCore, request_id: str = "r") -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    spec = EngineRequest(request_id=request_id, prompt_token_ids=(1,), params=SamplingParams(), seed=0)
    engine.submit(spec, outputs.append)
    return outputs


async def begun(steps: Steps) -> None:
    assert await asyncio.to_thread(steps.begun.acquire, timeout=30)


async def test_a_step_that_hangs_is_a_stall_and_is_none_before_its_time(steps: Steps) -> None:
    clock = Hand()
    engine = engine_of(steps, clock)
    submit(engine)
    await begun(steps)
    clock.now += TIMEOUT_S - 0.1
    engine.check_health()
    clock.now += 0.2
    with pytest.raises(EngineStalled, match=r"has work and has made no step for 10\.1 s"):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        submit(engine, "another")


async def test_an_engine_that_is_busy_for_long_is_healthy(steps: Steps) -> None:
    clock = Hand()
    engine = engine_of(steps, clock)
    outputs = submit(engine)
    for _ in range(3):
        await begun(steps)
        engine.check_health()
        clock.now += 0.9 * TIMEOUT_S
        engine.check_health()
        steps.may_end.release()
    while not outputs:
        await asyncio.sleep(0.001)
    engine.check_health()
    await engine.shutdown()


async def test_a_rest_is_no_stall_and_does_not_count_towards_one(steps: Steps) -> None:
    clock = Hand()
    engine = engine_of(steps, clock)
    clock.now += 100 * TIMEOUT_S
    engine.check_health()
    submit(engine)
    await begun(steps)
    engine.check_health()
    clock.now += TIMEOUT_S
    with pytest.raises(EngineStalled):
        engine.check_health()


async def test_a_stall_that_passes_is_forgotten(steps: Steps) -> None:
    clock = Hand()
    engine = engine_of(steps, clock)
    submit(engine)
    await begun(steps)
    clock.now += 2 * TIMEOUT_S
    with pytest.raises(EngineStalled):
        engine.check_health()
    steps.may_end.release()
    await begun(steps)
    engine.check_health()


async def test_without_a_timeout_no_step_is_too_long(steps: Steps) -> None:
    clock = Hand()
    engine = engine_of(steps, clock, stall_timeout_s=None)
    submit(engine)
    await begun(steps)
    clock.now += 1e9
    engine.check_health()


async def test_errors_of_the_engines_end_are_told_from_a_requests_own(steps: Steps) -> None:
    engine = engine_of(steps, Hand())
    seen: list[bool] = []
    spec = EngineRequest(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), seed=0)
    engine.submit(spec, lambda output: seen.append(engine.has_ended))
    await begun(steps)
    assert not engine.has_ended
    steps.error = RuntimeError("the device is gone")
    steps.may_end.release()
    while not seen:
        await asyncio.sleep(0.001)
    assert seen == [True]
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.check_health()
