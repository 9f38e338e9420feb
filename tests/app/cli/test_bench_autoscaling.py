"""`manta bench autoscaling` on a cut of a real trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli.main import app

CUT = Path(__file__).parents[2] / "data" / "mooncake_cut.jsonl"
FIGURES = {"slo_attainment", "replica_hours", "scale_events", "ttft_attainment", "tpot_attainment", "mean_replicas"}
FIGURES |= {"max_replicas", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "settings"}


def autoscaling(*args: object, trace: Path = CUT) -> Result:
    return CliRunner().invoke(app, ["bench", "autoscaling", "--trace", str(trace), *map(str, args)])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("autoscaling")
    path, plot = folder / "autoscaling.json", folder / "replicas.svg"
    result = autoscaling(
        *("--num-prompts", 40, "--mean-replicas", 1, "--startup-s", 5, "--processes", 1, "--json", path, "--plot", plot)
    )
    assert result.exit_code == 0, result.output
    return result.output, json.loads(path.read_text()), plot


def test_report_has_the_three_policies(done: tuple[str, dict[str, Any], Path]) -> None:
    _, content, _ = done
    assert content["command"] == "autoscaling"
    assert list(content["policies"]) == ["manta", "ray_default", "fixed"]
    for figures in content["policies"].values():
        assert set(figures) == FIGURES
        assert 0 <= figures["slo_attainment"] <= min(figures["ttft_attainment"], figures["tpot_attainment"]) <= 1
        assert figures["replica_hours"] > 0
        assert 0 < figures["mean_replicas"] <= figures["max_replicas"] <= content["fleet"]["max_replicas"]
    manta, ray = (content["policies"][name]["replica_hours"] for name in ("manta", "ray_default"))
    assert content["saving"] == pytest.approx(1 - manta / ray)
    assert content["policies"]["fixed"]["scale_events"] == 0


def test_rays_best_is_of_the_settings_that_were_tried(done: tuple[str, dict[str, Any], Path]) -> None:
    _, content, _ = done
    sweep, best = content["ray_default_sweep"], content["policies"]["ray_default"]
    assert len(sweep) >= 20
    assert len({tuple(each["settings"].values()) for each in sweep}) == len(sweep)
    most = max(each["slo_attainment"] for each in sweep)
    as_good = [each for each in sweep if each["slo_attainment"] >= most - 0.001]
    assert best in as_good
    assert best["replica_hours"] == min(each["replica_hours"] for each in as_good)
    manta, cheapest = content["policies"]["manta"], content["ray_default_as_good"]
    reaching = [each for each in sweep if each["slo_attainment"] >= manta["slo_attainment"]]
    assert cheapest == min(reaching, key=lambda each: each["replica_hours"], default=None)
    fixed = content["policies"]["fixed"]
    assert fixed["slo_attainment"] >= best["slo_attainment"]
    smaller = [each for each in content["fixed_sweep"] if each["replica_hours"] < fixed["replica_hours"]]
    assert all(each["slo_attainment"] < best["slo_attainment"] for each in smaller)


def test_timelines_are_in_the_seconds_of_the_trace(done: tuple[str, dict[str, Any], Path]) -> None:
    _, content, _ = done
    lines = [json.loads(line) for line in CUT.read_text().splitlines()[:40]]
    seconds = (lines[-1]["timestamp"] - lines[0]["timestamp"]) / 1000
    for rows in content["timelines"].values():
        assert [row[0] for row in rows[:3]] == [0, 10, 20]
        assert seconds <= rows[-1][0] + 10 <= 2 * seconds + 300


def test_table_says_what_was_simulated(done: tuple[str, dict[str, Any], Path]) -> None:
    output, _, plot = done
    for text in (
        "40 requests, ",
        "divided by 32",
        "class h200: a step takes 5 ms + 20 µs a token + 32.8 ns a token read",
        "1 at first, 1 to 4, 5 s to start one",
        "first token within 5 s, 50 ms per output token",
        "replica-hours than Ray's best, for ",
        "target_ongoing_requests",
    ):
        assert text in output
    assert plot.stat().st_size > 1_000


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--mean-replicas", 0), "mean_replicas=0.0: must be above 0"),
        (("--mean-replicas", 1e6), "mean_replicas=1000000.0: must be at most 1,000"),
        (
            ("--mean-replicas", 1e-6),
            "mean_replicas=1e-06: so many are busy with less than one of the trace's 988 requests",
        ),
        (("--ttft-target", -1), "ttft_target=-1.0: must be above 0"),
        (("--tpot-target", "nan"), "tpot_target=nan: must be above 0"),
        (("--replica", "h100"), "replica='h100': must be h200 or l40s"),
        (("--num-prompts", 1), "trace: its requests all come at one moment"),
        (("--plot", "replicas.txt"), "plot"),
    ],
)
def test_bad_options_are_told_in_one_line(args: tuple[object, ...], told: str) -> None:
    result = autoscaling(*args)
    assert result.exit_code == 2
    assert told in result.output
    assert result.output.count("\n") == 1


def test_what_is_no_trace_is_told_in_one_line(tmp_path: Path) -> None:
    broken, sparse = tmp_path / "broken.jsonl", tmp_path / "sparse.jsonl"
    broken.write_text('{"timestamp": 0}\n')
    request = '{"timestamp": %d, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]}\n'
    sparse.write_text(request % 0 + request % (86_400_000 * 365))
    for trace, told in (
        (broken, "is no request of a Mooncake trace: input_length: Field required"),
        (sparse, "requests to keep so many busy over all of the trace's time; at most 1,000,000 are replayed"),
        (tmp_path / "none.jsonl", "No such file"),
    ):
        result = autoscaling(trace=trace)
        assert result.exit_code == 2
        assert told in result.output
        assert result.output.count("\n") == 1


@pytest.mark.parametrize("to_group", [True, False])
def test_ctrl_c_ends_it_and_its_workers(to_group: bool) -> None:
    """A terminal sends Ctrl-C to all of a process group; whoever ends a job, often to its first process alone."""
    args = ["bench", "autoscaling", "--trace", str(CUT), "--processes", "2"]
    bench = subprocess.Popen(
        [sys.executable, "-u", "-c", "from app.cli.main import app; app()", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert bench.stdout is not None
        assert "988 requests" in bench.stdout.readline()
        while len(Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()) < 2:
            assert bench.poll() is None
        (os.killpg if to_group else os.kill)(bench.pid, signal.SIGINT)
        _, errors = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert bench.returncode == 130, errors
    assert errors == ""
