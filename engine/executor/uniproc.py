"""The executor of one device in the engine's own process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from engine.config import EngineConfig, ModelConfig
from engine.outputs import SampledStep, SchedulerOutput
from engine.protocols import StepHandle
from engine.worker.worker import Worker


class UniProcExecutor:
    """Runs the one worker by plain calls. See `engine.protocols.Executor`.

    A GPU works beside the thread that feeds it. On a CPU, where a step is done when the worker returns, steps that are
    to overlap run on a thread of their own; the engine's own then touches the worker only while nothing is in flight.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self._worker: Worker | None = Worker(config, model_config)
        on_gpu = self._worker.device.type == "cuda"
        self.overlaps = on_gpu if config.async_scheduling is None else config.async_scheduling
        self._thread = ThreadPoolExecutor(1, "manta-worker") if self.overlaps and not on_gpu else None
        self._last: StepHandle | None = None
        self._failed = False

    def kv_blocks_that_fit(self) -> int:
        return self._running().kv_blocks_that_fit()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._running().allocate_kv_cache(num_blocks)

    def submit(self, work: SchedulerOutput) -> StepHandle:
        worker = self._running()
        if self._thread is None:
            self._last = worker.submit(work)
        else:
            self._last = self._thread.submit(self._execute, worker, work)
        return self._last

    def _execute(self, worker: Worker, work: SchedulerOutput) -> list[SampledStep]:
        """On the worker's thread, where a step may already wait behind one that fails.

        It must not run: of the failed one's blocks and rows nobody knows which the worker has heard of.
        """
        if self._failed:
            raise RuntimeError("the step before it failed")
        try:
            return worker.execute(work)
        except BaseException:
            self._failed = True
            raise

    def reset(self) -> None:
        self._wait()
        self._running().reset()
        self._failed = False

    def shutdown(self) -> None:
        self._wait()
        if self._thread is not None:
            self._thread.shutdown()
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.shutdown()

    def _wait(self) -> None:
        """For the last step: all before it are then done as well."""
        if self._last is not None:
            with suppress(Exception):
                self._last.result()
            self._last = None

    def _running(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor was shut down")
        return self._worker
