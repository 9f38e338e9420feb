"""Steps that fail: who is tried again, who ends with an error, and when the engine does."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from engine.outputs import SampledStep, SchedulerOutput
from engine.request import EngineRequest, FinishReason
from tests.engine.queue_engine import LENGTH, Engine
from tests.engine.scheduler.device import shares, true_output

PROBE = {"probe": 1}


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def engine(overlaps: bool) -> Engine:
    return Engine(overlaps)


def add_all(engine: Engine, names: str, length: int = 8, **options: Any) -> dict[str, EngineRequest]:
    options = {"max_tokens": 6, **options}
    return {name: engine.add(name, number, length, **options) for number, name in enumerate(names)}


def has_all_tokens(engine: Engine, specs: dict[str, EngineRequest]) -> bool:
    return all(engine.tokens[name] == true_output(spec, LENGTH) for name, spec in specs.items())


def num_failed(engine: Engine) -> float:
    return engine.count("manta_engine_failed_steps_total")


def tried_alone(engine: Engine) -> list[str]:
    """Whose step was the only thing that ran, in the order of the steps."""
    return [name for step in engine.queue.submitted if len(step) == 1 for name in step]


# ---- who is tried again ----


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("refused", [False, True], ids=["runs and fails", "is refused"])
def test_a_step_that_fails_once_costs_nobody_a_token(engine: Engine, at: int, refused: bool) -> None:
    specs = add_all(engine, "ab")
    faults = engine.queue.refuses if refused else engine.queue.fails
    faults += [*[None] * at, MemoryError("no memory for this step")]
    for _ in range(at + 1):
        engine.step()
    specs["c"] = engine.add("c", 3, 8, max_tokens=6)
    engine.finish()
    assert set(engine.reasons.values()) == {FinishReason.LENGTH}
    assert has_all_tokens(engine, specs)
    assert num_failed(engine) == 1


def test_the_requests_of_a_failed_step_are_tried_one_after_another_then_run_together(engine: Engine) -> None:
    engine.queue.fails = [RuntimeError("broken")]
    add_all(engine, "abc", 5, max_tokens=3)
    engine.finish()
    steps = engine.queue.submitted
    first = steps.index({"a": 5})
    assert steps[first:] == [{"a": 5}, {"b": 5}, {"c": 5}, *[{"a": 1, "b": 1, "c": 1}] * 2]


def test_nothing_else_is_in_flight_while_a_request_is_tried() -> None:
    engine = Engine(overlaps=True)
    engine.queue.fails = [RuntimeError("broken")]
    specs = add_all(engine, "ab", 5)
    engine.step()
    engine.step()
    seen = []
    while engine.core.has_work():
        engine.step()
        seen.append([shares(work) for work in engine.queue.in_flight])
    assert seen[:4] == [[{"a": 5}], [], [{"b": 5}], []]
    assert has_all_tokens(engine, specs)


def test_a_request_that_came_later_waits_until_all_were_tried(engine: Engine) -> None:
    engine.queue.fails = [RuntimeError("broken")]
    specs = add_all(engine, "ab", 5)
    while not num_failed(engine):
        engine.step()
    specs["late"] = engine.add("late", 9, 5, max_tokens=3)
    engine.finish()
    first = engine.queue.submitted.index({"a": 5})
    assert engine.queue.submitted[first : first + 3] == [{"a": 5}, {"b": 5}, {"a": 1, "b": 1, "late": 5}]
    assert has_all_tokens(engine, specs)


def test_requests_are_tried_in_the_order_of_their_priority(overlaps: bool) -> None:
    engine = Engine(overlaps, scheduling_policy="priority")
    engine.queue.fails = [None, None, RuntimeError("broken")]
    specs = {name: engine.add(name, rank, 5, priority=-rank, max_tokens=9) for rank, name in enumerate("abc")}
    engine.finish()
    assert tried_alone(engine) == ["c", "b", "a"]
    assert has_all_tokens(engine, specs)


def test_a_prompt_is_tried_up_to_the_part_that_failed(engine: Engine) -> None:
    # The budget is 16: the parts of a end at 16, 32 and 40, and the second one fails.
    engine.queue.fails = [None, RuntimeError("broken")]
    specs = {"a": engine.add("a", 1, 40, max_tokens=3), "b": engine.add("b", 2, 5, max_tokens=3)}
    engine.finish()
    assert set(engine.reasons.values()) == {FinishReason.LENGTH}
    assert has_all_tokens(engine, specs)
    assert num_failed(engine) == 1


def test_only_a_request_that_runs_behind_a_failed_step_is_not_tried_alone() -> None:
    engine = Engine(overlaps=True)
    engine.queue.fails = [RuntimeError("broken"), None]
    engine.add("a", 1, 16, max_tokens=6)
    engine.step()
    engine.add("b", 2, 8, max_tokens=6)
    engine.step()
    engine.finish()
    assert engine.queue.submitted[:4] == [{"a": 16}, {"a": 1, "b": 8}, {"a": 16}, {"a": 1, "b": 8}]
    assert engine.reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


def test_steps_that_fail_with_more_than_one_request_still_bring_all_to_their_end(engine: Engine) -> None:
    engine.queue.fails_if = lambda step: len(step) > 1
    specs = add_all(engine, "abcd", 20)
    engine.finish()
    assert set(engine.reasons.values()) == {FinishReason.LENGTH}
    assert has_all_tokens(engine, specs)
    assert PROBE not in engine.queue.submitted


def test_a_request_that_passed_makes_room_for_the_next_one(overlaps: bool) -> None:
    engine = Engine(overlaps, num_kv_blocks=16, max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.queue.fails = [*[None] * 13, RuntimeError("broken")]
    specs = {"a": engine.add("a", 1, 16, max_tokens=30), "b": engine.add("b", 2, 40, max_tokens=9)}
    engine.finish()
    assert engine.queue.submitted[13] == {"a": 1, "b": 3}
    # By then a has 7 blocks, and b is to start only where all its 10 have room: it had them before a had grown.
    alone = next(index for index, step in enumerate(engine.queue.submitted) if step.keys() == {"b"})
    assert any(step.get("a", 0) > 1 for step in engine.queue.submitted[alone:])
    assert has_all_tokens(engine, specs)


# ---- who ends ----


@pytest.mark.parametrize("poison", ["a", "b", "c"])
@pytest.mark.parametrize("tokens", [8, 10], ids=["prompt", "output"])
def test_a_request_that_fails_alone_ends_and_its_neighbours_lose_nothing(
    engine: Engine, poison: str, tokens: int
) -> None:
    engine.queue.fails_if = lambda step: step.get(poison, 0) >= tokens
    specs = add_all(engine, "abc")
    engine.finish()
    spec = specs.pop(poison)
    assert engine.reasons == {poison: FinishReason.ERROR, **dict.fromkeys(specs, FinishReason.LENGTH)}
    assert engine.last[poison].error == "a step of the engine failed: poison"
    # What came before is the client's.
    assert engine.tokens[poison] == true_output(spec, LENGTH)[: tokens - 8]
    assert has_all_tokens(engine, specs)
    assert num_failed(engine) == 2
    assert engine.queue.submitted.count(PROBE) == 1


@pytest.mark.parametrize("caching", [True, False])
def test_a_later_part_of_a_prompt_may_be_the_cause(overlaps: bool, caching: bool) -> None:
    engine = Engine(overlaps, enable_prefix_caching=caching)
    engine.queue.fails_if = lambda step: step.get("a", 0) >= 40
    engine.add("a", 1, 40, max_tokens=3)
    specs = {"b": engine.add("b", 2, 5, max_tokens=9)}
    engine.finish()
    assert engine.reasons == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert has_all_tokens(engine, specs)
    assert num_failed(engine) == 2


def test_several_bad_requests_in_a_step_all_end(engine: Engine) -> None:
    engine.queue.fails_if = lambda step: bool(step.keys() & {"a", "c", "d"})
    specs = add_all(engine, "abcd", 4)
    engine.finish()
    assert {name for name, reason in engine.reasons.items() if reason is FinishReason.ERROR} == {"a", "c", "d"}
    assert engine.tokens["b"] == true_output(specs["b"], LENGTH)


def test_what_a_failed_step_wrote_is_not_found_by_the_next_one(engine: Engine) -> None:
    engine.queue.fails_if = lambda step: "a" in step
    engine.add("a", 1, 16, max_tokens=6)
    engine.finish()
    again = engine.add("again", 1, 16, max_tokens=6)
    engine.finish()
    assert engine.last["again"].num_cached_tokens == 0
    assert engine.tokens["again"] == true_output(again, LENGTH)


def test_a_failed_step_leaves_its_memory_to_the_next_try(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []
    run, submit = engine.queue.run, engine.queue.submit

    def fails(work: SchedulerOutput, error: BaseException | None) -> list[SampledStep]:
        if "a" not in {step.request_id for step in work.steps}:
            return run(work, error)
        activations = Tensor()
        held.append(weakref.ref(activations))
        raise MemoryError

    def submits(work: SchedulerOutput) -> Any:
        assert all(tensor() is None for tensor in held)
        return submit(work)

    monkeypatch.setattr(engine.queue, "run", fails)
    monkeypatch.setattr(engine.queue, "submit", submits)
    add_all(engine, "ab")
    engine.finish()
    assert len(held) == 2


# ---- while requests are tried ----


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_may_be_aborted_while_it_is_tried_or_waits_for_that(engine: Engine, name: str, steps: int) -> None:
    engine.queue.fails = [None, RuntimeError("broken")]
    specs = add_all(engine, "abc")
    while not num_failed(engine):
        engine.step()
    for _ in range(steps):
        engine.step()
    engine.core.abort([name])
    engine.finish()
    del specs[name]
    assert engine.reasons == {name: FinishReason.ABORT, **dict.fromkeys(specs, FinishReason.LENGTH)}
    assert has_all_tokens(engine, specs)


def test_nobody_is_blamed_for_the_failure_of_a_step_whose_request_was_aborted() -> None:
    engine = Engine(overlaps=True)
    engine.queue.fails = [RuntimeError("broken"), None, RuntimeError("again")]
    specs = add_all(engine, "abc")
    while not num_failed(engine):
        engine.step()
    engine.step()
    engine.core.abort(["a"])
    engine.finish()
    assert num_failed(engine) == 2
    assert engine.reasons == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH, "c": FinishReason.LENGTH}
    assert engine.tokens["c"] == true_output(specs["c"], LENGTH)


def test_a_deadline_holds_on_probation(overlaps: bool) -> None:
    now = 100.0
    engine = Engine(overlaps, clock=lambda: now)
    engine.queue.fails = [RuntimeError("broken")]
    specs = add_all(engine, "ab", deadline=110.0) | {"c": engine.add("c", 9, 8, max_tokens=6)}
    while not num_failed(engine):
        engine.step()
    now = 120.0
    engine.finish()
    assert engine.reasons == {"a": FinishReason.ABORT, "b": FinishReason.ABORT, "c": FinishReason.LENGTH}
    assert engine.tokens["c"] == true_output(specs["c"], LENGTH)


def test_prompt_logprobs_come_once(engine: Engine) -> None:
    engine.queue.fails = [None, RuntimeError("broken")]
    spec = engine.add("a", 1, 40, prompt_logprobs=0, max_tokens=3)
    rows: list[int] = []
    while engine.core.has_work():
        for output in engine.step():
            if output.prompt_logprobs is not None:
                rows += output.prompt_logprobs.token_ids[:, 0].tolist()
    assert rows == list(spec.prompt_token_ids[1:])


def test_an_interrupt_while_requests_are_tried_starts_over(engine: Engine) -> None:
    engine.queue.fails = [RuntimeError("broken"), *[KeyboardInterrupt()] * 2]
    add_all(engine, "ab")
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    assert {output.error for output in engine.step()} == {"the step was interrupted"}
    engine.queue.fails = []
    specs = add_all(engine, "ab")
    engine.tokens.clear()
    engine.finish()
    assert has_all_tokens(engine, specs)
    assert engine.queue.submitted[-1].keys() == {"a", "b"}


def test_an_interrupt_of_the_probe_starts_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = engine.queue.submit

    def interrupted(work: SchedulerOutput) -> Any:
        if shares(work) == PROBE:
            raise KeyboardInterrupt
        return submit(work)

    engine.queue.fails_if = lambda step: "a" in step
    monkeypatch.setattr(engine.queue, "submit", interrupted)
    add_all(engine, "ab")
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    outputs = engine.step()
    assert {output.request_id: output.error for output in outputs} == dict.fromkeys("ab", "the step was interrupted")
    specs = {"b": engine.add("b", 1, 8, max_tokens=6)}
    engine.tokens.clear()
    engine.finish()
    assert has_all_tokens(engine, specs)


# ---- when the engine ends ----


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_engine_whose_every_step_fails_ends_before_anyone_is_told_an_error(engine: Engine, count: int) -> None:
    engine.queue.fails = [None]
    add_all(engine, "abcd"[:count], 4)
    engine.step()
    engine.queue.fails_if = lambda step: True
    with pytest.raises(RuntimeError, match="poison"):
        engine.finish()
    assert all(output.error is None for output in engine.last.values())
    assert engine.queue.submitted[-1] == PROBE
    assert not engine.core.has_work()
    engine.core.abort("abcd")
    for call in (engine.core.step, lambda: engine.add("late", 9, 5)):
        with pytest.raises(RuntimeError, match="the engine ended: RuntimeError\\('poison"):
            call()


def test_a_bad_request_that_comes_again_and_again_does_not_end_the_engine(engine: Engine) -> None:
    engine.queue.fails_if = lambda step: any(name.startswith("bad") for name in step)
    specs = {"good": engine.add("good", 1, 5, max_tokens=30)}
    for number in range(10):
        engine.add(f"bad{number}", 2, 5)
        while f"bad{number}" not in engine.last:
            engine.step()
    engine.finish()
    assert engine.count("manta_requests_finished_total", reason="error") == 10
    assert has_all_tokens(engine, specs)


def test_a_bad_request_without_company_does_not_end_the_engine(engine: Engine) -> None:
    engine.queue.fails_if = lambda step: any(name.startswith("bad") for name in step)
    for number in range(5):
        engine.add(f"bad{number}", 2, 5)
        engine.finish()
        assert engine.reasons[f"bad{number}"] is FinishReason.ERROR
    assert engine.core.load().kv_blocks_used == 0


def test_a_recovery_that_fails_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset() -> None:
        raise RuntimeError("the device is gone")

    engine.queue.fails = [RuntimeError("broken")]
    monkeypatch.setattr(engine.queue, "reset", reset)
    add_all(engine, "ab")
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.finish()
    with pytest.raises(RuntimeError, match="the engine ended"):
        engine.step()
