"""What a routing decision costs, and the index's updates beside it: `python -m tests.perf.routing.decision`."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import typer

from app.router.index import ReplicaIndex
from app.router.states import RoutingSettings
from app.transport import StreamItem
from engine.kv_cache.events import BlockRemoved, BlockStored
from engine.outputs import EngineLoad, EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.step_times import StepTimes

BLOCK_SIZE = 16


class Fleet:
    """An index of replicas that hold prompts of a few groups, each with a common first half."""

    def __init__(self, replicas: int, tokens: int, groups: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ids = [f"replica-{number}" for number in range(replicas)]
        self.index = ReplicaIndex(RoutingSettings(BLOCK_SIZE))
        self.index.set_members(self.ids)
        self.tokens = tuple(range(tokens))
        self.half = tokens // BLOCK_SIZE // 2
        self.heads = [self.blocks(self.half) for _ in range(groups)]
        self.seqs = dict.fromkeys(self.ids, 0)
        self.calls = 0
        for replica_id in self.ids:
            self.report(replica_id, ())
            self.index.restore_blocks(replica_id, 0, [])
            for head in self.random.sample(self.heads, groups // 2):
                self.report(replica_id, [BlockStored((*head, *self.blocks(self.half)), None)])

    def blocks(self, count: int) -> tuple[bytes, ...]:
        return tuple(self.random.randbytes(32) for _ in range(count))

    def request(self) -> EngineRequest:
        self.calls += 1
        return EngineRequest(
            request_id=f"call-{self.calls}",
            prompt_token_ids=self.tokens,
            params=SamplingParams(max_tokens=8),
            seed=0,
            block_hashes=(*self.random.choice(self.heads), *self.blocks(self.half)),
        )

    def report(self, replica_id: str, events: object, outputs: object = (), known: tuple[str, ...] = ()) -> None:
        times = StepTimes().after(2048, 0.045).after(32, 0.0056 * self.random.uniform(0.9, 1.1))
        load = EngineLoad(self.random.randrange(64), 0, self.random.randrange(20_000), 500, 30_000, 0, times)
        self.index.receive(replica_id, StreamItem(list(outputs), self.seqs[replica_id], list(events), load, known))
        self.seqs[replica_id] += len(list(events))


def timed(seconds: list[float], work: Callable[[], object]) -> object:
    before = time.perf_counter()
    result = work()
    seconds.append(time.perf_counter() - before)
    return result


def main(
    replicas: Annotated[int, typer.Option(min=1)] = 100,
    tokens: Annotated[int, typer.Option(min=2 * BLOCK_SIZE, help="Of a prompt.")] = 4000,
    groups: Annotated[int, typer.Option(min=2, help="Prefixes; each replica holds half of them.")] = 20,
    calls: Annotated[int, typer.Option(min=10)] = 3000,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Each call is chosen, taken, has its blocks stored, others removed, gets its first token and ends."""
    fleet = Fleet(replicas, tokens, groups, seed)
    index = fleet.index
    parts: dict[str, list[float]] = {name: [] for name in ("begin", "choose", "count", "settle", "news", "end")}
    count, settle = index._send, index._take_in_progress
    index._send = lambda *args: timed(parts["count"], lambda: count(*args))  # type: ignore
    index._take_in_progress = lambda: timed(parts["settle"], settle)  # type: ignore
    # What is counted on a replica and taken off again is the index's update; the rest of choose() is the decision.
    parts["decision"] = []
    for _ in range(calls):
        request = fleet.request()
        call_id = request.request_id
        timed(parts["begin"], lambda: index.begin(call_id, [request]))  # noqa: B023
        order = timed(parts["choose"], lambda: index.choose(call_id, fleet.ids))  # noqa: B023
        parts["decision"].append(parts["choose"][-1] - parts["count"][-1] - parts["settle"][-1])
        first = order[0]  # type: ignore[index]
        index.assign(call_id, first, accepted=True)
        events = [BlockStored(request.block_hashes, None), BlockRemoved(request.block_hashes[fleet.half :])]
        output = EngineOutput(call_id, (1,))
        timed(parts["news"], lambda: fleet.report(first, events, [output], (call_id,)))  # noqa: B023
        timed(parts["end"], lambda: index.end(call_id, [call_id]))  # noqa: B023
    figures = {}
    for name, seconds in parts.items():
        figures[name] = {"p50_us": 1e6 * median(seconds), "p99_us": 1e6 * quantiles(seconds, n=100)[98]}
        typer.echo(f"{name:10} p50 {figures[name]['p50_us']:7.1f} us   p99 {figures[name]['p99_us']:7.1f} us")
    if json_file is not None:
        json_file.write_text(json.dumps({"replicas": replicas, "tokens": tokens, "parts": figures}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
