"""What goes on a stream, and when, by a clock that the test holds."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from app.stream_buffer import StreamBuffer
from engine.kv_cache.events import AllBlocksCleared, KVEvent
from engine.outputs import EngineLoad, EngineOutput
from engine.request import FinishReason
from tests.app.scripted_engine import Step

NO_LOAD = EngineLoad(0, 0, 0, 0, 100)
MANY = 9


def step(load: EngineLoad = NO_LOAD, events: Sequence[KVEvent] = ()) -> Any:
    return Step([], list(events), load)


@pytest.fixture
def buffer() -> StreamBuffer:
    """One whose opening item was taken at second 10; with MANY calls it gathers for 0.01 s, when quiet for 1 s."""
    buffer = StreamBuffer(NO_LOAD, 5, 9.0, gather_s=0.01, quiet_s=1.0)
    assert buffer.due == 9.0
    assert buffer.take_item(10.0) == ([], 5, [], NO_LOAD, ())
    assert buffer.due == math.inf
    return buffer


@pytest.mark.parametrize(
    ("finish_reason", "silent", "is_urgent"),
    [(None, {"a", "b"}, False), (FinishReason.STOP, {"b"}, False), (None, {"b"}, True)],
    ids=["first", "last", "on trial"],
)
def test_what_is_urgent_is_due_at_once(
    buffer: StreamBuffer, finish_reason: FinishReason | None, silent: set[str], is_urgent: bool
) -> None:
    buffer.take(EngineOutput("a", (1,), finish_reason=finish_reason), silent, is_urgent=is_urgent)
    assert buffer.after_step(step(), MANY, 10.001) == 10.001
    assert silent == {"b"}


def test_other_outputs_wait_for_the_gathering_time_since_the_last_item(buffer: StreamBuffer) -> None:
    buffer.take(EngineOutput("a", (1,)), set())
    assert buffer.after_step(step(), MANY, 10.002) == pytest.approx(10.01)
    buffer.take(EngineOutput("a", (2,)), set())
    assert buffer.after_step(step(), MANY, 10.004) is None, "the timer is set already"
    assert [output.new_token_ids for output in buffer.take_item(10.01).outputs] == [(1,), (2,)]
    buffer.take(EngineOutput("a", (3,)), set())
    assert buffer.after_step(step(), MANY, 10.012) == pytest.approx(10.02)


def test_outputs_of_few_calls_are_due_at_once(buffer: StreamBuffer) -> None:
    buffer.take(EngineOutput("a", (1,)), set())
    due = buffer.after_step(step(), MANY - 1, 10.002)
    assert due is not None
    assert due <= 10.002


def test_an_item_makes_the_next_outputs_wait_again(buffer: StreamBuffer) -> None:
    buffer.take(EngineOutput("a", (1,)), {"a"})
    buffer.after_step(step(), MANY, 10.002)
    buffer.take_item(10.002)
    buffer.take(EngineOutput("a", (2,)), set())
    assert buffer.after_step(step(), MANY, 10.003) == pytest.approx(10.012)


def test_a_step_without_outputs_is_due_after_the_quiet_period_and_outputs_come_before_it(buffer: StreamBuffer) -> None:
    assert buffer.after_step(step(events=[AllBlocksCleared()]), MANY, 10.5) == 11.5
    assert buffer.after_step(step(events=[AllBlocksCleared()]), MANY, 10.6) is None
    buffer.take(EngineOutput("a", (1,)), {"a"})
    assert buffer.after_step(step(), MANY, 10.7) == 10.7
    item = buffer.take_item(10.7)
    assert (item.kv_seq, len(item.kv_events)) == (5, 2)
    assert buffer.take_item(10.8).kv_seq == 7
