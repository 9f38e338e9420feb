"""A core whose executor is a queue on a device without a model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from engine import EngineConfig, EngineCore
from engine.outputs import EngineOutput, SampledStep, SchedulerOutput
from engine.profiling.bookkeeping import bookkeeping_model
from engine.request import Clock, EngineRequest, FinishReason
from tests.engine.scheduler.device import VOCAB, Device, make_request, shares
from tests.engine.scheduler.engine import prompt

SEQS, BLOCK, LENGTH = 4, 4, 64


class Queue:
    """An executor whose steps run when they are waited for.

    Attributes:
        in_flight: in their order.
        submitted: the tokens that each request had in each step.
        refuses, fails: what submit(), or the result of a step, raises in the order of steps; None is nothing.
        fails_if: what the result of a step raises where this is true of it; a step is the number of tokens that each of
            its requests has afterwards.
    """

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.in_flight: deque[SchedulerOutput] = deque()
        self.refuses: list[BaseException | None] = []
        self.fails: list[BaseException | None] = []
        self.fails_if: Callable[[dict[str, int]], bool] = lambda step: False
        self.submitted: list[dict[str, int]] = []
        self._device = Device(BLOCK, SEQS)

    def kv_blocks_that_fit(self) -> int:
        raise AssertionError("the config says how many")

    def allocate_kv_cache(self, num_blocks: int) -> None: ...

    def submit(self, work: SchedulerOutput) -> Handle:
        assert work.steps
        refusal = self.refuses.pop(0) if self.refuses else None
        if refusal is not None:
            raise refusal
        self.submitted.append(shares(work))
        self.in_flight.append(work)
        assert len(self.in_flight) <= (2 if self.overlaps else 1)
        error = self.fails.pop(0) if self.fails else None
        if self.fails_if({step.request_id: step.num_computed_tokens + step.num_tokens for step in work.steps}):
            error = RuntimeError("poison")
        return Handle(self, work, error)

    def run(self, work: SchedulerOutput, error: BaseException | None) -> list[SampledStep]:
        assert self.in_flight[0] is work, "results are asked for in the order of the steps"
        if error is not None:
            raise error
        return self._device.execute(self.in_flight.popleft())

    def reset(self) -> None:
        self._device.fail(*self.in_flight)
        self.in_flight.clear()

    def shutdown(self) -> None: ...


class Handle:
    def __init__(self, queue: Queue, work: SchedulerOutput, error: BaseException | None) -> None:
        self._parts = queue, work, error

    def result(self) -> list[SampledStep]:
        queue, work, error = self._parts
        return queue.run(work, error)


class Engine:
    """A core on such a queue, and what it has put out."""

    def __init__(self, overlaps: bool, clock: Clock = time.time, **options: Any) -> None:
        self.queue = Queue(overlaps)
        config = EngineConfig(
            model="none",
            block_size=BLOCK,
            max_num_seqs=SEQS,
            debug_integrity=True,
            **{"num_kv_blocks": 64, "max_num_batched_tokens": 16, **options},
        )
        model_config = bookkeeping_model(vocab_size=VOCAB, max_model_len=LENGTH)
        self.core = EngineCore(config, model_config, self.queue, clock=clock)
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, EngineOutput] = {}

    def add(self, name: str, number: int, length: int = 5, **options: Any) -> EngineRequest:
        spec = make_request(name, prompt(number, length), **options).spec
        self.core.add_request(spec)
        return spec

    def step(self) -> list[EngineOutput]:
        outputs = self.core.step().outputs
        self.core.check_integrity()
        news = [output.request_id for output in outputs if output.finish_reason is not FinishReason.ABORT]
        assert len(set(news)) == len(news)
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.last[output.request_id] = output
        return outputs

    def finish(self) -> None:
        while self.core.has_work():
            self.step()
        assert not self.queue.in_flight
        assert self.core.load().kv_blocks_used == 0

    def count(self, name: str, **labels: str) -> float:
        value = self.core.metrics.registry.get_sample_value(name, labels)
        assert value is not None
        return value

    @property
    def reasons(self) -> dict[str, FinishReason | None]:
        return {name: output.finish_reason for name, output in self.last.items()}
