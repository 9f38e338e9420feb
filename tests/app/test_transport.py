"""Tokens between an ingress and replicas over Ray Serve, with an engine whose tokens are known."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import ray

from app.engine_client import RayEngineClient
from app.replica_link import Call
from app.transport import QueueFull, ReplicaLost, StreamItem, pack, unpack
from engine.kv_cache.events import AllBlocksCleared, BlockStored
from engine.outputs import EngineLoad, EngineOutput, RequestTiming, TokenLogprobs
from engine.request import EngineRequest, FinishReason
from engine.sampling_params import InvalidParameter
from engine.step_times import StepTimes
from tests.app.scripted_engine import HANG, request
from tests.app.transport_clients import LONG, client_of, eventually, new_id, on_replicas, tokens_of


@pytest.fixture(scope="module")
def shared(deploy_scripted: Callable[..., Any]) -> Any:
    """Two replicas that no test harms."""
    return deploy_scripted("shared", 2, lease_s=1.0)


def test_packed_items_keep_outputs_and_their_order() -> None:
    timing = RequestTiming(1.0, 2.0, 3.0)
    logprobs = TokenLogprobs(np.ones((1, 2), np.int32), np.zeros((1, 2), np.float32), np.ones(1, np.int32))
    outputs = [
        EngineOutput("a", (1,), timing=timing, num_cached_tokens=16),
        EngineOutput("a", (2, 3), num_cached_tokens=16),
        EngineOutput("b", (9,), logprobs=logprobs),
        EngineOutput("a", (4,), finish_reason=FinishReason.STOP, stop_reason=4),
    ]
    load = EngineLoad(1, 2, 3, 4, 5, 6, StepTimes().after(7, 0.5))
    item = StreamItem(outputs, 7, [BlockStored((b"x",), None), AllBlocksCleared()], load, ("a", "b"))
    copy = unpack(pack(item))
    assert (copy.kv_seq, copy.kv_events, copy.load, copy.known) == (item.kv_seq, item.kv_events, load, ("a", "b"))
    assert copy.load.step_times.fit() == (0.5, 0.0)
    assert [(o.request_id, o.new_token_ids, o.num_cached_tokens) for o in copy.outputs] == [
        (o.request_id, o.new_token_ids, o.num_cached_tokens) for o in outputs
    ]
    assert copy.outputs[0].timing == timing
    assert copy.outputs[2].logprobs is not None
    assert copy.outputs[2].logprobs.token_ids.tolist() == [[1, 1]]
    assert (copy.outputs[3].finish_reason, copy.outputs[3].stop_reason) == (FinishReason.STOP, 4)


def test_a_packed_load_keeps_every_field() -> None:
    values: dict[str, Any] = {each.name: number for number, each in enumerate(fields(EngineLoad), 10)}
    load = EngineLoad(**values | {"step_times": StepTimes(*range(100, 100 + len(StepTimes._fields)))})
    copy = unpack(pack(StreamItem([], 0, [], load)))
    assert copy.load == load
    assert type(copy.load.step_times) is StepTimes


async def test_concurrent_prompts_each_get_their_own_tokens_in_order(shared: Any) -> None:
    async with client_of(shared) as client:
        requests = [request(new_id(), first_token=1000 * i + 1, max_tokens=60) for i in range(32)]
        results = await asyncio.gather(*[tokens_of(client, r) for r in requests])
        for i, (r, got) in enumerate(zip(requests, results, strict=True)):
            assert got == {r.request_id: list(range(1000 * i + 1, 1000 * i + 61))}


async def test_concurrent_prompts_are_spread_over_replicas_and_children_stay_together(shared: Any) -> None:
    async with client_of(shared) as client:
        prompts = [[request(f"{new_id()}-{i}", HANG) for i in range(3)] for _ in range(8)]
        tasks = [asyncio.create_task(tokens_of(client, *children)) for children in prompts]

        async def all_run() -> bool:
            return len(await on_replicas(client, "running")) == 24

        assert await eventually(all_run)
        states = await client.call_replicas("state", 10.0)
        for state in states.values():
            assert len(state["running"]) == 12
            assert all(
                {r.request_id for r in children} <= set(state["running"])
                or not {r.request_id for r in children} & set(state["running"])
                for children in prompts
            )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("first_token", [HANG, 5], ids=["before its first token", "in the middle"])
async def test_leaving_the_iterator_aborts_on_the_engine(shared: Any, first_token: int) -> None:
    async with client_of(shared) as client:
        r = request(new_id(), first_token, LONG)

        async def read() -> None:
            async with aclosing(client.generate([r])) as items:
                async for _ in items:
                    return

        task = asyncio.create_task(read())

        async def runs() -> bool:
            return task.done() or r.request_id in await on_replicas(client, "running")

        assert await eventually(runs)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        async def aborted() -> bool:
            return r.request_id in await on_replicas(client, "aborted")

        assert await eventually(aborted)


async def test_aborting_a_whole_prompt_ends_its_iterator_with_abort(shared: Any) -> None:
    async with client_of(shared) as client:
        r = request(new_id(), 1, LONG)
        last = None
        async for outputs in client.generate([r]):
            last = outputs[-1]
            client.abort([r.request_id, "unknown"])
        assert last is not None
        assert last.finish_reason is FinishReason.ABORT

        async def aborted() -> bool:
            return r.request_id in await on_replicas(client, "aborted")

        assert await eventually(aborted)


async def test_aborting_one_child_lets_the_others_go_on(shared: Any) -> None:
    async with client_of(shared) as client:
        name = new_id()
        long, short = request(f"{name}-0", 1, LONG), request(f"{name}-1", 1, 300)
        finish: dict[str, FinishReason | None] = {}
        count = 0
        async for outputs in client.generate([long, short]):
            client.abort([long.request_id])
            for output in outputs:
                finish[output.request_id] = output.finish_reason
                count += len(output.new_token_ids) if output.request_id == short.request_id else 0
        assert finish == {long.request_id: FinishReason.ABORT, short.request_id: FinishReason.LENGTH}
        assert count == 300


async def test_a_refused_request_raises_what_the_engine_said(shared: Any) -> None:
    async with client_of(shared) as client:
        refused = EngineRequest(request_id=new_id(), prompt_token_ids=(0,), params=request("x").params, seed=0)
        with pytest.raises(InvalidParameter) as error:
            await tokens_of(client, refused)
        assert error.value.param == "prompt"


async def test_a_broken_stream_fails_its_prompts_and_is_opened_again(shared: Any) -> None:
    async with client_of(shared) as client:
        r = request(new_id(), 1, LONG)
        got: list[int] = []

        async def read() -> None:
            async for outputs in client.generate([r]):
                got.extend(token for output in outputs for token in output.new_token_ids)
                if len(got) == 10:
                    await client.call_replicas("end_sessions", 10.0)

        with pytest.raises(ReplicaLost):
            await read()
        assert got == list(range(1, len(got) + 1))
        r = request(new_id(), 1, 5)
        assert await tokens_of(client, r) == {r.request_id: [1, 2, 3, 4, 5]}


async def test_a_stream_that_cannot_be_read_is_opened_again(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(shared) as client:
        await tokens_of(client, request(new_id()))
        failures = 0

        def garbled(data: bytes) -> StreamItem:
            nonlocal failures
            failures += 1
            monkeypatch.undo()
            raise ValueError("garbled")

        monkeypatch.setattr("app.engine_client.unpack", garbled)
        with pytest.raises(ReplicaLost):
            await tokens_of(client, request(new_id(), 1, LONG))
        assert failures == 1
        async with asyncio.timeout(5):
            for result in await asyncio.gather(*[tokens_of(client, request(new_id())) for _ in range(6)]):
                assert list(result.values()) == [[1, 2, 3, 4, 5]]


async def test_a_call_that_ray_sent_twice_takes_the_outputs_of_one_stream() -> None:
    call = Call((request("a"),), 0.0)
    for stream_id in ("one", "two"):
        call.take_from(stream_id, EngineOutput("a", (1,)))
    call.take_from("two", EngineOutput("a", (2,), finish_reason=FinishReason.LENGTH))
    call.take_from("one", EngineOutput("a", (2,), finish_reason=FinishReason.LENGTH))
    assert [output.new_token_ids for output in call.outputs] == [(1,), (2,)]
    assert not call.unfinished


async def test_the_index_follows_the_engines_prefix_caches_over_a_broken_stream(shared: Any) -> None:
    async with client_of(shared) as client:

        async def equal() -> bool:
            states = await client.call_replicas("state", 10.0)
            return all(set(s["blocks"]) == client.replicas.cached_blocks(i) for i, s in states.items())

        await asyncio.gather(*[tokens_of(client, request(new_id())) for _ in range(6)])
        assert await eventually(equal)
        assert any(client.replicas.cached_blocks(i) for i in client.replicas.members)
        await client.call_replicas("end_sessions", 10.0)
        await asyncio.gather(*[tokens_of(client, request(new_id())) for _ in range(6)])
        assert await eventually(equal)


async def test_a_storm_of_requests_and_departures_leaves_nothing_behind(shared: Any) -> None:
    rng = random.Random(1)
    async with client_of(shared) as client:

        async def one(i: int) -> str:
            n, tokens = rng.randint(1, 3), rng.randint(1, 40)
            prompt = [request(f"{new_id()}-{c}", 100 * i + 1, tokens) for c in range(n)]
            leave_after = rng.choice([None, None, 0, 1, 3])
            got: dict[str, list[int]] = {r.request_id: [] for r in prompt}
            try:
                async with asyncio.timeout(rng.choice([None, 0.001, 0.05])), aclosing(client.generate(prompt)) as items:
                    async for outputs in items:
                        for output in outputs:
                            got[output.request_id] += output.new_token_ids
                        if leave_after is not None and len(got[prompt[0].request_id]) > leave_after:
                            return "left"
            except TimeoutError:
                return "timed out"
            except QueueFull:
                return "refused"
            assert all(t == list(range(100 * i + 1, 100 * i + 1 + tokens)) for t in got.values())
            return "served"

        results = await asyncio.gather(*[one(i) for i in range(400)])
        assert set(results) >= {"left", "timed out", "served"}

        async def idle() -> bool:
            return await on_replicas(client, "running") == []

        assert await eventually(idle)
        assert all(client.replicas.in_flight(i) == 0 for i in client.replicas.members)
        # No slot of Ray's is lost either: requests still get through, on both replicas.
        results_after = await asyncio.gather(*[tokens_of(client, request(new_id())) for _ in range(20)])
        assert all(tokens == [1, 2, 3, 4, 5] for result in results_after for tokens in result.values())


async def test_a_full_queue_refuses_until_there_is_room(deploy_scripted: Callable[..., Any]) -> None:
    async with client_of(deploy_scripted("full", max_num_seqs=2, max_queued_requests=1)) as client:
        wide = [request(f"{new_id()}-{i}") for i in range(6)]
        assert len(await tokens_of(client, *wide)) == 6, "an idle replica takes any prompt"
        blockers = [asyncio.create_task(tokens_of(client, request(new_id(), HANG))) for _ in range(3)]

        async def all_run() -> bool:
            return len(await on_replicas(client, "running")) == 3

        assert await eventually(all_run)
        with pytest.raises(QueueFull) as error:
            await tokens_of(client, request(new_id()))
        assert error.value.retry_after_s > 0
        for task in blockers:
            task.cancel()
        await asyncio.gather(*blockers, return_exceptions=True)

        async def served() -> bool:
            try:
                return bool(await tokens_of(client, request(new_id())))
            except QueueFull:
                return False

        assert await eventually(served)


@pytest.fixture
async def half_full(shared: Any) -> AsyncIterator[RayEngineClient]:
    """A client of two replicas, equally loaded, one of which refuses trials."""
    async with client_of(shared) as client:
        suspect = asyncio.create_task(tokens_of(client, request(new_id(), HANG), on_trial=True))

        async def running(number: int) -> bool:
            return len(await on_replicas(client, "running")) == number

        assert await eventually(lambda: running(1))
        balance = asyncio.create_task(tokens_of(client, request(new_id(), HANG)))
        assert await eventually(lambda: running(2))
        yield client
        for task in (suspect, balance):
            task.cancel()
        await asyncio.gather(suspect, balance, return_exceptions=True)
        assert await eventually(lambda: running(0))


async def test_what_one_replica_refuses_another_one_takes(half_full: RayEngineClient) -> None:
    for _ in range(12):
        assert list((await tokens_of(half_full, request(new_id()), on_trial=True)).values()) == [[1, 2, 3, 4, 5]]


async def test_what_all_replicas_refuse_is_refused(half_full: RayEngineClient) -> None:
    second = asyncio.create_task(tokens_of(half_full, request(new_id(), HANG), on_trial=True))

    async def three_run() -> bool:
        return len(await on_replicas(half_full, "running")) == 3

    assert await eventually(three_run)
    with pytest.raises(QueueFull):
        await tokens_of(half_full, request(new_id()), on_trial=True)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def test_not_all_replicas_are_asked_for_room(half_full: RayEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine_client.MAX_REFUSALS", 1)

    async def ask() -> None:
        for _ in range(30):  # half of them come to the one that refuses
            await tokens_of(half_full, request(new_id()), on_trial=True)

    with pytest.raises(QueueFull):
        await ask()


@ray.remote(num_cpus=0)
class LoneIngress:
    """A process that starts a request and then is lost."""

    async def start(self, handle: Any, r: EngineRequest) -> int:
        me = ray.get_runtime_context().current_actor
        self.client = RayEngineClient(handle, ingress_id=new_id(), ingress=me, replica_wait_s=5.0)
        self.task = asyncio.create_task(tokens_of(self.client, r))

        async def settled() -> bool:
            # Its short calls have ended; one that is cut off holds up its replica until this process is killed.
            links = self.client._links.values()
            return len(links) == 2 and all(link.snapshot_task and link.snapshot_task.done() for link in links)

        assert await eventually(settled)
        return os.getpid()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "silent"])
async def test_what_a_lost_ingress_leaves_behind_is_aborted(shared: Any, how: signal.Signals) -> None:
    async with client_of(shared) as client:
        r = request(new_id(), HANG)
        lone = LoneIngress.remote()
        pid = await lone.start.remote(shared, r)

        async def runs() -> bool:
            return r.request_id in await on_replicas(client, "running")

        assert await eventually(runs)
        os.kill(pid, how)
        try:

            async def aborted() -> bool:
                return r.request_id in await on_replicas(client, "aborted")

            assert await eventually(aborted)
            # The replicas go on serving the others.
            for result in await asyncio.gather(*[tokens_of(client, request(new_id())) for _ in range(6)]):
                assert list(result.values()) == [[1, 2, 3, 4, 5]]
        finally:
            if how is signal.SIGSTOP:
                os.kill(pid, signal.SIGKILL)

        async def forgotten() -> bool:
            return len(set(await on_replicas(client, "sessions"))) == 1

        assert await eventually(forgotten)
