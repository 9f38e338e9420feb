"""The executor of one device, with a worker that does what the test lets it do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.executor.uniproc import UniProcExecutor
from engine.outputs import SampledStep, SchedulerOutput

WORK = SchedulerOutput(())


class Handle:
    def __init__(self, result: Callable[[], list[SampledStep]]) -> None:
        self.result = result


class Worker:
    """Steps take until they are let go; events are what happened, and on which thread."""

    def __init__(self, device: str) -> None:
        self.device = SimpleNamespace(type=device)
        self.go = threading.Event()
        self.error: Exception | None = None
        self.events: list[tuple[str, bool]] = []

    def submit(self, work: SchedulerOutput) -> Handle:
        self._note("submit")
        return Handle(self._wait if self.device.type == "cuda" else list)

    def execute(self, work: SchedulerOutput) -> list[SampledStep]:
        return self._wait()

    def reset(self) -> None:
        self._note("reset")

    def shutdown(self) -> None:
        self._note("shutdown")

    def _wait(self) -> list[SampledStep]:
        assert self.go.wait(10)
        self._note("done")
        if self.error is not None:
            raise self.error
        return []

    def _note(self, event: str) -> None:
        self.events.append((event, threading.current_thread() is threading.main_thread()))


Make = Callable[..., tuple[UniProcExecutor, Worker]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[tuple[UniProcExecutor, Worker]] = []

    def make(device: str, async_scheduling: bool | None) -> tuple[UniProcExecutor, Worker]:
        worker = Worker(device)
        monkeypatch.setattr("engine.executor.uniproc.Worker", lambda *args: worker)
        config: Any = EngineConfig(model="none", async_scheduling=async_scheduling)
        made.append((UniProcExecutor(config, None), worker))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for executor, worker in made:
        worker.go.set()
        executor.shutdown()


def test_steps_overlap_on_a_gpu_unless_told_otherwise(make: Make) -> None:
    chosen = [(device, value) for device in ("cuda", "cpu") for value in (None, True, False)]
    assert [make(*each)[0].overlaps for each in chosen] == [True, True, False, False, True, False]


def test_a_gpu_is_fed_by_the_thread_that_submits(make: Make) -> None:
    executor, worker = make("cuda", True)
    executor.submit(WORK)
    assert worker.events == [("submit", True)]


def test_a_step_behind_a_failed_one_does_not_run(make: Make) -> None:
    executor, worker = make("cpu", True)
    worker.error = RuntimeError("broken")
    first, second = executor.submit(WORK), executor.submit(WORK)
    worker.go.set()
    for handle, message in ((first, "broken"), (second, "the step before it failed")):
        with pytest.raises(RuntimeError, match=message):
            handle.result()
    assert [event for event, _ in worker.events] == ["done"]
    worker.error = None
    executor.reset()
    assert executor.submit(WORK).result() == []


def test_a_cpu_that_does_not_overlap_runs_a_step_at_once(make: Make) -> None:
    executor, worker = make("cpu", None)
    assert executor.submit(WORK).result() == []
    assert worker.events == [("submit", True)]


def test_a_cpu_runs_overlapped_steps_on_a_thread_of_their_own(make: Make) -> None:
    executor, worker = make("cpu", True)
    first, second = executor.submit(WORK), executor.submit(WORK)
    assert worker.events == []
    worker.go.set()
    assert first.result() == second.result() == []
    assert worker.events == [("done", False), ("done", False)]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("error", [None, RuntimeError("it failed as well")], ids=["runs", "fails"])
def test_a_reset_waits_for_what_is_in_flight(make: Make, device: str, error: Exception | None) -> None:
    executor, worker = make(device, True)
    worker.error = error
    executor.submit(WORK)
    threading.Timer(0.05, worker.go.set).start()
    executor.reset()
    assert [event for event, _ in worker.events if event != "submit"] == ["done", "reset"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_shutdown_waits_and_may_come_twice(make: Make, device: str) -> None:
    executor, worker = make(device, True)
    executor.submit(WORK)
    threading.Timer(0.05, worker.go.set).start()
    executor.shutdown()
    executor.shutdown()
    assert [event for event, _ in worker.events if event != "submit"] == ["done", "shutdown"]
    with pytest.raises(RuntimeError, match="was shut down"):
        executor.submit(WORK)
