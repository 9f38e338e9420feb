"""What a step's time is made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Any, Self

from engine.core import EngineCore
from engine.outputs import SchedulerOutput
from engine.profiling.spans import SpanRecorder

PHASES = ("schedule", "inputs", "forward", "logits", "sample", "update", "rest")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        start: seconds by the profiler's clock.
        phases: seconds of each of PHASES; together they are `seconds`.
        num_requests, num_tokens: computed in it.
        num_sampled: requests that got a token.
        num_keys: keys visible to each request's last token, all requests together.
        num_pairs: of a token and a key visible to it; like num_keys without regard to sliding windows.
    """

    start: float
    seconds: float
    phases: dict[str, float]
    num_requests: int
    num_tokens: int
    num_sampled: int
    num_keys: int
    num_pairs: int

    @property
    def is_decode(self) -> bool:
        """Whether each of its requests computes one token."""
        return self.num_tokens == self.num_requests


class StepProfiler:
    """Records the steps of one engine between `with` and its end. Used on the engine's thread.

    The engine knows nothing of it: methods of its parts are wrapped while it runs, and are themselves again afterwards.
    An executor that runs elsewhere, or on a thread of its own, is one span, in `rest`. On a GPU, whose work runs
    behind, what is computed counts to `rest` as well, which waits for it. Where steps overlap, a record tells of the
    step whose results were taken in, and its time is what passed since those of the one before were.

    Attributes:
        steps: those that computed something.
    """

    def __init__(self, core: EngineCore) -> None:
        self.steps: list[StepRecord] = []
        self._core = core
        self._recorder = SpanRecorder()
        self._work = SchedulerOutput(())

    def __enter__(self) -> Self:
        core, watch = self._core, self._recorder.watch
        watch(core, "step", "rest", self._end_step)
        watch(core._scheduler, "schedule", "schedule")
        watch(core._scheduler, "update", "update", self._note_work)
        watch(core._executor, "submit", "rest")
        runner = _runner_of(core._executor)
        if runner is not None:
            watch(runner, "_apply_deltas", "inputs")
            watch(runner._buffers, "prepare", "inputs")
            watch(runner._attention, "prepare", "inputs")
            watch(runner._model, "forward", "forward")
            watch(runner._model, "compute_logits", "logits")
            watch(runner._sampler, "sample", "sample")
            if runner._graphs is not None:
                watch(runner._graphs, "replay", "forward")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.close()

    def chrome_trace(self) -> dict[str, Any]:
        """All calls in the Trace Event Format, which Perfetto and chrome://tracing open."""
        spans = self._recorder.spans
        origin = min((span.start for span in spans), default=0.0)
        shown: dict[float, dict[str, int]] = {
            step.start: {"requests": step.num_requests, "tokens": step.num_tokens} for step in self.steps
        }
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "engine"}}
        ]
        for span in sorted(spans, key=lambda span: (span.start, -span.seconds)):
            args = shown.get(span.start)
            events.append(
                {
                    "name": "step" if args else span.phase,
                    "ph": "X",
                    "ts": (span.start - origin) * 1e6,
                    "dur": span.seconds * 1e6,
                    "pid": 1,
                    "tid": 1,
                    "args": args or {},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _note_work(self, args: tuple[Any, ...], outputs: Any) -> None:
        self._work = args[0]

    def _end_step(self, args: tuple[Any, ...], result: Any) -> None:
        whole, work = self._recorder.spans[-1], self._work
        self._work = SchedulerOutput(())
        phases = dict.fromkeys(PHASES, 0.0)
        # Spans and work of a step that raised, if there was one before, are in no record.
        for span in takewhile(lambda span: span.start >= whole.start, reversed(self._recorder.spans)):
            phases[span.phase] += span.own_seconds
        if not phases["schedule"] or not work.steps:
            return
        num_keys = num_pairs = 0
        for step in work.steps:
            before, count = step.num_computed_tokens, step.num_tokens
            num_keys += before + count
            num_pairs += count * before + count * (count + 1) // 2
        self.steps.append(
            StepRecord(
                start=whole.start,
                seconds=whole.seconds,
                phases=phases,
                num_requests=len(work.steps),
                num_tokens=work.num_tokens,
                num_sampled=sum(step.samples for step in work.steps),
                num_keys=num_keys,
                num_pairs=num_pairs,
            )
        )


def _runner_of(executor: Any) -> Any:
    """The ModelRunner of an executor on this thread."""
    if getattr(executor, "_thread", None) is not None:
        return None
    return getattr(getattr(executor, "_worker", executor), "_runner", None)
