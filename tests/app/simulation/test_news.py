"""What an ingress hears of a simulated replica, and when."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pytest

from app.simulation.event_loop import EventLoop
from app.simulation.fleet import Fleet
from app.simulation.news import NewsTimes
from app.simulation.routers import LeastLoaded
from app.simulation.step_cost import StepCost
from app.transport import StreamItem
from tests.app.simulation.conftest import MakeFleet, prompts, run_all

STEP = 0.01 + 16 * 0.001 + 0.0001
DECODE = 0.01 + 0.001 + 2 * 0.0001


class Listener(LeastLoaded):
    """Keeps what it hears; all requests go to the first replica."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__(0)
        self.loop = loop
        self.heard: list[tuple[float, StreamItem]] = []

    def choose(self, call_id: str, replica_ids: Collection[str]) -> list[str]:
        return sorted(replica_ids)

    def receive(self, replica_id: str, item: StreamItem) -> bool:
        self.heard.append((self.loop.now, item))
        return super().receive(replica_id, item)


def listening(
    make_fleet: MakeFleet, count: int, news: NewsTimes, **options: Any
) -> tuple[EventLoop, Fleet, list[Listener]]:
    listeners = [Listener(EventLoop()) for _ in range(count)]
    loop, fleet = make_fleet(0, routers=listeners, news=news, **options)
    for listener in listeners:
        listener.loop = loop
    fleet.add_replica()
    return loop, fleet, listeners


def test_news_arrive_a_constant_time_after_the_step(make_fleet: MakeFleet) -> None:
    loop, fleet, (listener,) = listening(make_fleet, 1, NewsTimes(delay_s=0.5))
    run_all(loop, fleet, prompts([1], at=1.0, output=2))
    times = [time for time, _ in listener.heard]
    assert times == pytest.approx([0.5, 0.5 + STEP, 0.5 + STEP + DECODE])
    opening, first, last = (item for _, item in listener.heard)
    assert (opening.outputs, opening.load.received, opening.known) == ([], 0, ())
    assert (first.load.running, first.load.received, first.known) == (1, 1, ("request-0",))
    assert [output.finished for output in (*first.outputs, *last.outputs)] == [False, True]
    assert (last.load.running, last.known) == (0, ())


def test_kv_events_are_numbered_without_gaps(make_fleet: MakeFleet) -> None:
    loop, fleet, (listener,) = listening(make_fleet, 1, NewsTimes())
    run_all(loop, fleet, prompts([1], [2], [3], at=[0.0, 1.0, 2.0], output=2))
    expected = 0
    for _, item in listener.heard:
        assert item.kv_seq == expected
        expected += len(item.kv_events)
    assert expected == 3


def test_each_ingress_hears_of_its_own_requests_and_of_all_loads(make_fleet: MakeFleet) -> None:
    loop, fleet, (mine, other) = listening(make_fleet, 2, NewsTimes(delay_s=0.0, quiet_s=0.002))
    run_all(loop, fleet, prompts([1], [2], output=2))
    for listener, request_id in ((mine, "request-0"), (other, "request-1")):
        outputs = [output for _, item in listener.heard for output in item.outputs]
        assert {output.request_id for output in outputs} == {request_id}
        assert [call for _, item in listener.heard for call in item.known] == [request_id]
        assert max(item.load.running for _, item in listener.heard) == 2


def test_quiet_stream_passes_on_loads_now_and_then(make_fleet: MakeFleet) -> None:
    loop, fleet, (_, quiet) = listening(make_fleet, 2, NewsTimes(delay_s=0.0, quiet_s=0.1))
    run_all(loop, fleet, prompts([1], output=100))
    times = [time for time, item in quiet.heard if item.load.received]
    gaps = [after - before for before, after in pairwise(times)]
    # A step without outputs for it starts the wait.
    assert 5 < len(times) < 100
    assert min(gaps) > 0.1 - 1e-9


def test_tokens_of_many_requests_are_gathered(make_fleet: MakeFleet) -> None:
    def heard(count: int) -> int:
        cost, news = StepCost(0.001, 0.0, 0.0), NewsTimes(delay_s=0.0, gather_s=0.02)
        loop, fleet, (listener,) = listening(make_fleet, 1, news, cost=cost, blocks=128)
        run_all(loop, fleet, prompts(*([index] for index in range(count)), output=50))
        return len(listener.heard)

    assert heard(1) == 1 + 50  # the opening, and one a step
    assert heard(20) == 1 + 1 + 2 + 1  # the first tokens, what came within 20 ms twice, and the last tokens


def test_tokens_are_not_gathered_once_the_many_requests_have_ended(make_fleet: MakeFleet) -> None:
    cost, news = StepCost(0.001, 0.0, 0.0), NewsTimes(delay_s=0.0, gather_s=0.02)
    loop, fleet, (listener,) = listening(make_fleet, 1, news, cost=cost, blocks=128)
    run_all(loop, fleet, prompts(*([index] for index in range(21)), at=[0.0] * 20 + [10.0], output=50))
    last = [output for time, item in listener.heard if time >= 10.0 for output in item.outputs]
    assert {output.request_id for output in last} == {"request-20"}
    assert sum(time >= 10.0 for time, _ in listener.heard) == 50  # one a step
