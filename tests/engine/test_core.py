"""The engine's loop on a device without a model: steps in flight, failures, interrupts."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, EngineCore, ModelConfig
from engine.outputs import EngineOutput, SampledStep, SchedulerOutput
from engine.request import EngineRequest, FinishReason
from tests.engine.scheduler.device import EOS, VOCAB, Device, make_request, shares, true_output
from tests.engine.scheduler.engine import prompt

SEQS, BLOCK, LENGTH = 4, 4, 64


class Queue:
    """An executor whose steps run when they are waited for.

    Attributes:
        in_flight: in their order.
        refuses, fails: what submit(), or the result of a step, raises in the order of steps; None is nothing.
    """

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.in_flight: deque[SchedulerOutput] = deque()
        self.refuses: list[BaseException | None] = []
        self.fails: list[BaseException | None] = []
        self._device = Device(BLOCK, SEQS)

    def kv_blocks_that_fit(self) -> int:
        raise AssertionError("the config says how many")

    def allocate_kv_cache(self, num_blocks: int) -> None: ...

    def submit(self, work: SchedulerOutput) -> Handle:
        assert work.steps
        refusal = self.refuses.pop(0) if self.refuses else None
        if refusal is not None:
            raise refusal
        self.in_flight.append(work)
        assert len(self.in_flight) <= (2 if self.overlaps else 1)
        return Handle(self, work, self.fails.pop(0) if self.fails else None)

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

    def __init__(self, overlaps: bool) -> None:
        self.queue = Queue(overlaps)
        config = EngineConfig(
            model="none",
            num_kv_blocks=64,
            block_size=BLOCK,
            max_num_seqs=SEQS,
            max_num_batched_tokens=16,
            debug_integrity=True,
        )
        model_config = ModelConfig(
            name="none",
            path=Path(),
            architecture="",
            vocab_size=VOCAB,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            max_model_len=LENGTH,
            dtype="float32",
        )
        self.core = EngineCore(config, model_config, self.queue)
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


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


@pytest.fixture
def overlapped() -> Engine:
    return Engine(overlaps=True)


def test_tokens_and_counts_are_the_same_whether_or_not_steps_overlap(engine: Engine) -> None:
    specs = [engine.add(f"r{number}", number, 3 + number, eos=[EOS], max_tokens=40) for number in range(8)]
    engine.finish()
    truth = [true_output(spec, LENGTH) for spec in specs]
    assert any(output[-1] == EOS for output in truth)
    assert [engine.tokens[spec.request_id] for spec in specs] == truth
    assert engine.count("manta_generated_tokens_total") == sum(len(output) for output in truth)
    assert engine.count("manta_requests_finished_total", reason="stop") == sum(output[-1] == EOS for output in truth)
    for spec, output in zip(specs, truth, strict=True):
        timing = engine.last[spec.request_id].timing
        assert timing is not None
        assert timing.num_generated_tokens == len(output)


def test_the_next_step_is_in_flight_while_results_are_taken_in(overlapped: Engine) -> None:
    overlapped.add("a", 1, max_tokens=4)
    in_flight = []
    while overlapped.core.has_work():
        outputs = overlapped.step()
        in_flight.append((len(outputs), [shares(work) for work in overlapped.queue.in_flight]))
    # The first step gives nothing yet; the last is waited for at once, as there is nothing more to start.
    assert in_flight == [(0, [{"a": 5}]), (1, [{"a": 1}]), (1, [{"a": 1}]), (1, [{"a": 1}]), (1, [])]
    assert overlapped.count("manta_engine_overlapped_steps_total") == 3


def test_an_executor_that_does_not_overlap_gets_one_step_at_a_time() -> None:
    engine = Engine(overlaps=False)
    engine.add("a", 1, max_tokens=4)
    while engine.core.has_work():
        assert len(engine.step()) == 1
        assert not engine.queue.in_flight
    assert engine.count("manta_engine_overlapped_steps_total") == 0


def test_an_engine_has_work_until_its_last_step_is_taken_in(overlapped: Engine) -> None:
    truth = true_output(make_request("a", prompt(1, 5), max_tokens=9).spec, LENGTH)
    overlapped.add("a", 1, eos=truth[:1], max_tokens=9)
    overlapped.step()
    (output,) = overlapped.step()
    assert output.finish_reason is FinishReason.STOP
    assert overlapped.core.has_work()
    assert overlapped.step() == []
    assert not overlapped.core.has_work()
    assert not overlapped.queue.in_flight


def test_an_abort_leaves_no_step_in_flight(overlapped: Engine) -> None:
    overlapped.add("a", 1, max_tokens=9)
    overlapped.step()
    overlapped.step()
    overlapped.core.abort(["a"])
    (output,) = overlapped.step()
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.ABORT, ())
    assert not overlapped.core.has_work()
    assert not overlapped.queue.in_flight


def test_an_id_can_be_used_again_as_soon_as_it_was_aborted(engine: Engine) -> None:
    engine.add("a", 1, seed=1, max_tokens=9)
    engine.step()
    engine.step()
    engine.core.abort(["a"])
    again = engine.add("a", 2, seed=2, max_tokens=9)
    outputs = []
    while engine.core.has_work():
        outputs += engine.step()
    assert outputs[0].finish_reason is FinishReason.ABORT
    assert [token for output in outputs for token in output.new_token_ids] == true_output(again, LENGTH)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("refused", [False, True], ids=["runs and fails", "is refused"])
def test_a_step_that_fails_costs_its_requests_and_no_others(engine: Engine, at: int, refused: bool) -> None:
    specs = {name: engine.add(name, number, 8, max_tokens=6) for number, name in enumerate("ab")}
    faults = engine.queue.refuses if refused else engine.queue.fails
    faults += [*[None] * at, MemoryError("no memory for this step")]
    for _ in range(at + 1):
        engine.step()
    specs["c"] = engine.add("c", 3, 8, max_tokens=6)
    engine.finish()
    assert engine.reasons == {"a": "error", "b": "error", "c": "length"}
    assert engine.last["a"].error == "a step of the engine failed: no memory for this step"
    # What the steps before it gave has arrived, and nothing of those after it.
    assert engine.tokens["a"] == true_output(specs["a"], LENGTH)[:at]
    assert engine.tokens["c"] == true_output(specs["c"], LENGTH)
    specs["a again"] = engine.add("a again", 0, 8, max_tokens=6)
    engine.finish()
    assert engine.tokens["a again"] == true_output(specs["a again"], LENGTH)


def test_a_request_that_only_runs_behind_a_failed_step_goes_on(overlapped: Engine) -> None:
    overlapped.queue.fails = [RuntimeError("broken"), None]
    overlapped.add("a", 1, 16, max_tokens=6)
    overlapped.step()
    behind = overlapped.add("b", 2, 8, max_tokens=6)
    overlapped.step()
    overlapped.finish()
    assert overlapped.reasons == {"a": "error", "b": "length"}
    assert overlapped.tokens["b"] == true_output(behind, LENGTH)


def test_the_third_failure_in_a_row_ends_the_engine(engine: Engine) -> None:
    engine.queue.fails = [RuntimeError(f"broken {number}") for number in range(6)]
    for number in range(3):
        engine.add(f"r{number}", number, 16)
    with pytest.raises(RuntimeError, match="broken"):
        engine.finish()
    assert len(engine.last) == 2
    assert not engine.core.has_work()
    engine.core.abort(f"r{number}" for number in range(3))
    for call in (engine.core.step, lambda: engine.add("late", 9, 5)):
        with pytest.raises(RuntimeError, match="the engine ended: RuntimeError\\('broken"):
            call()


def test_failures_that_are_not_in_a_row_do_not_end_the_engine(engine: Engine) -> None:
    engine.queue.fails = [RuntimeError("broken"), None, None, None] * 3
    for number in range(9):
        engine.add(f"r{number}", number, 5, max_tokens=3)
        engine.finish()
    assert engine.count("manta_requests_finished_total", reason="error") == 3


@pytest.mark.parametrize("refused", [False, True], ids=["while it waits", "in submit"])
def test_an_interrupt_forgets_what_is_in_flight(engine: Engine, refused: bool) -> None:
    faults = engine.queue.refuses if refused else engine.queue.fails
    faults += [None, KeyboardInterrupt()]
    engine.add("a", 1, 8, max_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    assert_starts_over(engine)


def assert_starts_over(engine: Engine) -> None:
    """All requests end, and what comes after them is right."""
    assert engine.core.has_work()
    (output,) = engine.step()
    assert output.error == "the step was interrupted"
    assert not engine.core.has_work()
    assert not engine.queue.in_flight
    again = engine.add("a", 1, 8, max_tokens=6)
    engine.tokens.clear()
    engine.finish()
    assert engine.tokens["a"] == true_output(again, LENGTH)


def interrupt(owner: Any, method: str, patch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """Ctrl-C when a method has done its work, after so many calls that go well."""
    original, calls = getattr(owner, method), itertools.count()

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if next(calls) == after:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, method, interrupted)


@pytest.mark.parametrize("method", ["schedule", "update"])
def test_an_interrupt_in_the_bookkeeping_leaves_an_engine_that_works(
    engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add("a", 1, 8, max_tokens=6)
    interrupt(engine.core._scheduler, method, monkeypatch, after=2)
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    assert_starts_over(engine)


def test_an_interrupt_of_the_recovery_only_begins_it_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.queue.fails = [None, KeyboardInterrupt()]
    engine.add("a", 1, 8, max_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    interrupt(engine.queue, "reset", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert_starts_over(engine)


def test_requests_can_be_added_right_after_an_interrupt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(engine.core._scheduler, "add", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.add("a", 1, 8, max_tokens=6)
    spec = engine.add("b", 2, 8, max_tokens=6)
    engine.finish()
    assert engine.last["a"].error == "the step was interrupted"
    assert engine.tokens["b"] == true_output(spec, LENGTH)
