from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.bench.offline import Round
from app.cli.bench.plot import plot_growth
from engine import LLM, CompletionOutput, RequestOutput, StepRecord
from tests.perf.growth import Work, measure, panel, speed_of


def step(seconds: float, requests: int, tokens: int) -> StepRecord:
    return StepRecord(0.0, seconds, {}, requests, tokens, requests, 0, 0)


def output(prompt: int, tokens: int) -> RequestOutput:
    return RequestOutput("", None, [7] * prompt, [CompletionOutput(0, token_ids=[7] * tokens)])


def test_decoding_counts_only_where_all_requests_decode() -> None:
    outputs = [output(10, 4), output(10, 3)]
    steps = [step(2.0, 1, 10), step(3.0, 2, 11), *[step(each, 2, 2) for each in (0.5, 0.5, 9.0)], step(7.0, 1, 1)]
    speed = speed_of(Round(70.0, outputs, steps), 2)
    assert speed.prefill == 20 / 5.0
    assert speed.decode == 2 / 0.5
    assert speed.end_to_end == 7 / 70.0


def test_all_work_has_its_speeds(tiny_folder: Path) -> None:
    works = [Work(1, 20, 4), Work(3, 40, 4)]
    with LLM(str(tiny_folder), load_format="dummy", num_threads=1, kv_cache_memory_bytes=4_000_000) as llm:
        speeds = measure(llm, works, 2)
    assert list(speeds) == works
    assert all(value > 0 for speed in speeds.values() for value in speed)


def test_growth_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = [{"size": 1, "one_line": 5.0}, {"size": 2, "one_line": 9.0}]
    plot_growth(tmp_path / "figure.svg", "Growth", [panel("a size", figures, ["one_line"])])
    assert "one line" in (tmp_path / "figure.svg").read_text()
