"""Requests and fleets of the simulation's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from app.router.index import ReplicaIndex
from app.simulation.event_loop import EventLoop
from app.simulation.fleet import Fleet
from app.simulation.news import NewsTimes
from app.simulation.requests import simulated_requests
from app.simulation.routers import Router
from app.simulation.step_cost import StepCost
from app.traces import TraceRequest, read_trace
from engine import EngineConfig, EngineRequest

CUT = Path(__file__).parents[2] / "data" / "mooncake_cut.jsonl"

COST = StepCost(step_s=0.01, token_s=0.001, block_s=0.0001)
"""Numbers that are easy to add up."""

SLOW = StepCost(step_s=0.03, token_s=0.003, block_s=0.0003)
"""Three times as long."""

MakeFleet = Callable[..., tuple[EventLoop, Fleet]]


@pytest.fixture(scope="session")
def cut() -> list[EngineRequest]:
    return simulated_requests(read_trace(CUT))


def prompts(*blocks: Sequence[int], at: Sequence[float] | float = 0.0, output: int = 1) -> list[EngineRequest]:
    """A request for each list of blocks, with `output` tokens to generate, all at one time or each at its own."""
    times = [at] * len(blocks) if isinstance(at, float) else at
    return simulated_requests(
        TraceRequest(time, 512 * len(each), 32 * output, tuple(each)) for time, each in zip(times, blocks, strict=True)
    )


@pytest.fixture
def make_fleet() -> MakeFleet:
    def make(
        replicas: int = 1,
        *,
        routers: Sequence[Router] | None = None,
        blocks: int = 64,
        cost: StepCost = COST,
        news: NewsTimes | None = None,
        **engine_args: int,
    ) -> tuple[EventLoop, Fleet]:
        loop = EventLoop()
        config = EngineConfig(model="simulated", num_kv_blocks=blocks, **engine_args)
        fleet = Fleet(
            loop,
            config=config,
            max_model_len=16 * blocks,
            cost=cost,
            routers=[ReplicaIndex()] if routers is None else routers,
            news=news,
        )
        for _ in range(replicas):
            fleet.add_replica()
        return loop, fleet

    return make


def run_all(loop: EventLoop, fleet: Fleet, requests: Sequence[EngineRequest]) -> None:
    """To the end of everything; then checks that every request ended and that every block was given back."""
    for request in requests:
        fleet.submit(request)
    loop.run()
    check_ended(fleet, requests)


def check_ended(fleet: Fleet, requests: Sequence[EngineRequest]) -> None:
    assert fleet.num_unfinished == fleet.num_waiting == 0
    for request in requests:
        assert fleet.records[request.request_id].num_output_tokens == request.params.max_tokens
    for replica in fleet.replicas.values():
        replica.core.check_integrity()
        load = replica.core.load()
        assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)
