"""The rows of the fault matrix: what is broken, what clients then see, and what is left behind.

Each fault is played once, with requests of both kinds under way, streaming and not: some that it hits, others beside
them. It gives a row for each kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.client import Answer, Client
from tests.faults.replica import POISON, StepFault
from tests.faults.service import NUM_INGRESSES, NUM_REPLICAS, Service, kill

UNHARMED = "all tokens, no error"
NUM_TOKENS = 200
NUM_CULPRIT_TOKENS = 400
"""Longer, so that it still runs when the fault comes, whatever the machine has to do beside it."""

STRUCK_FROM_TOKEN = 10
"""Faults come when every request has so many tokens of output."""

RECOVERY_S = 60.0
REST_S = 20.0
MOST_TRIES = 10
LEAST_SLOW_BYTES = 200_000
"""A slow reader's answer is longer, more than sockets hold for it."""

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


@dataclass
class Row:
    """One fault as clients of one kind see it.

    Attributes:
        client: what those saw whom it hit.
        neighbours: what the others saw, of both kinds.
        pause_s: the longest time that a stream which it hit was without a token; of whole answers, how much later than
            undisturbed they came. None where they did not end.
        whole_again_s: from the fault until all replicas and ingresses are there.
        problems: what is wrong; empty is right.
    """

    fault: str
    streaming: bool
    client: str = ""
    neighbours: str = ""
    pause_s: float | None = None
    whole_again_s: float | None = None
    problems: list[str] = field(default_factory=list)

    def note(self, seen: dict[str, str], expected: str) -> str:
        """What clients saw, in one line; what they should not have seen is a problem."""
        self.problems += [f"{name}: {saw}" for name, saw in sorted(seen.items()) if saw != expected]
        return "; ".join(sorted(set(seen.values())))


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
    kill((await scene.service.replicas())[victim].pid)
    return names


async def _kill_ingress(scene: Scene) -> set[str] | None:
    if (found := scene.of_one_place(scene.came_from)) is None:
        return None
    victim, names = found
    kill((await scene.service.ingresses())[victim])
    return names


def _break_a_step(kind: str) -> Strike:
    async def strike(scene: Scene) -> set[str] | None:
        if (found := scene.of_one_place(scene.placed)) is None:
            return None
        victim, names = found
        await scene.service.set_fault(victim, StepFault(kind))
        while (await scene.service.replicas())[victim].is_armed:
            await asyncio.sleep(0.02)
        return names

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


# ---- playing them ----


class Wrong(Exception):
    """A fault had another effect than it should have."""


@dataclass(frozen=True)
class Reference:
    """What clients get while nothing is broken.

    Attributes:
        neighbours: the requests that are beside those that are meant, by name.
        answers: by name; those of slow readers have names of their own.
    """

    neighbours: dict[str, dict[str, Any]]
    answers: dict[str, Answer]


async def undisturbed(service: Service) -> Reference:
    answers = await Scene(service, NEIGHBOURS | CULPRITS).answers()
    stopping = {
        name: fields | {"stop": _late_piece(answers[name].text[0])}
        for name, fields in NEIGHBOURS.items()
        if name.endswith("stopping")
    }
    answers |= await Scene(service, stopping).answers()
    slow = await Scene(service, SLOW).answers()
    answers |= {f"slow {name}": answer for name, answer in slow.items()}
    for name, answer in answers.items():
        end = "stop" if name in stopping else "length"
        if answer.error or answer.broken or set(answer.finish_reasons.values()) != {end}:
            raise Wrong(f"{name} failed while nothing was broken: {answer}")
    return Reference(NEIGHBOURS | stopping, answers)


def _late_piece(text: str) -> str:
    """A part of a text that comes first towards its end."""
    for start in range(len(text) * 4 // 5, len(text)):
        piece = text[start : start + 8]
        if "\ufffd" not in piece and text.index(piece) == start:
            return piece
    raise Wrong("a text repeats itself")


async def play(service: Service, fault: Fault, reference: Reference) -> list[Row]:
    """Breaks something and says how it went; the service is whole and at rest before and, if all is right, after."""
    rows = [Row(fault.name, True), Row(fault.name, False)]
    before = await _members(service)
    try:
        scene, hit, struck_at = await _strike(service, fault, reference.neighbours)
    except (Wrong, TimeoutError) as error:
        for row in rows:
            row.problems.append(repr(error))
        return rows
    answers, whole_again_s = await asyncio.gather(scene.answers(), _whole_again(scene, fault, before, struck_at))
    for row, expected in zip(rows, (fault.stream, fault.whole), strict=True):
        row.whole_again_s = whole_again_s
        mine = [name for name in sorted(hit) if scene.clients[name].streams == row.streaming]
        usual = {name: reference.answers[_key(name, fault)] for name in mine}
        row.client = row.note({name: answers[name].seen(usual[name]) for name in mine}, expected)
        row.neighbours = row.note(
            {name: answers[name].seen(reference.answers[name]) for name in answers.keys() - hit}, UNHARMED
        )
        for name in mine:
            answer = answers[name]
            if fault.is_slow and answer.num_bytes < LEAST_SLOW_BYTES:
                row.problems.append(f"{name}: {answer.num_bytes} bytes are too few to wait for a reader")
            elif answer.finish_reasons and not fault.is_slow:
                late_s = answer.seconds() - usual[name].seconds()
                row.pause_s = max(row.pause_s or 0.0, answer.longest_pause(struck_at) if row.streaming else late_s)
    await service.set_faults(None)
    common = []
    if fault.replaces and whole_again_s is None:
        common.append("not whole again")
    if not fault.replaces and await _members(service) != before:
        common.append("processes ended")
    common += await _at_rest(service)
    for row in rows:
        row.problems += common
    return rows


def _key(name: str, fault: Fault) -> str:
    name = name.removeprefix(f"{POISON}-")
    return f"slow {name}" if fault.is_slow else name


async def _strike(
    service: Service, fault: Fault, neighbours: dict[str, dict[str, Any]]
) -> tuple[Scene, set[str], float]:
    for _ in range(MOST_TRIES):
        read_on = asyncio.Event()
        scene = Scene(service, neighbours | fault.culprits, read_on if fault.is_slow else None)
        try:
            ready = await scene.under_way()
            struck_at = time.monotonic()
            hit = await fault.strike(scene) if ready else None
        except BaseException:
            await scene.leave()
            raise
        read_on.set()
        if hit is not None:
            return scene, hit, struck_at
        await scene.leave()
        await _at_rest(service)
    raise Wrong("no process had requests of both kinds at the same time")


async def _members(service: Service) -> set[str]:
    return set(await service.replicas()) | set(await service.ingresses())


async def _whole_again(scene: Scene, fault: Fault, before: set[str], struck_at: float) -> float | None:
    """Seconds from the strike until others have taken the place of what it ended, for as long as the scene runs."""
    if not fault.replaces:
        return None
    whole_at = None
    while time.monotonic() - struck_at < RECOVERY_S:
        now = await _members(scene.service)
        if len(now) < NUM_REPLICAS + NUM_INGRESSES or now == before:
            whole_at = None
        elif whole_at is None:
            whole_at = time.monotonic()
        if whole_at is not None and all(client.task.done() for client in scene.clients.values()):
            return whole_at - struck_at
        await asyncio.sleep(0.1)
    return None


async def _at_rest(service: Service) -> list[str]:
    """Waits until nothing runs; what is left of it after a while."""
    deadline = time.monotonic() + REST_S
    while (left := await service.leftovers()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return left
