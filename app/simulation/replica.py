"""One replica: a real EngineCore whose steps take virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from app.simulation.event_loop import EventLoop
from app.simulation.step_cost import LLAMA_8B, SimulatedExecutor, StepCost
from engine import CoreStep, EngineConfig, EngineCore, EngineRequest


class SimulatedReplica:
    """Takes requests, and steps for as long as there is something to do.

    As in the real one, requests that come during a step are taken in after it, and what the step gave is told at its
    end.

    Attributes:
        core: at the end of its current step already, where one is under way.
    """

    def __init__(
        self,
        replica_id: str,
        loop: EventLoop,
        *,
        config: EngineConfig,
        max_model_len: int,
        cost: StepCost,
        on_submit: Callable[[EngineRequest, int], object],
        on_step: Callable[[str, CoreStep], object],
    ) -> None:
        """
        Args:
            config: with num_kv_blocks.
            on_submit: told of a request and of how many the core has received with it.
            on_step: told of this replica's id and of what a step gave, at the step's end.
        """
        self.replica_id = replica_id
        self._loop = loop
        self._on_submit = on_submit
        self._on_step = on_step
        self._inbox: list[EngineRequest] = []
        self._num_received = 0
        self._is_stepping = False
        self._now = loop.now
        executor = SimulatedExecutor(cost, config.block_size, self._pass_time)
        self.core = EngineCore(config, replace(LLAMA_8B, max_model_len=max_model_len), executor, clock=self._time)

    @property
    def is_idle(self) -> bool:
        return not (self._is_stepping or self._inbox or self.core.has_work())

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        self._inbox.extend(requests)
        if not self._is_stepping:
            self._step_soon()

    def _step_soon(self) -> None:
        """Once all that arrives at this same moment is there."""
        self._is_stepping = True
        self._loop.at(self._loop.now, self._step)

    def _step(self) -> None:
        self._now = self._loop.now
        for request in self._inbox:
            self.core.add_request(request)
            self._num_received += 1
            self._on_submit(request, self._num_received)
        self._inbox.clear()
        step = self.core.step()
        self._loop.at(self._now, partial(self._end_step, step))

    def _end_step(self, step: CoreStep) -> None:
        self._is_stepping = False
        self._on_step(self.replica_id, step)
        if (self._inbox or self.core.has_work()) and not self._is_stepping:
            self._step_soon()

    def _time(self) -> float:
        return self._now

    def _pass_time(self, seconds: float) -> None:
        self._now += seconds
