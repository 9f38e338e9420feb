"""The engine under asyncio: streams, aborts, failures, shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, AsyncEngine, EngineDeadError, EngineRequest, InvalidParameter, SamplingParams
from engine.outputs import EngineOutput, SchedulerOutput
from engine.protocols import StepHandle
from engine.request import FinishReason

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
async def engine(request: pytest.FixtureRequest, tiny_folder: Path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        str(tiny_folder),
        load_format="dummy",
        dtype="float32",
        num_kv_blocks=256,
        async_scheduling=request.param,
        debug_integrity=True,
    )
    yield engine
    await engine.shutdown()


async def collect(engine: AsyncEngine, prompt: str, params: SamplingParams, **kwargs: Any) -> tuple[str, list[int]]:
    text, token_ids = "", []
    async for delta in engine.generate(prompt, params, **kwargs):
        text += delta.outputs[0].text
        token_ids += delta.outputs[0].token_ids
    return text, token_ids


async def reader(engine: AsyncEngine) -> tuple[asyncio.Task[None], list[str | None]]:
    """A task that reads a long output and has its first token, and the finish reasons that it has seen."""
    began, reasons = asyncio.Event(), []

    async def read() -> None:
        async for delta in engine.generate("Hello", LONG):
            reasons.append(delta.outputs[0].finish_reason)
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    return task, reasons


async def until_idle(engine: AsyncEngine) -> None:
    """Waits until no request is left, then checks that every block is back."""
    for _ in range(500):
        load = engine.core.load()
        if load.running == load.waiting == 0:
            break
        await asyncio.sleep(0.01)
    assert engine.core.load().kv_blocks_used == 0
    await engine.core.check_integrity()


async def test_streamed_deltas_add_up_to_the_offline_output(engine: AsyncEngine, tiny_folder: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=30, ignore_eos=True)
    text, token_ids = await collect(engine, "The wind", params)
    with LLM(str(tiny_folder), load_format="dummy", dtype="float32", num_kv_blocks=64) as llm:
        offline = llm.generate(["The wind"], params, use_tqdm=False)[0].outputs[0]
    assert (text, token_ids) == (offline.text, offline.token_ids)


async def test_concurrent_streams_give_what_each_gives_alone(engine: AsyncEngine) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=seed, max_tokens=10, ignore_eos=True)

    prompts = [f"Story number {index}" for index in range(16)]
    together = await asyncio.gather(*(collect(engine, prompt, params(i)) for i, prompt in enumerate(prompts)))
    for index, prompt in enumerate(prompts):
        assert await collect(engine, prompt, params(index)) == together[index]


async def test_abort_ends_the_stream_and_frees_its_blocks(engine: AsyncEngine) -> None:
    reasons = []
    async for delta in engine.generate("Hello", LONG, request_id="mine"):
        engine.abort("mine")
        reasons.append(delta.outputs[0].finish_reason)
    assert reasons[-1] == "abort"
    await until_idle(engine)


async def test_closing_a_stream_aborts_its_request(engine: AsyncEngine) -> None:
    stream = engine.generate("Hello", LONG)
    await anext(stream)
    assert engine.core.load().running == 1
    await stream.aclose()  # type: ignore[attr-defined]
    await until_idle(engine)


async def test_cancelling_a_reader_aborts_its_request(engine: AsyncEngine) -> None:
    task, _ = await reader(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(engine)


async def test_refused_requests_raise_at_once_and_cost_nothing(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidParameter, match="prompt has"):
        engine.generate({"prompt_token_ids": [1] * 513})
    stream = engine.generate("Hello", LONG, request_id="same")
    await anext(stream)
    with pytest.raises(InvalidParameter, match="in use"):
        engine.generate("Hello", LONG, request_id="same")
    await stream.aclose()  # type: ignore[attr-defined]
    await until_idle(engine)


async def test_a_second_stream_of_an_id_does_not_disturb_the_first(engine: AsyncEngine) -> None:
    first = engine.generate("Hello", LONG, request_id="same")
    second = engine.generate("Hello", LONG, request_id="same")
    await anext(first)
    with pytest.raises(InvalidParameter, match="in use"):
        await anext(second)
    await first.aclose()  # type: ignore[attr-defined]
    await until_idle(engine)


async def test_the_core_refuses_what_it_cannot_run(engine: AsyncEngine) -> None:
    request = EngineRequest(request_id="long", prompt_token_ids=(1,) * 512, params=LONG, seed=0)
    with pytest.raises(InvalidParameter, match="context is 512"):
        engine.core.submit(request, lambda output: None)
    for prompt in ((1, 49152), (-1, 2), (1, 2**40)):
        request = EngineRequest(request_id="alien", prompt_token_ids=prompt, params=LONG, seed=0)
        with pytest.raises(InvalidParameter, match=r"token ids beyond the model's, which are 0 to 49,151"):
            engine.core.submit(request, lambda output: None)


class FailsOnce:
    """An executor whose next step raises, as one that ran out of memory would; all others are the real one's."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.armed = True

    def submit(self, work: SchedulerOutput) -> StepHandle:
        if self.armed:
            self.armed = False
            raise MemoryError("no memory for this step")
        return self._real.submit(work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def test_a_step_that_fails_once_costs_no_request_its_tokens(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    before = await collect(engine, "A prompt of more than one block, " * 8, params)
    core = engine.core._core
    core._executor = FailsOnce(core._executor)
    assert await collect(engine, "A prompt of more than one block, " * 8, params) == before
    assert not core._executor.armed
    await until_idle(engine)


async def test_an_engine_that_keeps_failing_says_so_and_ends_its_streams(engine: AsyncEngine) -> None:
    core = engine.core._core

    class Broken(FailsOnce):
        def submit(self, work: SchedulerOutput) -> StepHandle:
            raise RuntimeError("the device is gone")

    core._executor = Broken(core._executor)
    deltas = [delta async for delta in engine.generate("Hello", LONG)]
    assert [delta.error for delta in deltas] == ["the engine ended: RuntimeError('the device is gone')"]
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.core.check_health()
    with pytest.raises(EngineDeadError):
        engine.generate("Hello", LONG)


async def test_shutdown_drains_then_aborts(tiny_folder: Path) -> None:
    engine = AsyncEngine(str(tiny_folder), load_format="dummy", dtype="float32", num_kv_blocks=256)
    short = asyncio.create_task(collect(engine, "Hello", SamplingParams(max_tokens=5, ignore_eos=True, seed=1)))
    await asyncio.sleep(0.05)
    await engine.shutdown(drain_timeout=30)
    assert len((await short)[1]) == 5
    with pytest.raises(EngineDeadError):
        await collect(engine, "Hello", LONG)


async def test_shutdown_without_drain_ends_streams_with_abort(tiny_folder: Path) -> None:
    engine = AsyncEngine(str(tiny_folder), load_format="dummy", dtype="float32", num_kv_blocks=256)
    task, reasons = await reader(engine)
    await engine.shutdown()
    await asyncio.wait_for(task, 10)
    assert reasons[-1] == FinishReason.ABORT


async def test_a_question_that_the_engine_ends_before_answering_raises(engine: AsyncEngine) -> None:
    def crash() -> None:
        time.sleep(0.2)
        raise RuntimeError("the thread is gone")

    engine.core._commands.put(crash)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(engine.core.kv_snapshot(), 10)


async def test_a_question_that_comes_after_the_shutdown_raises(engine: AsyncEngine) -> None:
    engine.core._commands.put(lambda: time.sleep(0.2))
    ending = asyncio.create_task(engine.shutdown())
    await asyncio.sleep(0.05)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(engine.core.kv_snapshot(), 10)
    await ending


async def test_each_step_wakes_the_loop_once(engine: AsyncEngine) -> None:
    seen: list[int] = []
    engine.core.add_step_listener(lambda step: seen.append(len(step.outputs)))
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, n=4)
    await collect(engine, "Hello", params)
    assert max(seen) == 4
    assert len(seen) <= 14


async def test_a_receiver_that_raises_keeps_no_news_from_the_others(engine: AsyncEngine) -> None:
    def broken(output: EngineOutput) -> None:
        raise RuntimeError("a bug of the caller")

    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.core.submit(EngineRequest(request_id="bad", prompt_token_ids=(1, 2), params=params, seed=0), broken)
    assert len((await collect(engine, "Hello", params))[1]) == 5
    await until_idle(engine)


def test_an_engine_stays_with_its_first_loop(tiny_folder: Path) -> None:
    engine = AsyncEngine(str(tiny_folder), load_format="dummy", dtype="float32", num_kv_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    asyncio.run(collect(engine, "Hello", params))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(collect(engine, "Hello", params))
    asyncio.run(engine.shutdown())
