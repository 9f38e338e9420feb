from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, EngineCore, EngineRequest, SamplingParams, StepProfiler
from engine.outputs import SchedulerOutput
from engine.profiling.bookkeeping import bookkeeping_core
from engine.profiling.spans import SpanRecorder
from engine.profiling.step_profiler import PHASES
from engine.protocols import StepHandle


@pytest.fixture
def core() -> EngineCore:
    config = EngineConfig(model="none", max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=64)
    return bookkeeping_core(config, max_model_len=128)


def add(core: EngineCore, *lengths: int, max_tokens: int = 3) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index, length in enumerate(lengths):
        tokens = tuple(range(index, index + length))
        core.add_request(EngineRequest(request_id=str(index), prompt_token_ids=tokens, params=params, seed=0))


def run(core: EngineCore) -> list[int]:
    """Tokens that all requests give together, by step."""
    given = []
    while core.has_work():
        given.append(sum(len(output.new_token_ids) for output in core.step().outputs))
    return given


def test_time_of_inner_calls_is_not_counted_twice() -> None:
    ticks = itertools.count()

    class Part:
        def outer(self) -> None:
            self.inner()
            self.inner()

        def inner(self) -> None:
            next(ticks)

    part = Part()
    recorder = SpanRecorder(lambda: float(next(ticks)))
    recorder.watch(part, "outer", "a")
    recorder.watch(part, "inner", "b")
    part.outer()
    assert [(span.phase, span.seconds, span.own_seconds) for span in recorder.spans] == [
        ("b", 2, 2),
        ("b", 2, 2),
        ("a", 7, 3),
    ]


def test_call_that_raises_is_recorded_and_raises() -> None:
    class Part:
        def fails(self) -> None:
            raise KeyError

    part, recorder = Part(), SpanRecorder()
    recorder.watch(part, "fails", "a")
    with pytest.raises(KeyError):
        part.fails()
    assert [span.phase for span in recorder.spans] == ["a"]


def test_engine_is_as_before_when_profiling_ends(core: EngineCore) -> None:
    parts: list[Any] = [core, core._scheduler, core._executor]
    before = [set(vars(part)) for part in parts]
    with StepProfiler(core):
        assert [set(vars(part)) for part in parts] != before
    assert [set(vars(part)) for part in parts] == before


def test_step_knows_what_it_computed(core: EngineCore) -> None:
    add(core, 20, 3)
    with StepProfiler(core) as profiler:
        given = run(core)
    steps = profiler.steps
    # 16 tokens of the first prompt; the other 4 beside the second prompt; then both decode, twice.
    assert [step.num_requests for step in steps] == [1, 2, 2, 2]
    assert [step.num_tokens for step in steps] == [16, 7, 2, 2]
    assert [step.num_sampled for step in steps] == given == [0, 2, 2, 2]
    assert [step.num_keys for step in steps] == [16, 20 + 3, 21 + 4, 22 + 5]
    assert [step.num_pairs for step in steps] == [136, 17 + 18 + 19 + 20 + 1 + 2 + 3, 25, 27]
    assert [step.is_decode for step in steps] == [False, False, True, True]


def test_phases_make_up_the_step(core: EngineCore) -> None:
    add(core, 5, 6)
    with StepProfiler(core) as profiler:
        run(core)
    for step in profiler.steps:
        assert sum(step.phases.values()) == pytest.approx(step.seconds)
        assert all(step.phases[phase] > 0 for phase in PHASES)


def test_step_without_work_is_not_recorded(core: EngineCore) -> None:
    with StepProfiler(core) as profiler:
        core.step()
        add(core, 5)
        core.abort(["0"])
        core.step()
    assert profiler.steps == []


def test_step_that_failed_is_counted_to_no_other(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(work: SchedulerOutput) -> StepHandle:
        raise RuntimeError("broken")

    add(core, 5)
    with StepProfiler(core) as profiler:
        with monkeypatch.context() as patch:
            patch.setattr(core._executor, "submit", failing)
            core.step()
        assert profiler.steps == []
        run(core)
    assert [step.num_tokens for step in profiler.steps] == [5, 1, 1]
    for step in profiler.steps:
        assert sum(step.phases.values()) == pytest.approx(step.seconds)


def nested(events: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Names of each event and of the one that it lies in."""
    open_events: list[dict[str, Any]] = []
    for event in events:
        while open_events and event["ts"] >= open_events[-1]["ts"] + open_events[-1]["dur"]:
            open_events.pop()
        if open_events:
            yield event["name"], open_events[-1]["name"]
        open_events.append(event)


def test_trace_nests_phases_in_steps(core: EngineCore, tmp_path: Path) -> None:
    add(core, 5, 6, max_tokens=2)
    with StepProfiler(core) as profiler:
        run(core)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(profiler.chrome_trace()))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in events if event["name"] == "step"]
    assert [event["args"] for event in steps] == [{"requests": 2, "tokens": 11}, {"requests": 2, "tokens": 2}]
    assert set(nested(events)) >= {("schedule", "step"), ("update", "step"), ("forward", "rest"), ("logits", "rest")}


def test_real_engine_is_split_into_all_phases(tiny_folder: Path) -> None:
    config = EngineConfig(
        model=str(tiny_folder), load_format="dummy", max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=64
    )
    core = EngineCore.from_config(config)
    add(core, 5, 6)
    with StepProfiler(core) as profiler:
        run(core)
    core.shutdown()
    assert len(profiler.steps) == 3
    assert all(step.phases[phase] > 0 for step in profiler.steps for phase in PHASES)
