"""Requests whose replicas die: what a client gets is what it would have got."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app import failover
from app.engine_client import RayEngineClient
from app.failover import MAX_DEATHS, MAX_DEATHS_IN_ALL, ResumingClient
from app.transport import (
    PROVEN_TOKENS,
    EngineFailed,
    NoReplica,
    QueueFull,
    ReplicaDied,
    ReplicaLost,
    TransportError,
    TrialBusy,
)
from engine.outputs import EngineOutput, TokenLogprobs
from engine.request import EngineRequest, FinishReason
from tests.app.scripted_engine import request

Attempt = Callable[[Sequence[EngineRequest]], AsyncGenerator[list[EngineOutput], None]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "RETRY_PAUSE_S", 0.01)


def died(replica_id: str) -> ReplicaDied:
    error = ReplicaDied(f"{replica_id} died")
    error.replica_id = replica_id
    return error


def rows(count: int) -> TokenLogprobs:
    return TokenLogprobs(np.zeros((count, 1), np.int32), np.zeros((count, 1), np.float32), np.ones(count, np.int32))


class Replicas:
    """Each attempt gives so many tokens (of a sequence: its first prompt token, and so on) and then an error.

    Attributes:
        attempts: the requests of each.
        trials: whether each was a trial.
        aborted: ids that were to end early.
    """

    def __init__(self, *script: tuple[int, TransportError | None]) -> None:
        self._script = list(script)
        self.attempts: list[list[EngineRequest]] = []
        self.trials: list[bool] = []
        self.aborted: list[str] = []

    async def generate(
        self, requests: Sequence[EngineRequest], *, on_trial: bool = False
    ) -> AsyncGenerator[list[EngineOutput], None]:
        self.attempts.append(list(requests))
        self.trials.append(on_trial)
        steps, error = self._script.pop(0)
        running = {each.request_id: (each, len(each.output_token_ids)) for each in requests}
        while running and (steps > 0 or error is None):
            steps -= 1
            outputs = []
            for name, (spec, done) in list(running.items()):
                last = done + 1 == spec.params.max_tokens
                running[name] = (spec, done + 1)
                if last:
                    del running[name]
                outputs.append(
                    EngineOutput(
                        name, (spec.prompt_token_ids[0] + done,), finish_reason=FinishReason.LENGTH if last else None
                    )
                )
            yield outputs
            await asyncio.sleep(0)
        if error is not None:
            raise error

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


async def run(client: ResumingClient, *requests: EngineRequest) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    ends = []
    async for outputs in client.generate(requests):
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
            ends += [output.request_id] if output.finished else []
    assert sorted(ends) == sorted(tokens)
    return tokens


async def test_a_stream_goes_on_where_it_broke() -> None:
    replicas = Replicas((3, died("a")), (1, died("b")), (0, None))
    client = ResumingClient(replicas, resume_wait_s=5)
    assert await run(client, request("r", 100, max_tokens=8)) == {"r": list(range(100, 108))}
    assert [each[0].output_token_ids for each in replicas.attempts] == [(), (100, 101, 102), (100, 101, 102, 103)]
    assert len({each[0].request_id for each in replicas.attempts}) == 3
    assert not client._sequences


async def test_children_go_on_one_by_one_and_finished_ones_do_not() -> None:
    replicas = Replicas((4, died("a")), (0, None))
    children = [request("x", 10, max_tokens=3), request("y", 50, max_tokens=6), request("z", 90, max_tokens=6)]
    tokens = await run(ResumingClient(replicas, resume_wait_s=5), *children)
    assert tokens == {"x": [10, 11, 12], "y": list(range(50, 56)), "z": list(range(90, 96))}
    assert [each.prompt_token_ids[0] for each in replicas.attempts[1]] == [50, 90]


async def test_a_resumed_request_that_was_resumed_before_keeps_its_tokens() -> None:
    spec = replace(request("r", 100, max_tokens=6), output_token_ids=(100, 101))
    replicas = Replicas((2, died("a")), (0, None))
    assert await run(ResumingClient(replicas, resume_wait_s=5), spec) == {"r": [102, 103, 104, 105]}
    assert replicas.attempts[1][0].output_token_ids == (100, 101, 102, 103)


async def test_rows_of_prompt_logprobs_are_not_asked_for_again() -> None:
    class Prompts(Replicas):
        async def generate(
            self, requests: Sequence[EngineRequest], *, on_trial: bool = False
        ) -> AsyncGenerator[list[EngineOutput], None]:
            self.attempts.append(list(requests))
            if len(self.attempts) == 1:
                yield [EngineOutput(requests[0].request_id, prompt_logprobs=rows(7))]
                raise died("a")
            yield [EngineOutput(requests[0].request_id, (5,), finish_reason=FinishReason.LENGTH)]

    replicas = Prompts()
    await run(ResumingClient(replicas, resume_wait_s=5), request("r"))
    assert [each[0].num_prompt_logprobs for each in replicas.attempts] == [0, 7]


async def test_a_request_under_which_replica_after_replica_dies_is_given_up() -> None:
    replicas = Replicas(*((0, died(f"replica {number}")) for number in range(MAX_DEATHS)))
    with pytest.raises(EngineFailed, match=f"{MAX_DEATHS} replicas that served it died"):
        await run(ResumingClient(replicas, resume_wait_s=5), request("poison"))
    assert len(replicas.attempts) == MAX_DEATHS


async def test_the_last_attempt_of_a_request_under_which_replicas_died_is_a_trial() -> None:
    busy = QueueFull("a trial is on")
    replicas = Replicas((2, died("a")), (0, died("b")), (0, busy), (PROVEN_TOKENS, died("c")), (0, None))
    tokens = await run(ResumingClient(replicas, resume_wait_s=5), request("r", 1, max_tokens=PROVEN_TOKENS + 4))
    assert tokens == {"r": list(range(1, PROVEN_TOKENS + 5))}
    assert replicas.trials == [False, False, True, True, False]


async def test_progress_between_deaths_clears_the_suspicion() -> None:
    deaths = 2 * MAX_DEATHS
    replicas = Replicas(*((PROVEN_TOKENS, died(f"replica {number}")) for number in range(deaths)), (0, None))
    spec = request("r", 7, max_tokens=PROVEN_TOKENS * deaths + 2)
    tokens = list(range(7, 9 + PROVEN_TOKENS * deaths))
    assert await run(ResumingClient(replicas, resume_wait_s=5), spec) == {"r": tokens}


async def test_what_kills_replicas_in_a_decode_step_is_given_up_too() -> None:
    replicas = Replicas(*((1, died(f"replica {number}")) for number in range(30)))
    with pytest.raises(EngineFailed, match=f"{MAX_DEATHS} replicas that served it died"):
        await run(ResumingClient(replicas, resume_wait_s=5), request("poison", max_tokens=100))
    assert replicas.trials == [False, False, True]


async def test_a_sibling_that_ends_does_not_clear_the_suspicion_of_the_others() -> None:
    replicas = Replicas(*((2, died(f"replica {number}")) for number in range(30)))
    children = [request("short", 10, max_tokens=2), request("poison", 50, max_tokens=100)]
    with pytest.raises(EngineFailed):
        await run(ResumingClient(replicas, resume_wait_s=5), *children)
    assert len(replicas.attempts) == MAX_DEATHS


async def test_no_request_is_tried_for_ever() -> None:
    replicas = Replicas(*((PROVEN_TOKENS, died(f"replica {number}")) for number in range(3 * MAX_DEATHS_IN_ALL)))
    with pytest.raises(EngineFailed, match=f"{MAX_DEATHS_IN_ALL} replicas that served it died"):
        await run(ResumingClient(replicas, resume_wait_s=5), request("r", max_tokens=1000))
    assert len(replicas.attempts) == MAX_DEATHS_IN_ALL


async def test_without_a_wait_a_request_is_tried_once_more() -> None:
    replicas = Replicas((2, died("a")), (0, None))
    assert await run(ResumingClient(replicas, resume_wait_s=0), request("r", 1, max_tokens=4)) == {"r": [1, 2, 3, 4]}
    replicas = Replicas((2, died("a")), (0, NoReplica("none is up")), (0, None))
    with pytest.raises(ReplicaLost):
        await run(ResumingClient(replicas, resume_wait_s=0), request("r", 1, max_tokens=4))


async def test_the_wait_starts_again_with_each_replica_that_took_the_request() -> None:
    now = iter(range(0, 1000, 4))
    replicas = Replicas((2, died("a")), (0, NoReplica("none is up")), (0, died("b")), (0, NoReplica("none")), (0, None))
    client = ResumingClient(replicas, resume_wait_s=9, clock=lambda: next(now))
    assert await run(client, request("r", 1, max_tokens=4)) == {"r": [1, 2, 3, 4]}


async def test_pauses_grow_while_nobody_takes_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    # Not asyncio's own: what else runs on the loop, Serve's tasks for example, sleeps too.
    monkeypatch.setattr(failover, "asyncio", SimpleNamespace(sleep=sleep))
    replicas = Replicas((2, died("a")), *((0, QueueFull("full")) for _ in range(12)), (0, None))
    resumed: list[None] = []
    client = ResumingClient(replicas, resume_wait_s=60, on_resume=lambda: resumed.append(None))
    await run(client, request("r", max_tokens=4))
    assert len(pauses) == 13
    assert pauses[0] <= 1.5 * failover.RETRY_PAUSE_S
    assert all(each >= 0.5 * failover.LONGEST_PAUSE_S for each in pauses[-5:])
    assert len(set(pauses)) == 13
    assert len(resumed) == 1


async def test_one_dead_replica_that_is_tried_again_counts_once() -> None:
    replicas = Replicas(*((0, died("a")) for _ in range(2 * MAX_DEATHS)), (0, None))
    assert await run(ResumingClient(replicas, resume_wait_s=5), request("r", 1, max_tokens=2)) == {"r": [1, 2]}


@pytest.mark.parametrize("error", [NoReplica("none is up"), QueueFull("full")])
async def test_a_request_that_lost_its_replica_waits_for_another(error: TransportError) -> None:
    replicas = Replicas((2, died("a")), (0, error), (0, error), (0, None))
    assert await run(ResumingClient(replicas, resume_wait_s=5), request("r", 1, max_tokens=4)) == {"r": [1, 2, 3, 4]}


@pytest.mark.parametrize("error", [NoReplica("none is up"), QueueFull("full")])
async def test_a_new_request_is_refused_at_once(error: TransportError) -> None:
    replicas = Replicas((0, error), (0, None))
    with pytest.raises(type(error)):
        await run(ResumingClient(replicas, resume_wait_s=5), request("r"))
    assert len(replicas.attempts) == 1


async def test_the_wait_for_another_replica_ends() -> None:
    now = iter(range(1000))
    replicas = Replicas((2, died("a")), *((0, QueueFull("no room")) for _ in range(50)))
    with pytest.raises(ReplicaLost, match="no room"):
        await run(ResumingClient(replicas, resume_wait_s=10, clock=lambda: next(now)), request("r"))
    assert 5 < len(replicas.attempts) < 15


async def test_who_waits_for_a_trial_is_not_given_up() -> None:
    now = iter(range(1000))
    replicas = Replicas((0, died("a")), (0, died("b")), *((0, TrialBusy("busy")) for _ in range(50)), (0, None))
    client = ResumingClient(replicas, resume_wait_s=10, clock=lambda: next(now))
    assert await run(client, request("r", 1, max_tokens=3)) == {"r": [1, 2, 3]}


async def test_a_death_on_which_it_had_proven_itself_is_no_suspicion() -> None:
    deaths = [(PROVEN_TOKENS, died("a")), (0, died("b")), (0, died("c"))]
    replicas = Replicas(*deaths, (0, None))
    assert len((await run(ResumingClient(replicas, resume_wait_s=5), request("r", 1, max_tokens=20)))["r"]) == 20
    assert replicas.trials == [False, False, False, True]


async def test_connections_that_break_are_no_deaths() -> None:
    lost = [ReplicaLost("the stream broke") for _ in range(2 * MAX_DEATHS)]
    replicas = Replicas(*((0, error) for error in lost), (0, None))
    assert await run(ResumingClient(replicas, resume_wait_s=5), request("r", 1, max_tokens=3)) == {"r": [1, 2, 3]}
    assert not any(replicas.trials)


async def test_a_connection_that_breaks_for_ever_is_given_up() -> None:
    now = iter(range(1000))
    replicas = Replicas(*((0, ReplicaLost("the stream broke")) for _ in range(50)))
    with pytest.raises(ReplicaLost):
        await run(ResumingClient(replicas, resume_wait_s=10, clock=lambda: next(now)), request("r"))
    assert 5 < len(replicas.attempts) < 15


async def test_an_abort_between_two_attempts_ends_the_request() -> None:
    replicas = Replicas((2, died("a")), (0, None))
    client = ResumingClient(replicas, resume_wait_s=5)
    children = [request("x", 10, max_tokens=6), request("y", 50, max_tokens=6)]
    got: list[EngineOutput] = []
    async for outputs in client.generate(children):
        got += outputs
        if len(got) == 4:
            client.abort(["x"])
    assert replicas.aborted == ["x"]
    assert [each.prompt_token_ids[0] for each in replicas.attempts[1]] == [50]
    ends = {output.request_id: output.finish_reason for output in got if output.finished}
    assert ends == {"x": FinishReason.ABORT, "y": FinishReason.LENGTH}


async def test_an_abort_reaches_the_present_attempt() -> None:
    replicas = Replicas((2, died("a")), (0, None))
    client = ResumingClient(replicas, resume_wait_s=5)
    count = 0
    async for _ in client.generate([request("r", 1, max_tokens=6)]):
        count += 1
        if count == 3:
            client.abort(["r", "unknown"])
    assert replicas.aborted == [replicas.attempts[1][0].request_id]


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_streams_outlive_killed_processes(deploy_scripted: Callable[..., Any], num_replicas: int) -> None:
    handle = deploy_scripted(f"mortal-{num_replicas}", num_replicas)
    inner = RayEngineClient(handle, ingress_id=uuid.uuid4().hex, ingress=None, replica_wait_s=60)
    client = ResumingClient(inner, resume_wait_s=120)
    try:
        specs = [request(f"{number}-{num_replicas}", 1000 * number, max_tokens=1500) for number in range(8)]
        running = [asyncio.create_task(run(client, spec)) for spec in specs]
        await asyncio.sleep(1.0)
        states = await inner.call_replicas("state", 10.0)
        victim = max(states.values(), key=lambda state: len(state["running"]))
        assert victim["running"]
        os.kill(victim["pid"], signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*running), 120)
        for number, result in enumerate(results):
            assert list(result.values()) == [list(range(1000 * number, 1000 * number + 1500))]
    finally:
        await inner.close()
