"""Replicas that are not there, die or are scaled away, as the requests that they had see it."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from app.transport import NoReplica, ReplicaLost
from engine.request import EngineRequest
from tests.app.scripted_engine import request
from tests.app.transport_clients import LONG, client_of, eventually, new_id, on_replicas, tokens_of


async def test_without_a_replica_a_request_gives_up(deploy_scripted: Callable[..., Any]) -> None:
    scaling = {"min_replicas": 0, "max_replicas": 1, "initial_replicas": 0, "upscale_delay_s": 1000.0}
    handle = deploy_scripted("absent", None, autoscaling_config=scaling)
    async with client_of(handle, replica_wait_s=0.3) as client:
        with pytest.raises(NoReplica):
            await tokens_of(client, request(new_id()))


async def test_a_request_sent_to_a_replica_that_has_just_died_gives_up(deploy_scripted: Callable[..., Any]) -> None:
    async with client_of(deploy_scripted("just-died"), replica_wait_s=0.2) as client:
        await tokens_of(client, request(new_id()))
        (state,) = (await client.call_replicas("state", 10.0)).values()
        os.kill(state["pid"], signal.SIGKILL)
        # Ray tries again until there is a replica, which takes it a second or more to make.
        with pytest.raises(NoReplica):
            await tokens_of(client, request(new_id()))


async def test_a_killed_replica_fails_its_prompts_alone_and_is_replaced(deploy_scripted: Callable[..., Any]) -> None:
    async with client_of(deploy_scripted("killed", 2)) as client:

        async def two_members() -> bool:
            return len(await client.call_replicas("state", 10.0)) == 2

        assert await eventually(two_members)
        progress: dict[str, list[int]] = {}

        async def read(r: EngineRequest) -> list[int]:
            got = progress[r.request_id] = []
            async for outputs in client.generate([r]):
                got += [token for output in outputs for token in output.new_token_ids]
            return got

        requests = [request(new_id(), 1, 500) for _ in range(8)]
        tasks = {r.request_id: asyncio.create_task(read(r)) for r in requests}

        async def all_started() -> bool:
            return all(progress.get(r.request_id) for r in requests)

        assert await eventually(all_started)
        states = await client.call_replicas("state", 10.0)
        victim = next(iter(states))
        doomed = {i for i in tasks if client.replicas.replica_of(i) == victim}
        assert 0 < len(doomed) < 8
        os.kill(states[victim]["pid"], signal.SIGKILL)
        results = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        assert {i for i, result in results.items() if isinstance(result, ReplicaLost)} == doomed
        assert all(results[i] == list(range(1, 501)) for i in results.keys() - doomed)
        assert all(progress[i] == list(range(1, len(progress[i]) + 1)) for i in doomed)

        r = request(new_id())
        assert await tokens_of(client, r) == {r.request_id: [1, 2, 3, 4, 5]}

        async def replaced() -> bool:
            states = await client.call_replicas("state", 10.0)
            return len(states) == 2 and victim not in states

        assert await eventually(replaced)
        results = await asyncio.gather(*[tokens_of(client, request(new_id())) for _ in range(8)])
        assert all(tokens == [1, 2, 3, 4, 5] for result in results for tokens in result.values())


async def test_a_dead_engine_counts_as_a_dead_replica(deploy_scripted: Callable[..., Any]) -> None:
    async with client_of(deploy_scripted("engine-death")) as client:

        async def read() -> None:
            async for _ in client.generate([request(new_id(), 1, LONG)]):
                await client.call_replicas("kill_engine", 10.0)

        with pytest.raises(ReplicaLost):
            await read()

        async def served() -> bool:
            try:
                return bool(await tokens_of(client, request(new_id())))
            except ReplicaLost:
                return False

        assert await eventually(served), "Serve replaces the replica"


async def test_a_replica_that_is_scaled_away_finishes_what_it_has(deploy_scripted: Callable[..., Any]) -> None:
    async with client_of(deploy_scripted("scaled", 2)) as client:

        async def two_members() -> bool:
            return len(await client.call_replicas("state", 10.0)) == 2

        assert await eventually(two_members)
        tasks = [asyncio.create_task(tokens_of(client, request(new_id(), 1, 1000))) for _ in range(6)]

        async def all_run() -> bool:
            return len(await on_replicas(client, "running")) == 6

        assert await eventually(all_run)
        pids = await client.call_replicas("state", 10.0)
        # Ends when the replica is gone.
        scaling = asyncio.create_task(asyncio.to_thread(deploy_scripted, "scaled", 1))

        async def one_member() -> bool:
            return len(client.replicas.members) == 1

        assert await eventually(one_member)
        assert not any(task.done() for task in tasks), "the test is too slow to say anything"
        for result in await asyncio.gather(*tasks):
            assert list(result.values()) == [list(range(1, 1001))]
        (gone,) = pids.keys() - client.replicas.members

        async def stopped() -> bool:
            return not os.path.exists(f"/proc/{pids[gone]['pid']}")

        assert await eventually(stopped), "its streams are closed, so that it can end"
        await scaling
