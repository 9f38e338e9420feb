"""`manta bench serve` as a user runs it, against the demo service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Service


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bench_measures_the_running_service(service: Service, tmp_path: Path, endpoint: str) -> None:
    out = tmp_path / "out.json"
    manta = str(Path(sys.executable).parent / "manta")
    sizes = ["--num-prompts", "6", "--input-len", "20", "--output-len", "8", "--concurrency", "3"]
    options = ["--base-url", service.url, "--endpoint", endpoint, "--slo", "e2e:600000", "--json", str(out)]
    done = subprocess.run(
        [manta, "bench", "serve", *options, *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert (content["completed"], content["failed"], content["output_tokens"]) == (6, 0, 48)
    assert content["prompt_tokens"] >= 120
    assert content["goodput"]["percent"] == 100
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 < content[name]["p50"] <= content[name]["p90"] <= content[name]["p99"]
