"""What a replica does with calls and streams, without Ray around it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.ingress_session import TRIAL_TOKENS
from app.replica import IngressSession, PromptCall
from app.transport import CallEnd, QueueFull, ReplicaLost, StreamItem, TrialBusy, unpack
from engine.kv_cache.events import BlockStored
from engine.outputs import EngineLoad, EngineOutput
from engine.request import FinishReason
from tests.app.scripted_engine import HANG, LoneReplica, ScriptedReplica, Step, request

NO_LOAD = EngineLoad(0, 0, 0, 0, 100)


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedReplica]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="me"))
    monkeypatch.setattr("app.replica.serve.get_replica_context", lambda: context)
    replica = LoneReplica()
    yield replica
    replica._engine_watch.cancel()
    await replica._core.shutdown()


class Reader:
    """An ingress's end of a stream."""

    def __init__(self, replica: ScriptedReplica, ingress_id: str = "ingress", stream_id: str = "stream") -> None:
        self.items: list[StreamItem] = []
        self._stream = replica.outputs(ingress_id, stream_id, None, pinned_to="me")
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for data in self._stream:
            self.items.append(unpack(data))

    async def opened(self) -> "Reader":
        while not self.items:
            await asyncio.sleep(0)
        return self

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._stream.aclose()

    def tokens(self, request_id: str) -> list[int]:
        return [t for item in self.items for o in item.outputs if o.request_id == request_id for t in o.new_token_ids]


async def test_all_outputs_are_on_the_stream_before_the_call_ends(replica: ScriptedReplica) -> None:
    reader = await Reader(replica).opened()
    end = await replica.generate((request("a", 1, 5), request("b", 11, 7)), "ingress")
    await asyncio.sleep(0)
    assert end == CallEnd("stream")
    assert (reader.tokens("a"), reader.tokens("b")) == ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17])
    await reader.close()


async def test_a_call_that_comes_before_its_stream_waits_for_it(replica: ScriptedReplica) -> None:
    call = asyncio.create_task(replica.generate((request("a"),), "ingress"))
    await asyncio.sleep(0.02)
    assert not call.done()
    reader = await Reader(replica).opened()
    assert (await call).error is None
    await reader.close()


async def test_a_call_without_a_stream_gives_up(replica: ScriptedReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.replica.STREAM_WAIT_S", 0.01)
    assert isinstance((await replica.generate((request("a"),), "ingress")).error, ReplicaLost)


async def test_a_burst_between_two_steps_fills_engine_and_queue_and_no_more(replica: ScriptedReplica) -> None:
    reader = await Reader(replica).opened()
    calls = [asyncio.create_task(replica.generate((request(f"r{i}", HANG),), "ingress")) for i in range(9)]
    done, running = await asyncio.wait(calls, timeout=0.1)
    assert (len(done), len(running)) == (2, 7), "4 run, 3 wait"
    assert all(isinstance(call.result().error, QueueFull) for call in done)
    for call in running:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert len((await replica.state(pinned_to="me"))["aborted"]) == 7
    assert (await replica.generate((request("next"),), "ingress")).error is None
    await reader.close()


async def test_prompts_on_trial_are_taken_one_at_a_time_and_others_beside_them(replica: ScriptedReplica) -> None:
    reader = await Reader(replica).opened()
    suspect = asyncio.create_task(replica.generate((request("suspect", HANG),), "ingress", on_trial=True))
    await asyncio.sleep(0)
    refused = await replica.generate((request("next"),), "ingress", on_trial=True)
    assert isinstance(refused.error, QueueFull)
    assert (await replica.state(pinned_to="me"))["running"] == [], "who comes at the same time is told before it runs"
    assert (await replica.generate((request("other"),), "ingress")).error is None
    suspect.cancel()
    await asyncio.gather(suspect, return_exceptions=True)
    assert (await replica.generate((request("next"),), "ingress", on_trial=True)).error is None
    await reader.close()


async def test_a_few_tokens_end_a_trial(replica: ScriptedReplica) -> None:
    reader = await Reader(replica).opened()
    innocent = asyncio.create_task(replica.generate((request("innocent", 1, 10**6),), "ingress", on_trial=True))
    while not reader.tokens("innocent"):
        await asyncio.sleep(0.001)
    assert isinstance((await replica.generate((request("early"),), "ingress", on_trial=True)).error, TrialBusy)
    while len(reader.tokens("innocent")) < TRIAL_TOKENS:
        await asyncio.sleep(0.001)
    assert (await replica.generate((request("next"),), "ingress", on_trial=True)).error is None
    assert not innocent.done()
    innocent.cancel()
    await asyncio.gather(innocent, return_exceptions=True)
    await reader.close()


async def test_a_call_that_comes_twice_is_one(replica: ScriptedReplica) -> None:
    reader = await Reader(replica).opened()
    first = asyncio.create_task(replica.generate((request("a", HANG),), "ingress"))
    await asyncio.sleep(0.05)
    again = asyncio.create_task(replica.generate((request("a", HANG),), "ingress"))
    await asyncio.sleep(0.05)
    assert not first.done()
    assert not again.done()
    assert (await replica.state(pinned_to="me"))["running"] == ["a"]
    again.cancel()
    await asyncio.gather(first, again, return_exceptions=True)
    while (await replica.state(pinned_to="me"))["running"]:
        await asyncio.sleep(0.01)
    assert (await replica.generate((request("b"),), "ingress")).error is None
    await reader.close()


async def test_children_that_ended_leave_the_queue_before_their_prompt_does(replica: ScriptedReplica) -> None:
    reader = await Reader(replica).opened()
    children = (request("long", HANG), *(request(f"short-{i}") for i in range(6)))
    wide = asyncio.create_task(replica.generate(children, "ingress"))
    while len((await replica.state(pinned_to="me"))["running"]) != 1:
        await asyncio.sleep(0.01)
    ends = await asyncio.gather(*[replica.generate((request(f"r{i}"),), "ingress") for i in range(6)])
    assert [end.error for end in ends] == [None] * 6
    wide.cancel()
    await asyncio.gather(wide, return_exceptions=True)
    assert replica._num_unfinished == 0
    await reader.close()


async def test_an_idle_replica_takes_a_prompt_that_is_wider_than_its_queue(replica: ScriptedReplica) -> None:
    reader = await Reader(replica).opened()
    children = tuple(request(f"c-{i}") for i in range(20))
    assert (await replica.generate(children, "ingress")).error is None
    await reader.close()


async def test_closing_the_stream_aborts_and_ends_its_calls_and_no_others(replica: ScriptedReplica) -> None:
    one, two = await Reader(replica, "one").opened(), await Reader(replica, "two").opened()
    lost = asyncio.create_task(replica.generate((request("a", HANG),), "one"))
    kept = asyncio.create_task(replica.generate((request("b", 1, 30),), "two"))
    await asyncio.sleep(0.01)
    await one.close()
    assert isinstance((await lost).error, ReplicaLost)
    assert (await kept).error is None
    assert (await replica.state(pinned_to="me"))["aborted"] == ["a"]
    await two.close()


async def test_a_second_stream_of_an_ingress_replaces_the_first(replica: ScriptedReplica) -> None:
    old = await Reader(replica, stream_id="old").opened()
    lost = asyncio.create_task(replica.generate((request("a", HANG),), "ingress"))
    await asyncio.sleep(0.01)
    new = await Reader(replica, stream_id="new").opened()
    assert isinstance((await lost).error, ReplicaLost)
    await asyncio.wait_for(old.task, 5)
    assert await replica.generate((request("b"),), "ingress") == CallEnd("new")
    await new.close()


async def test_a_call_meant_for_another_replica_is_refused(replica: ScriptedReplica) -> None:
    with pytest.raises(ReplicaLost, match="other"):
        await anext(replica.outputs("ingress", "stream", None, pinned_to="other"))
    for method in (replica.kv_snapshot, replica.metrics):
        with pytest.raises(ReplicaLost):
            await method(pinned_to="other")


class Ingress:
    """An ingress's actor as far as a replica asks it."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.__ray_ready__ = SimpleNamespace(remote=self.answers.wait)


async def test_a_call_does_not_end_while_its_ingress_is_silent(replica: ScriptedReplica) -> None:
    ingress = Ingress()
    replica._lease_s = 60.0
    stream = replica.outputs("ingress", "stream", ingress, pinned_to="me")  # type: ignore[arg-type]
    await anext(stream)
    session = replica._sessions["ingress"]
    call = asyncio.create_task(replica.generate((request("a", 1, 1300),), "ingress"))
    await asyncio.sleep(0)
    ingress.answers.clear()
    while session.responsive.is_set():
        await asyncio.sleep(0.01)
    while (await replica.state(pinned_to="me"))["running"]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not call.done()
    ingress.answers.set()
    assert await asyncio.wait_for(call, 10) == CallEnd("stream")
    await stream.aclose()


async def test_a_call_that_waits_for_a_silent_ingress_ends_with_the_stream(replica: ScriptedReplica) -> None:
    ingress = Ingress()
    replica._lease_s = 60.0
    stream = replica.outputs("ingress", "stream", ingress, pinned_to="me")  # type: ignore[arg-type]
    await anext(stream)
    session = replica._sessions["ingress"]
    call = asyncio.create_task(replica.generate((request("a", 1, 1),), "ingress"))
    await asyncio.sleep(0)
    session.responsive.clear()
    while (await replica.state(pinned_to="me"))["running"]:
        await asyncio.sleep(0.01)
    assert not call.done()
    await stream.aclose()
    assert await asyncio.wait_for(call, 5) == CallEnd("stream")


async def test_a_stream_that_is_cancelled_while_it_opens_leaves_no_session(replica: ScriptedReplica) -> None:
    async with replica._session_opened:
        reader = Reader(replica)
        while not replica._sessions:
            await asyncio.sleep(0)
        await reader.close()
    assert replica._sessions == {}


async def test_an_ingress_that_outlives_its_lease_loses_its_requests(replica: ScriptedReplica) -> None:
    ingress = Ingress()
    replica._lease_s = 0.1
    stream = replica.outputs("ingress", "stream", ingress, pinned_to="me")  # type: ignore[arg-type]
    await anext(stream)
    call = asyncio.create_task(replica.generate((request("a", HANG),), "ingress"))
    await asyncio.sleep(0.05)
    ingress.answers.clear()
    while not (await replica.state(pinned_to="me"))["aborted"]:
        await asyncio.sleep(0.01)
    assert not call.done(), "its end would hold up the replica"
    assert replica._num_unfinished == 0, "what was aborted takes no place in the queue"
    ingress.answers.set()
    assert isinstance((await asyncio.wait_for(call, 10)).error, ReplicaLost)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(stream), 10)


async def test_steps_that_come_faster_than_they_are_read_are_put_together_in_order() -> None:
    session = IngressSession("s", NO_LOAD, kv_seq=3)
    call = PromptCall(session, (request("a"),))
    items = session.items()
    assert (await anext(items)).outputs == [], "the first item says that the stream is open"
    for token in range(3):
        call.take(EngineOutput("a", (token,)))
        session.after_step(Step([], [BlockStored((bytes([token]),), None)], EngineLoad(token, 0, 0, 0, 100)))  # type: ignore[arg-type]
    item = await anext(items)
    assert [o.new_token_ids for o in item.outputs] == [(0,), (1,), (2,)]
    assert (item.kv_seq, len(item.kv_events), item.load.running) == (3, 3, 2)
    call.take(EngineOutput("a", finish_reason=FinishReason.STOP))
    session.after_step(Step([], [], NO_LOAD))  # type: ignore[arg-type]
    assert (await anext(items)).kv_seq == 6
    assert call.ended.done()


async def test_a_stream_without_outputs_still_tells_the_load_and_the_events() -> None:
    session = IngressSession("s", NO_LOAD, kv_seq=0)
    items = session.items()
    await anext(items)
    for _ in range(5):
        session.after_step(Step([], [BlockStored((b"x",), None)], EngineLoad(9, 0, 0, 0, 100)))  # type: ignore[arg-type]
    item: Any = await asyncio.wait_for(anext(items), 5)
    assert (item.outputs, len(item.kv_events), item.load.running) == ([], 5, 9)


async def test_a_stream_names_each_call_once_when_a_load_counts_it() -> None:
    session = IngressSession("s", NO_LOAD, kv_seq=0)
    items = session.items()
    for call_id, number in (("a", 2), ("b", 3), ("c", 7)):
        session.note_submitted(call_id, number)
    assert (await anext(items)).known == ()
    told = []
    for received in (1, 3, 3, 7):
        session.after_step(Step([], [], replace(NO_LOAD, received=received)))  # type: ignore[arg-type]
        told.append((await asyncio.wait_for(anext(items), 5)).known)
    assert told == [(), ("a", "b"), (), ("c",)]


def many_prompts(session: IngressSession) -> list[PromptCall]:
    """Each has had its first token, and the stream has brought it."""
    calls = [PromptCall(session, (request(f"r{index}"),)) for index in range(9)]
    session.calls.update(calls)
    for index, call in enumerate(calls):
        call.take(EngineOutput(f"r{index}", (0,)))
    return calls


async def test_tokens_of_many_prompts_are_gathered_and_firsts_and_lasts_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.transport.SECONDS_PER_STREAM", 3600.0)
    session = IngressSession("s", NO_LOAD, kv_seq=0, gather_s=3600.0)
    items = session.items()
    await anext(items)
    calls = many_prompts(session)
    session.after_step(Step([], [], NO_LOAD))  # type: ignore[arg-type]
    assert len((await asyncio.wait_for(anext(items), 10)).outputs) == 9
    reading = asyncio.ensure_future(anext(items))
    for token in range(3):
        calls[0].take(EngineOutput("r0", (token,)))
        session.after_step(Step([], [], NO_LOAD))  # type: ignore[arg-type]
        await asyncio.sleep(0.001)
    assert not reading.done()
    calls[1].take(EngineOutput("r1", (9,), finish_reason=FinishReason.LENGTH))
    session.after_step(Step([], [], NO_LOAD))  # type: ignore[arg-type]
    item = await asyncio.wait_for(reading, 10)
    assert [(o.request_id, o.new_token_ids) for o in item.outputs] == [
        ("r0", (0,)),
        ("r0", (1,)),
        ("r0", (2,)),
        ("r1", (9,)),
    ]


async def test_tokens_that_were_gathered_come_without_another_step() -> None:
    session = IngressSession("s", NO_LOAD, kv_seq=0, gather_s=0.01)
    items = session.items()
    await anext(items)
    calls = many_prompts(session)
    session.after_step(Step([], [], NO_LOAD))  # type: ignore[arg-type]
    await anext(items)
    calls[0].take(EngineOutput("r0", (7,)))
    session.after_step(Step([], [], NO_LOAD))  # type: ignore[arg-type]
    assert [o.new_token_ids for o in (await asyncio.wait_for(anext(items), 10)).outputs] == [(7,)]
