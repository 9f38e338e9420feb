"""What an engine learns of its steps' times."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.profiling.bookkeeping import bookkeeping_core
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.step_times import StepTimes, pooled


def seen(*steps: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for tokens, seconds in steps:
        times = times.after(tokens, seconds)
    return times


def test_a_line_is_found_exactly() -> None:
    times = seen(*((tokens, 0.005 + 2e-5 * tokens) for tokens in (1, 2048, 40, 700)))
    assert times.fit() == pytest.approx((0.005, 2e-5))


def test_an_engine_that_did_nothing_knows_nothing() -> None:
    assert StepTimes().fit() == (0.0, 0.0)


def test_equal_steps_tell_only_what_a_step_takes() -> None:
    assert seen(*[(32, 0.01)] * 50).fit() == pytest.approx((0.01, 0.0))


@pytest.mark.parametrize("steps", [[(10, 0.1), (100, 0.01)], [(10, 0.001), (1000, 1.0)]])
def test_neither_part_is_negative(steps: list[tuple[int, float]]) -> None:
    overhead, per_token = seen(*steps).fit()
    assert overhead >= 0.0
    assert per_token >= 0.0
    assert overhead + per_token > 0.0


def test_what_one_has_not_seen_is_known_from_the_others() -> None:
    decodes = seen(*[(32, 0.005 + 32 * 2e-5)] * 100)
    prefills = seen(*[(2048, 0.005 + 2048 * 2e-5)] * 100)
    assert pooled([decodes, prefills]).fit() == pytest.approx((0.005, 2e-5))


def test_old_steps_are_forgotten() -> None:
    times = seen(*[(tokens, 1.0) for tokens in (1, 100)] * 50)
    for _ in range(2000):
        times = times.after(1, 0.01).after(100, 0.02)
    overhead, per_token = times.fit()
    assert overhead + 50 * per_token == pytest.approx(0.015, rel=0.01)


def test_the_load_has_the_steps_times_and_how_many_requests_came() -> None:
    now = [100.0]
    core = bookkeeping_core(
        EngineConfig(model="dummy", max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=64), max_model_len=256
    )
    tick(core, now)
    for name, length in (("a", 64), ("b", 32)):
        core.add_request(request(name, length))
    assert core.load().received == 2
    loads = [core.step().load for _ in range(3)]
    assert [load.step_times.steps for load in loads] == pytest.approx(
        [1, 1 + 255 / 256, 1 + 255 / 256 + (255 / 256) ** 2]
    )
    assert loads[0].step_times.tokens == 64
    assert loads[0].step_times.seconds == pytest.approx(64.0)
    assert loads[1].received == 2


def request(name: str, length: int) -> EngineRequest:
    tokens = tuple(range(length))
    return EngineRequest(request_id=name, prompt_token_ids=tokens, params=SamplingParams(max_tokens=3), seed=0)


def tick(core: EngineCore, now: list[float]) -> None:
    """A clock that only the executor moves, by a second a token."""
    submit = core._executor.submit

    def slow(work):  # type: ignore[no-untyped-def]
        now[0] += work.num_tokens
        return submit(work)

    core._executor.submit = slow  # type: ignore[method-assign]
    core._monotonic = lambda: now[0]
