"""The executor of one device in the engine's own process."""

from __future__ import annotations

from engine.config import EngineConfig, ModelConfig
from engine.outputs import SampledStep, SchedulerOutput
from engine.worker.worker import Worker


class UniProcExecutor:
    """Runs the one worker by plain calls. See `engine.protocols.Executor`."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self._worker: Worker | None = Worker(config, model_config)

    def kv_blocks_that_fit(self) -> int:
        return self._running().kv_blocks_that_fit()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._running().allocate_kv_cache(num_blocks)

    def execute(self, work: SchedulerOutput) -> list[SampledStep]:
        return self._running().execute(work)

    def reset(self) -> None:
        self._running().reset()

    def shutdown(self) -> None:
        self._worker = None

    def _running(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor was shut down")
        return self._worker
