"""How faults are played, on a service that is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from tests.faults import matrix
from tests.faults.matrix import FAULTS, Scene
from tests.faults.play import Reference, play
from tests.faults.replica import ReplicaState, StepFault
from tests.faults.service import Service

STRIKES = {fault.name: fault.strike for fault in FAULTS}


def state(*names: str, is_armed: bool = False) -> ReplicaState:
    return ReplicaState(
        pid=1,
        tokens=dict.fromkeys(names, 20),
        ingresses={},
        load=(0, 0, 0),
        sessions=frozenset(),
        calls=0,
        unfinished=0,
        requests=0,
        is_armed=is_armed,
    )


class Said:
    """Of a service, what it says of its replica `r`, one answer after another; None is no answer in time."""

    def __init__(self, *states: ReplicaState | None) -> None:
        self.faults: list[StepFault | None] = []
        self._states = list(states)

    async def replicas(self) -> dict[str, ReplicaState]:
        state = self._states.pop(0)
        return {} if state is None else {"r": state}

    async def ingresses(self) -> dict[str, int]:
        return {}

    async def set_fault(self, replica_id: str, fault: StepFault | None) -> None:
        self.faults.append(fault)


def scene_of(said: Said) -> Scene:
    """A stream and another request, both on `r`."""
    places = {"stream": "r", "whole": "r"}
    scene = Scene(cast(Service, said), {})
    scene.clients = cast(Any, {name: SimpleNamespace(streams=name == "stream") for name in places})
    scene.placed = scene.came_from = places
    return scene


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pids: list[int] = []
    monkeypatch.setattr(matrix, "kill", pids.append)
    return pids


@pytest.mark.parametrize("error", [TimeoutError(), httpx.ReadTimeout(""), KeyError("r")], ids=repr)
async def test_what_keeps_a_fault_from_being_played_is_a_problem_of_its_rows(error: Exception) -> None:
    class Unreachable:
        async def set_faults(self, fault: StepFault | None) -> None:
            raise error

    rows = await play(cast(Service, Unreachable()), FAULTS[0], Reference({}, {}))
    assert [(row.streaming, row.problems) for row in rows] == [(True, [repr(error)]), (False, [repr(error)])]


async def test_a_step_is_broken_once_its_fault_has_gone_off() -> None:
    said = Said(state("stream", is_armed=True), None, state("stream"))
    assert await STRIKES["exception in a step"](scene_of(said)) == {"stream", "whole"}
    assert said.faults == [StepFault("exception")]


async def test_a_step_that_never_came_is_not_waited_for() -> None:
    said = Said(state("stream", is_armed=True), state("elsewhere", is_armed=True))
    assert await STRIKES["exception in a step"](scene_of(said)) is None
    assert said.faults == [StepFault("exception"), None]


async def test_a_replica_that_has_gone_was_hung() -> None:
    assert await STRIKES["hung step"](scene_of(Said(None))) == {"stream", "whole"}


async def test_a_replica_is_killed_in_the_middle_of_its_requests(killed: list[int]) -> None:
    assert await STRIKES["replica killed"](scene_of(Said(state("stream", "whole")))) == {"stream", "whole"}
    assert killed == [1]


@pytest.mark.parametrize("said", [None, state("stream")], ids=["no answer", "a request has ended"])
async def test_a_replica_that_does_not_have_all_its_requests_is_not_killed(
    said: ReplicaState | None, killed: list[int]
) -> None:
    assert await STRIKES["replica killed"](scene_of(Said(said))) is None
    assert killed == []


async def test_an_ingress_that_does_not_answer_is_not_killed(killed: list[int]) -> None:
    assert await STRIKES["ingress killed"](scene_of(Said())) is None
    assert killed == []
