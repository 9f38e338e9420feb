"""When an ingress's stream sends what its calls have put on it."""

import asyncio
from typing import Any

import pytest

from app.ingress_session import IngressSession, PromptCall
from engine.outputs import EngineLoad, EngineOutput
from tests.app.scripted_engine import Step, request

NO_LOAD = EngineLoad(0, 0, 0, 0, 100)


@pytest.mark.parametrize("on_trial", [False, True])
async def test_only_tokens_of_a_call_on_trial_do_not_wait_for_others(
    monkeypatch: pytest.MonkeyPatch, on_trial: bool
) -> None:
    monkeypatch.setattr("app.transport.SECONDS_PER_STREAM", 3600.0)
    session = IngressSession("s", NO_LOAD, kv_seq=0, gather_s=3600.0)
    items = session.items()
    await anext(items)
    calls = [PromptCall(session, (request(f"r{index}"),), on_trial=on_trial) for index in range(9)]
    session.calls.update(calls)
    step: Any = Step([], [], NO_LOAD)
    calls[0].take(EngineOutput("r0", (1,)))
    session.after_step(step)
    await anext(items)
    reading = asyncio.ensure_future(anext(items))
    calls[0].take(EngineOutput("r0", (2,)))
    session.after_step(step)
    for _ in range(3):
        await asyncio.sleep(0)
    assert reading.done() is on_trial
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
