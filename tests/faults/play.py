"""Faults played on a running service: what its clients saw, and what is left behind.

Each fault is played once, with requests of both kinds under way, streaming and not: some that it hits, others beside
them. It gives a row for each kind.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from tests.faults.client import Answer
from tests.faults.matrix import CULPRITS, NEIGHBOURS, RECOVERY_S, SLOW, UNHARMED, Fault, Scene, Wrong
from tests.faults.replica import POISON
from tests.faults.service import NUM_INGRESSES, NUM_REPLICAS, Service

REST_S = 20.0
MOST_TRIES = 10
LEAST_SLOW_BYTES = 200_000
"""A slow reader's answer is longer, more than sockets hold for it."""


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
        is_whole = set(answer.finish_reasons.values()) == {end} and answer.done == ("stream" in name)
        if answer.error or answer.broken or not is_whole:
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
    """Breaks something and says how it went; what keeps it from being played is a problem of its rows alone."""
    rows = [Row(fault.name, True), Row(fault.name, False)]
    try:
        common = await _play(service, fault, reference, rows)
    except Exception as error:
        common = [repr(error)]
    for row in rows:
        row.problems += common
    return rows


async def _play(service: Service, fault: Fault, reference: Reference, rows: list[Row]) -> list[str]:
    """Fills the rows; returns the problems that they have in common."""
    await service.set_faults(None)
    if left := await _at_rest(service):
        raise Wrong(f"not at rest before: {left}")
    before = await _members(service)
    scene, hit, struck_at = await _strike(service, fault, reference.neighbours)
    try:
        answers, whole_again_s = await asyncio.gather(scene.answers(), _whole_again(scene, fault, before, struck_at))
    except BaseException:
        await scene.leave()
        raise
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
    common = []
    if fault.replaces and whole_again_s is None:
        common.append("not whole again")
    if not fault.replaces and await _members(service) != before:
        common.append("processes ended")
    return common + await _at_rest(service)


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
