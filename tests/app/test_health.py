"""Replicas whose engines end or hang: they end themselves, Serve replaces them, and their streams go on."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine_client import RayEngineClient
from app.failover import ResumingClient
from app.transport import ReplicaDied, unpack
from engine.request import EngineRequest, FinishReason
from tests.app.scripted_engine import LoneReplica, request

NUM_TOKENS = 1500


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LoneReplica]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="me"))
    monkeypatch.setattr("app.replica.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("app.replica.WATCH_PERIOD_S", 0.01)
    replica = LoneReplica()
    yield replica
    replica._engine_watch.cancel()


async def test_a_replica_whose_engine_ended_gives_up(replica: LoneReplica, caplog: pytest.LogCaptureFixture) -> None:
    replica._core.die()
    await asyncio.wait_for(replica.gave_up.wait(), 30)
    assert "replica_gives_up reason=the engine ended" in caplog.text


async def test_a_replica_whose_engine_hangs_gives_up_and_tells_where(
    replica: LoneReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica._core._stall_timeout_s = 0.05
    replica._core.hang()
    await asyncio.wait_for(replica.gave_up.wait(), 30)
    assert "replica_gives_up reason=the engine makes no steps" in caplog.text
    assert "_watch_engine" in caplog.text


async def test_a_replica_whose_request_failed_stays(replica: LoneReplica) -> None:
    stream = replica.outputs("ingress", "stream", None, pinned_to="me")
    await anext(stream)
    call = asyncio.create_task(replica.generate((request("r", max_tokens=10**6),), "ingress"))
    while not replica._core._running:
        await asyncio.sleep(0.001)
    replica._core.fail("r")
    assert (await call).error is None, "the error is an output of the request's"
    ends = []
    while not ends:
        ends = [output for output in unpack(await anext(stream)).outputs if output.finished]
    assert [end.finish_reason for end in ends] == [FinishReason.ERROR]
    await asyncio.sleep(0.1)
    assert not replica.gave_up.is_set()
    await stream.aclose()


async def test_what_an_engine_that_ended_or_hangs_had_or_is_given_may_go_on_elsewhere(replica: LoneReplica) -> None:
    stream = replica.outputs("ingress", "stream", None, pinned_to="me")
    await anext(stream)
    call = asyncio.create_task(replica.generate((request("had", max_tokens=10**6),), "ingress"))
    while not replica._core._running:
        await asyncio.sleep(0.001)
    replica._core._stall_timeout_s = 0.0
    replica._core.hang()
    given = await replica.generate((request("given to one that hangs"),), "ingress")
    assert isinstance(given.error, ReplicaDied)
    replica._core.die()
    assert isinstance((await call).error, ReplicaDied)
    given = await replica.generate((request("given to one that ended"),), "ingress")
    assert isinstance(given.error, ReplicaDied)
    await stream.aclose()


@pytest.mark.parametrize("fault", ["hang_engine", "hang_loop", "kill_engine"])
async def test_streams_go_on_elsewhere_and_the_replica_is_replaced(
    deploy_scripted: Callable[..., Any], fault: str
) -> None:
    # Were it left to Serve to stop the replica, its open calls would keep it for as long as this.
    handle = deploy_scripted(f"health-{fault}", 2, stall_timeout_s=2.0, graceful_shutdown_timeout_s=600)
    inner = RayEngineClient(handle, ingress_id=uuid.uuid4().hex, ingress=None, replica_wait_s=60)
    client = ResumingClient(inner, resume_wait_s=120)

    async def tokens(spec: EngineRequest) -> list[int]:
        got: list[int] = []
        async for outputs in client.generate([spec]):
            for output in outputs:
                assert output.finish_reason in (None, FinishReason.LENGTH)
                got += output.new_token_ids
        return got

    try:
        specs = [request(uuid.uuid4().hex, 10_000 * number, NUM_TOKENS) for number in range(1, 9)]
        running = [asyncio.create_task(tokens(spec)) for spec in specs]
        await asyncio.sleep(1.0)
        states = await inner.call_replicas("state", 10.0)
        victim = max(states, key=lambda replica_id: len(states[replica_id]["running"]))
        assert states[victim]["running"]
        await inner._call_pinned(fault, victim)
        results = await asyncio.wait_for(asyncio.gather(*running), 120)
        for number, result in enumerate(results, start=1):
            assert result == list(range(10_000 * number, 10_000 * number + NUM_TOKENS))
        async with asyncio.timeout(60):
            while victim in (now := await inner.call_replicas("state", 10.0)) or len(now) < 2:
                await asyncio.sleep(0.1)
    finally:
        await inner.close()
