"""The engine's loop on a device without a model: steps in flight, interrupts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine import EngineConfig, EngineCore
from engine.profiling.bookkeeping import bookkeeping_model
from engine.request import FinishReason
from tests.engine.queue_engine import BLOCK, LENGTH, SEQS, Engine, Queue
from tests.engine.scheduler.device import EOS, VOCAB, Clock, make_request, shares, true_output
from tests.engine.scheduler.engine import prompt


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


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapped"])
def test_the_time_of_a_step_is_that_of_the_device_alone(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = Engine(overlaps, clock)
    move_when_a_step_runs(clock, 1.0, engine.queue, monkeypatch)
    for name in "ab":
        engine.add(name, 1, max_tokens=4)
        engine.finish()
        clock.now += 50.0  # a rest
    times = engine.core.load().step_times
    assert times.seconds == pytest.approx(times.steps)


def test_a_clock_that_is_set_forward_makes_no_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, device = Clock(), Queue(overlaps=False)
    move_when_a_step_runs(clock, 1e6, device, monkeypatch)
    model_config = bookkeeping_model(vocab_size=VOCAB, max_model_len=LENGTH)
    monkeypatch.setattr("engine.core.load_model_config", lambda config: model_config)
    monkeypatch.setattr("engine.core.UniProcExecutor", lambda config, model_config: device)
    core = EngineCore.from_config(
        EngineConfig(model="none", block_size=BLOCK, max_num_seqs=SEQS, num_kv_blocks=64), clock=clock
    )
    core.add_request(make_request("a", prompt(1, 5), max_tokens=4).spec)
    while core.has_work():
        core.step()
    assert core.load().step_times.seconds < 1e6


def move_when_a_step_runs(clock: Clock, seconds: float, device: Queue, patch: pytest.MonkeyPatch) -> None:
    run = device.run

    def moving(*args: Any) -> Any:
        clock.now += seconds
        return run(*args)

    patch.setattr(device, "run", moving)


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


def test_ends_that_no_step_has_told_outlive_an_interrupt(engine: Engine) -> None:
    engine.add("a", 1, 8, max_tokens=6)
    engine.add("over", 2, 8, max_tokens=6)
    engine.step()
    engine.core.abort(["a"])
    # It is over as it comes, and so is one whose deadline has passed.
    engine.add("full", 3, 8, max_tokens=2, output=[7, 7])
    engine.add("late", 4, 8, max_tokens=6, deadline=1.0)
    engine.queue.refuses = [KeyboardInterrupt()] * 2
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    engine.add("next", 5, 8, max_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == ["a", "full", "late", "next", "over"]
    assert {name for name, reason in engine.reasons.items() if reason is FinishReason.ABORT} == {"a", "late"}
    assert not engine.core.has_work()


def test_a_request_whose_last_token_an_interrupt_lost_was_interrupted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add("a", 1, 8, max_tokens=1)
    interrupt(engine.core._scheduler, "update", monkeypatch, after=int(engine.queue.overlaps))
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    (output,) = engine.step()
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "the step was interrupted")


def test_requests_can_be_added_right_after_an_interrupt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(engine.core._scheduler, "add", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.add("a", 1, 8, max_tokens=6)
    spec = engine.add("b", 2, 8, max_tokens=6)
    engine.finish()
    assert engine.last["a"].error == "the step was interrupted"
    assert engine.tokens["b"] == true_output(spec, LENGTH)
