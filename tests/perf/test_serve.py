"""The service over HTTP: what becomes of the figures. Nothing is started here."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest
from rich.console import Console

from tests.perf.serve import __main__ as serve
from tests.perf.serve.processor_time import between, times


def figures(speed: float, ttft_ms: float, **cpu: float) -> dict[str, Any]:
    return {"output_tok_s": speed, "ttft_ms": ttft_ms, "events_per_token": 0.5, "cpu_us_per_token": cpu}


def engine(speed: float, ttft_ms: float) -> dict[str, Any]:
    return {"output_tok_s": speed, "ttft_ms": ttft_ms, "cpu_us_per_token": 1500.0}


def test_ratios_are_of_medians() -> None:
    result = serve.summarise(
        {
            "engine": [engine(speed, 40.0) for speed in (900.0, 1000.0, 2000.0)],
            "manta": [
                figures(speed, ttft, proxy=100.0) for speed, ttft in ((10.0, 45.0), (800.0, 47.0), (900.0, 99.0))
            ],
            "vllm": [figures(400.0, 60.0)],
        }
    )
    assert result["manta"]["of_engine"] == 0.8
    assert result["manta"]["of_vllm"] == 2.0
    assert result["manta"]["ttft_over_engine_ms"] == 7.0
    assert result["engine"]["cpu_us_per_token"] == {"engine": 1500.0}
    assert result["manta"]["cpu_us_per_token"] == {"proxy": 100.0}


@pytest.mark.parametrize("failure", [RuntimeError("it did not start"), psutil.NoSuchProcess(1), TimeoutError()])
def test_peer_that_fails_is_left_out_and_manta_may_not(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def measured(name: str, seed: int, console: Console) -> dict[str, Any]:
        if name in failing:
            raise failure
        return engine(1000.0, 40.0) if name == "engine" else figures(800.0, 45.0)

    monkeypatch.setattr(serve, "measured", measured)
    failing = {"vllm"}
    turns = serve.take_turns(["engine", "manta", "vllm"], 2, Console(quiet=True))
    assert {name: len(each) for name, each in turns.items()} == {"engine": 2, "manta": 2}
    failing = {"manta"}
    with pytest.raises(type(failure)):
        serve.take_turns(["engine", "manta"], 1, Console(quiet=True))


def test_processor_time_is_told_by_part_and_of_descendants_alone() -> None:
    busy = "x = 0\nfor _ in range(3_000_000): x += 1\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", busy, "gcs_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            before = {key: (part, 0.0) for key, (part, _) in times(process.pid).items()}
            assert process.stdout is not None
            process.stdout.readline()
            used = between(before, times(process.pid), tokens=1000)
            assert used.keys() == {"client", "GCS"}
            assert used["GCS"] > 0
        finally:
            process.kill()
