"""`manta bench routing` on a cut of a real trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli.main import app

CUT = Path(__file__).parents[2] / "data" / "mooncake_cut.jsonl"
NAMES = ["round_robin", "power_of_two", "least_loaded", "session_hashing", "prefix_cache"]
FIGURES = {"hit_ratio", "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "imbalance", "prefill_utilisation", "seconds"}


def routing(*args: object, trace: Path = CUT) -> Result:
    return CliRunner().invoke(app, ["bench", "routing", "--trace", str(trace), *map(str, args)])


def report(tmp_path: Path, *args: object) -> dict[str, Any]:
    path = tmp_path / "routing.json"
    done = routing("--num-prompts", 150, "--replicas", 2, *args, "--json", path)
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_report_has_every_policy_beside_the_ideal(tmp_path: Path) -> None:
    content = report(tmp_path, "--load", 0.7, "--cache-fraction", 0.3)
    assert content["command"] == "routing"
    assert list(content["policies"]) == NAMES
    for figures in content["policies"].values():
        assert set(figures) == FIGURES
        assert 0 <= figures["hit_ratio"] < 1
        assert 0 < figures["ttft_p50"] <= figures["ttft_p90"] <= figures["ttft_p99"]
        assert 1 <= figures["imbalance"] <= 2
    assert 0 < content["ideal_hit_ratio"] < 1
    fleet = content["fleet"]
    assert (fleet["replicas"], fleet["ingresses"], fleet["max_num_batched_tokens"]) == (2, 1, 2048)
    assert fleet["prefill_tokens_per_s"] == pytest.approx(2048 / (0.005 + 2048 / 50_000))


def test_table_says_what_was_simulated() -> None:
    done = routing("--num-prompts", 60, "--replicas", 2, "--ingresses", 2, "--cache-fraction", 0.0001)
    assert done.exit_code == 0, done.output
    for text in (
        "raised to what the longest request needs",
        "max_num_seqs 256",
        "5 ms + 20 µs a token + 0.524 µs a KV block",
        "2 ingress(es), 5 ms behind",
        "the ideal hit ratio is",
        *(name.replace("_", " ") for name in NAMES),
    ):
        assert text in done.output


def test_constants_can_be_given(tmp_path: Path) -> None:
    fleet = report(tmp_path, "--step-ms", 8, "--prefill-rate", 10_000, "--bandwidth", 2)["fleet"]
    assert (fleet["step_s"], fleet["token_s"]) == pytest.approx((0.008, 1e-4))
    assert fleet["block_s"] == pytest.approx(2 * 1024**2 / 2e12)


def test_constants_can_be_fitted(tmp_path: Path) -> None:
    measured = tmp_path / "step.json"
    sizes = [(1, 128), (32, 4096), (256, 32_768), (128, 128), (2048, 10_000)]
    steps = [{"tokens": t, "keys": k, "seconds": 0.004 + 3e-4 * t + 1e-7 * k} for t, k in sizes]
    measured.write_text(json.dumps({"steps": steps}))
    fleet = report(tmp_path, "--fit", measured)["fleet"]
    assert (fleet["step_s"], fleet["token_s"], fleet["block_s"]) == pytest.approx((0.004, 3e-4, 16e-7))


def test_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    first, again, other = (report(tmp_path, "--ingresses", 2, "--seed", seed)["policies"] for seed in (1, 1, 2))
    assert first == again
    assert first["power_of_two"] != other["power_of_two"]


def test_trace_without_prefixes_has_no_hits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:{second:02}.6805900,2000,44\n" for second in range(40))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    path = tmp_path / "routing.json"
    done = routing("--replicas", 2, "--json", path, trace=trace)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    assert content["ideal_hit_ratio"] == 0
    assert {each["hit_ratio"] for each in content["policies"].values()} == {0}


def test_comparison_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "routing.svg"
    done = routing("--num-prompts", 60, "--replicas", 2, "--plot", path)
    assert done.exit_code == 0, done.output
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--load", 0), "load=0.0: must be above 0"),
        (("--load", "nan"), "load=nan: must be above 0"),
        (("--cache-fraction", -1), "cache_fraction=-1.0: must be above 0"),
        (("--step-ms", 0), "step_ms=0.0: must be above 0"),
        (("--replicas", 0), "'--replicas'"),
        (("--ingresses", 0), "'--ingresses'"),
        (("--fit", CUT), "has no steps"),
        (("--fit", CUT, "--step-ms", 5), "--step-ms and --fit cannot both say what a step takes"),
        (("--fit", CUT, "--prefill-rate", 9e4), "--prefill-rate and --fit cannot both say"),
        (("--fit", CUT, "--bandwidth", 2), "--bandwidth and --fit cannot both say"),
        (("--fit", "/nope"), "/nope: No such file"),
        (("--plot", "figure.txt"), "must end in one of"),
        (("--json", "/nope/out.json"), "/nope/out.json: No such file"),
    ],
)
def test_bad_options_are_told_in_a_line(
    args: tuple[object, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where figure.txt would be
    done = routing(*args)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert says in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("trace.jsonl", "no JSON\n", "line 1: not JSON"),
        ("trace.jsonl", '{"prompt": "Hello"}\n', "line 1: is no request of a Mooncake trace"),
        ("trace.jsonl", '{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": []}\n', "line 1: is no"),
        ("trace.jsonl", "", "has no requests"),
        ("trace.csv", "a,b\n1,2\n", "line 2: is no request of an Azure trace"),
    ],
)
def test_file_that_is_no_trace_is_refused(name: str, text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    done = routing(trace=path)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_missing_trace_is_told() -> None:
    done = routing(trace=Path("/nope"))
    assert (done.exit_code, done.stderr) == (2, "error: /nope: No such file or directory\n")
