"""The rows of the fault matrix: what is broken, in the middle of which requests, and what their clients then see."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.client import Answer, Client
from tests.faults.replica import POISON, StepFault
from tests.faults.service import Service, kill

UNHARMED = "all tokens, no error"
NUM_TOKENS = 200
NUM_CULPRIT_TOKENS = 400
"""Longer, so that it still runs when the fault comes, whatever the machine has to do beside it."""

STRUCK_FROM_TOKEN = 10
"""Faults come when every request has so many tokens of output."""

RECOVERY_S = 180.0
"""Enough for four starts of a replica, one after another, on a busy machine."""

# The penalty keeps a random model from saying one token for ever.
_GREEDY = {"temperature": 0, "repetition_penalty": 100.0}
_SEEDED = {"temperature": 0.9, "seed": 5}
_COMMON = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, "skip_special_tokens": False}


def _asked(first_token: int, sampling: dict[str, Any], stream: bool, **changes: Any) -> dict[str, Any]:
    return {"prompt": [first_token, *range(40, 60)], "stream": stream, **sampling, **_COMMON, **changes}


NEIGHBOURS = {
    f"{kind}-{name}": _asked(first_token, sampling, kind == "stream", **changes)
    for first_token, (name, sampling, changes) in enumerate(
        [
            ("greedy", _GREEDY, {}),
            ("seeded", _SEEDED, {}),
            ("of-two", _SEEDED, {"n": 2}),
            ("stopping", _GREEDY, {}),  # which is given its stop string once it is known what it says
        ]
    )
    for kind in ("stream", "whole")
}
CULPRITS = {
    "culprit-stream": _asked(901, _SEEDED, True, max_tokens=NUM_CULPRIT_TOKENS),
    "culprit-whole": _asked(902, _GREEDY, False, max_tokens=NUM_CULPRIT_TOKENS),
}
SLOW = {name: {**fields, "n": 4, "logprobs": 5, "max_tokens": 250, **_SEEDED} for name, fields in CULPRITS.items()}


class Wrong(Exception):
    """A fault had another effect than it should have."""


class Scene:
    """Requests that run at the same time."""

    def __init__(self, service: Service, asked: dict[str, dict[str, Any]], slow: asyncio.Event | None = None) -> None:
        self.service = service
        self.clients = {
            name: Client(service.url, name, fields, reads_from=slow if name in CULPRITS else None)
            for name, fields in asked.items()
        }
        self.placed: dict[str, str] = {}
        self.came_from: dict[str, str] = {}

    async def under_way(self) -> bool:
        """Returns when each request runs and has some tokens, and notes where; False where one ended before."""
        async with asyncio.timeout(RECOVERY_S):
            while True:
                states = await self.service.replicas()
                self.placed = {name: i for i, state in states.items() for name in state.tokens}
                self.came_from = {name: i for state in states.values() for name, i in state.ingresses.items()}
                counts = {name: count for state in states.values() for name, count in state.tokens.items()}
                if all(counts.get(name, 0) >= STRUCK_FROM_TOKEN for name in self.clients):
                    return True
                if any(client.task.done() for client in self.clients.values()):
                    return False
                await asyncio.sleep(0.02)

    async def gone_from_replicas(self, names: set[str]) -> None:
        """Returns when no replica has these requests any more."""
        async with asyncio.timeout(RECOVERY_S):
            while any(names & state.tokens.keys() for state in (await self.service.replicas()).values()):
                await asyncio.sleep(0.02)

    def of_one_place(self, places: dict[str, str]) -> tuple[str, set[str]] | None:
        """A place that has requests of both kinds, and which; None where there is none."""
        for place in set(places.values()):
            names = {name for name, where in places.items() if where == place}
            if {self.clients[name].streams for name in names} == {False, True}:
                return place, names
        return None

    async def leave(self) -> None:
        await asyncio.gather(*(client.leave() for client in self.clients.values()))

    async def answers(self) -> dict[str, Answer]:
        await asyncio.gather(*(client.task for client in self.clients.values()), return_exceptions=True)
        return {name: client.answer for name, client in self.clients.items()}


Strike = Callable[[Scene], Awaitable[set[str] | None]]


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        strike: breaks it while the scene is under way; gives the requests that it hits, None where the scene does not
            suit it.
        stream, whole: what the clients see whom it hits.
        replaces: whether processes end by it and others take their place.
        culprits: the requests that are meant alone.
        is_slow: whether the culprits read nothing until the strike has ended.
    """

    name: str
    strike: Strike
    stream: str = UNHARMED
    whole: str = UNHARMED
    replaces: bool = False
    culprits: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_slow: bool = False


# ---- strikes ----


async def _kill_replica(scene: Scene) -> set[str] | None:
    if (found := scene.of_one_place(scene.placed)) is None:
        return None
    victim, names = found
    state = (await scene.service.replicas()).get(victim)
    if state is None or not names <= state.tokens.keys():
        return None
    kill(state.pid)
    return names


async def _kill_ingress(scene: Scene) -> set[str] | None:
    if (found := scene.of_one_place(scene.came_from)) is None:
        return None
    victim, names = found
    pid = (await scene.service.ingresses()).get(victim)
    if pid is None:
        return None
    kill(pid)
    return names


def _break_a_step(kind: str) -> Strike:
    async def strike(scene: Scene) -> set[str] | None:
        if (found := scene.of_one_place(scene.placed)) is None:
            return None
        victim, names = found
        await scene.service.set_fault(victim, StepFault(kind))
        async with asyncio.timeout(RECOVERY_S):
            while True:
                state = (await scene.service.replicas()).get(victim)
                if state is None:
                    if kind == "hang":
                        return names  # it was, and the replica has ended by it
                elif not state.is_armed:
                    return names
                elif not names & state.tokens.keys():
                    # They had ended before: there is no step that could break.
                    await scene.service.set_fault(victim, None)
                    return None
                await asyncio.sleep(0.02)

    return strike


def _break_steps_of_culprits(kind: str) -> Strike:
    async def strike(scene: Scene) -> set[str]:
        names = frozenset(CULPRITS)
        await scene.service.set_faults(StepFault(kind, names, from_token=STRUCK_FROM_TOKEN))
        return set(names)

    return strike


async def _read_slowly(scene: Scene) -> set[str]:
    """The replicas end the answers before anyone reads them."""
    await scene.gone_from_replicas(set(CULPRITS))
    return set(CULPRITS)


async def _leave(scene: Scene) -> set[str]:
    """The replicas drop what nobody waits for, before the others have ended."""
    await asyncio.gather(*(scene.clients[name].leave() for name in CULPRITS))
    await scene.gone_from_replicas(set(CULPRITS))
    if all(client.task.done() for client in scene.clients.values()):
        raise Wrong("requests ran to their end although their clients had left")
    return set(CULPRITS)


async def _poison(scene: Scene) -> set[str]:
    """Two more requests, which kill whatever replica they run on."""
    asked = {f"{POISON}-{name}": fields for name, fields in CULPRITS.items()}
    scene.clients |= {name: Client(scene.service.url, name, fields) for name, fields in asked.items()}
    return set(asked)


FAULTS = (
    Fault("exception in a step", _break_a_step("exception")),
    Fault("out of memory in a step", _break_a_step("out_of_memory")),
    Fault(
        "exception in each step of a request",
        _break_steps_of_culprits("exception"),
        stream="error event internal_error",
        whole="500 internal_error",
        culprits=CULPRITS,
    ),
    Fault(
        "out of memory in each step of a request",
        _break_steps_of_culprits("out_of_memory"),
        stream="error event internal_error",
        whole="500 internal_error",
        culprits=CULPRITS,
    ),
    Fault("slow reader", _read_slowly, culprits=SLOW, is_slow=True),
    Fault("client disconnect", _leave, stream="left", whole="left", culprits=CULPRITS),
    Fault("replica killed", _kill_replica, replaces=True),
    Fault("hung step", _break_a_step("hang"), replaces=True),
    Fault(
        "ingress killed",
        _kill_ingress,
        stream="broken off (RemoteProtocolError)",
        whole="500 text/plain",
        replaces=True,
    ),
    Fault(
        "request that kills its replicas",
        _poison,
        stream="500 internal_error",
        whole="500 internal_error",
        replaces=True,
    ),
)
