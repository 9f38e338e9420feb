"""When a replica expects a new request to start, on a simulated engine with a virtual clock and on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.admission import StartEstimate
from app.replica import LLMReplica
from app.transport import QueueFull
from engine.config import EngineConfig
from engine.outputs import EngineLoad, EngineOutput
from engine.request import EngineRequest, FinishReason
from engine.sampling_params import SamplingParams

LIMIT_S = 60.0


class SimulatedEngine:
    """An engine that computes `step_tokens` prompt tokens a step, and one output token of each that runs.

    Attributes:
        now: virtual seconds.
        estimate: what is fed with its outputs.
        waited: seconds from arrival to first token of each request that got one.
    """

    STEP_S = 0.1

    def __init__(
        self, *, seats: int = 4, step_tokens: int = 100, blocks: int = 10_000, by_priority: bool = False
    ) -> None:
        self.now = 1000.0
        self.estimate = StartEstimate(
            max_num_seqs=seats,
            step_tokens=step_tokens,
            block_size=16,
            by_priority=by_priority,
            memory_s=2 * LIMIT_S,
            clock=lambda: self.now,
        )
        self.waited: dict[str, float] = {}
        self._seats, self._step_tokens, self._blocks = seats, step_tokens, blocks
        self._waiting: list[tuple[EngineRequest, float]] = []
        self._prompts: dict[str, int] = {}
        self._running: dict[str, tuple[EngineRequest, float, int]] = {}
        self._count = 0

    def submit(self, *, prompt: int = 10, output: int = 20, priority: int = 0) -> str:
        self._count += 1
        spec = EngineRequest(
            request_id=f"r{self._count}",
            prompt_token_ids=(1,) * prompt,
            params=SamplingParams(max_tokens=output),
            seed=0,
            priority=priority,
        )
        self._waiting.append((spec, self.now))
        self.estimate.submit(spec)
        return spec.request_id

    def abort_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for spec, _ in waiting:
            self.estimate.take(EngineOutput(spec.request_id, finish_reason=FinishReason.ABORT))

    def wait_s(self, priority: int = 0) -> float:
        return self.estimate.wait_s(priority)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - self.STEP_S / 2:
            if self._running or self._waiting:
                self._step()
            else:
                self.now += self.STEP_S

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _used_blocks(self) -> int:
        return sum(-(-len(spec.prompt_token_ids) // 16) for spec, _, _ in self._running.values())

    def _step(self) -> None:
        budget = self._step_tokens
        while self._waiting and len(self._running) < self._seats:
            spec, arrived = self._waiting[0]
            if self._used_blocks() + -(-len(spec.prompt_token_ids) // 16) > self._blocks:
                break
            self._waiting.pop(0)
            self._running[spec.request_id] = (spec, arrived, 0)
            self._prompts[spec.request_id] = len(spec.prompt_token_ids)
        self.now += self.STEP_S
        for request_id, (spec, arrived, done) in list(self._running.items()):
            part = min(budget, self._prompts[request_id])
            budget -= part
            self._prompts[request_id] -= part
            if self._prompts[request_id]:
                continue
            self.waited.setdefault(request_id, self.now - arrived)
            last = done + 1 == spec.params.max_tokens
            self._running[request_id] = (spec, arrived, done + 1)
            if last:
                del self._running[request_id]
            self.estimate.take(EngineOutput(request_id, (1,), finish_reason=FinishReason.LENGTH if last else None))
        queued = sum(len(spec.prompt_token_ids) for spec, _ in self._waiting) + sum(self._prompts.values())
        self.estimate.after_step(
            EngineLoad(len(self._running), len(self._waiting), queued, self._used_blocks(), self._blocks)
        )


def test_who_knows_nothing_expects_no_wait() -> None:
    engine = SimulatedEngine()
    for _ in range(1000):
        assert engine.wait_s() == 0
        engine.submit(output=1000)


def test_a_free_seat_is_expected_to_be_had_at_once() -> None:
    engine = SimulatedEngine(seats=4)
    for _ in range(3):
        engine.submit(output=10_000)
    engine.run(500)
    assert engine.wait_s() == 0


@pytest.mark.parametrize(("ahead", "output"), [(8, 20), (40, 20), (40, 100), (200, 20)])
def test_wait_for_a_seat_is_about_what_it_turns_out_to_be(ahead: int, output: int) -> None:
    engine = SimulatedEngine(seats=4)
    for _ in range(400):
        engine.submit(output=output)
    engine.run(100)
    engine.abort_waiting()
    for _ in range(ahead):
        engine.submit(output=output)
    engine.run(0.1)
    expected = engine.wait_s()
    last = engine.submit(output=output)
    engine.run(1000)
    assert expected == pytest.approx(engine.waited[last], rel=0.3, abs=output * engine.STEP_S)


@pytest.mark.parametrize("prompt", [30, 400, 5000])
def test_wait_for_prompts_is_about_what_it_turns_out_to_be(prompt: int) -> None:
    engine = SimulatedEngine(seats=10_000)
    for _ in range(40_000 // prompt):
        engine.submit(prompt=prompt, output=2)
    engine.run(15)
    expected = engine.wait_s()
    last = engine.submit(prompt=10, output=2)
    engine.run(200)
    assert expected == pytest.approx(engine.waited[last], rel=0.2, abs=2 * prompt * engine.STEP_S / 100)


def test_a_long_prompt_does_not_make_short_ones_look_slow() -> None:
    engine = SimulatedEngine(seats=64)
    engine.submit(prompt=10_000)
    engine.run(9.9)
    for _ in range(60):
        engine.submit(prompt=2)
    assert engine.wait_s() < 15


def test_kv_blocks_bound_the_seats() -> None:
    engine = SimulatedEngine(seats=100, step_tokens=100_000, blocks=100)
    for _ in range(100):
        engine.submit(prompt=800, output=50)  # two at a time have room, for 5 s
    engine.run(61)
    assert engine.num_running == 2
    expected = engine.wait_s()
    last = engine.submit(prompt=800, output=50)
    engine.run(1000)
    assert expected == pytest.approx(engine.waited[last], rel=0.35)


def test_nobody_who_is_admitted_waits_much_longer_than_the_limit() -> None:
    """An open load of twice what the engine can do: half of it is refused, and the seats are taken."""
    engine = SimulatedEngine(seats=4)
    refused = admitted = 0
    for tick in range(6000):
        if tick % 5 == 0:  # 2 a second; 4 seats of 4 s give 1
            if engine.wait_s() > LIMIT_S:
                refused += 1
            else:
                engine.submit(output=40)
                admitted += 1
        engine.run(0.1)
    assert len(engine.waited) > 570
    assert max(engine.waited.values()) < 1.2 * LIMIT_S
    assert refused / (refused + admitted) == pytest.approx(0.5, abs=0.1)


def test_what_was_seen_long_ago_counts_no_more() -> None:
    engine = SimulatedEngine(seats=4)
    for _ in range(20):
        engine.submit(output=3000)
    engine.run(400)
    assert engine.wait_s() > LIMIT_S
    engine.run(5000)
    for _ in range(20):
        engine.submit(output=10)
    assert engine.wait_s() < 1


def test_slow_requests_are_forgotten_while_quick_ones_run() -> None:
    engine = SimulatedEngine(seats=4)
    for _ in range(8):
        engine.submit(output=1200)
    engine.run(245)
    for _ in range(20):
        engine.submit(output=10)
    assert engine.wait_s() > LIMIT_S
    engine.run(4)
    for _ in range(10):
        engine.submit(output=10)
    assert engine.wait_s() < LIMIT_S


def test_requests_that_left_the_queue_are_not_waited_for() -> None:
    engine = SimulatedEngine(seats=4)
    for _ in range(100):
        engine.submit(output=100)
    engine.run(30)
    assert engine.wait_s() > 100
    engine.abort_waiting()
    assert engine.wait_s() < 5


def test_urgent_requests_wait_for_their_like_alone() -> None:
    engine = SimulatedEngine(seats=4, by_priority=True)
    for _ in range(100):
        engine.submit(output=100, priority=10)
    engine.run(30)
    assert engine.wait_s(priority=10) > 100
    assert engine.wait_s(priority=0) < 5


# ---- a real replica ----


class EngineReplica(LLMReplica):
    """A replica with a real engine, without Ray."""

    def __del__(self) -> None:  # type: ignore[override]
        """Serve awaits the replica's; the garbage collector cannot."""


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> AsyncIterator[EngineReplica]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="me"))
    monkeypatch.setattr("app.replica.serve.get_replica_context", lambda: context)
    config = EngineConfig(
        model=str(tiny_folder), load_format="dummy", dtype="float32", num_kv_blocks=64, max_num_seqs=1, num_threads=1
    )
    replica = EngineReplica(config, 64, 10.0, max_queue_wait_s=0.01)
    yield replica
    replica._engine_watch.cancel()
    await replica._core.shutdown()


def sequence(request_id: str, *, max_tokens: int, delivered: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=(5, 7, 8),
        output_token_ids=(9,) * delivered,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=0,
    )


async def test_replica_refuses_what_cannot_start_in_time_and_takes_it_when_idle(replica: EngineReplica) -> None:
    stream = replica.outputs("ingress", "stream", None, pinned_to="me")

    async def read() -> None:
        async for _ in stream:
            pass

    reader = asyncio.create_task(read())
    running = [
        asyncio.create_task(replica.generate((sequence(f"long-{i}", max_tokens=200),), "ingress")) for i in range(3)
    ]
    assert replica._start_estimate is not None
    while replica._start_estimate.wait_s(0) <= 0.01:
        assert not all(call.done() for call in running), "they ended before anyone would have had to wait"
        await asyncio.sleep(0.001)
    end = await replica.generate((sequence("late", max_tokens=1),), "ingress")
    assert isinstance(end.error, QueueFull)
    assert "would start in" in str(end.error)
    assert end.error.retry_after_s > 0
    refused = replica._core.registry.get_sample_value("manta_requests_refused_total", {"reason": "queue_wait"})
    assert refused == 1
    resumed = await replica.generate((sequence("resumed", max_tokens=9, delivered=5),), "ingress")
    assert resumed.error is None, "its client has a part of the answer already"
    assert [(await call).error for call in running] == [None] * 3
    assert (await replica.generate((sequence("later", max_tokens=1),), "ingress")).error is None
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await stream.aclose()
