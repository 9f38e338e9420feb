"""The script for a GPU machine, proven without one: tests.gpu.run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import run
from tests.gpu.floors import decode_bytes, decode_flops, prefill_flops
from tests.gpu.models import LLAMA_1B, LLAMA_8B, QWEN3_600M
from tests.gpu.part import PARTS, checks_of
from tests.gpu.report import CheckResult, Row, RowFile, attempt, line_of, table_of
from tests.gpu.workload import Work

ROOT = Path(__file__).parents[1]


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.run", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu_and_ends_well(tmp_path: Path) -> None:
    done = script("--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert "no CUDA device" in done.stdout


def test_a_cpu_without_the_interpreter_is_refused_in_one_line() -> None:
    done = script("--device", "cpu", "--tiny", TRITON_INTERPRET="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --device cpu interprets the Triton kernels: set TRITON_INTERPRET=1\n"


def test_help_names_the_parts() -> None:
    done = script("--help")
    assert all(re.search(rf"^  {part} +\w", done.stdout, re.MULTILINE) for part in PARTS), done.stdout


def test_refuses_an_unknown_part() -> None:
    done = script("--only", "kernels,colours")
    assert done.returncode == 2
    assert "colours is none of" in done.stderr


@pytest.mark.parametrize("part", ["kernels", "engine"])
def test_tiny_mode_runs_every_check(part: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--device", "cpu", "--tiny", "--only", part, "--json", str(out))
    done = script(*arguments, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["passed"] is True
    assert found["machine"]["device"] == "CPU"
    checks = found["parts"][part]
    assert [check["name"] for check in checks] == list(checks_of(part))
    left_out = [check for check in checks if check["status"] == "left out"]
    assert all(check["status"] == "passed" for check in checks if check not in left_out)
    assert [check["name"] for check in left_out] == (["attention bfloat16"] if part == "kernels" else [])
    assert all("cannot multiply bfloat16" in row["note"] for check in left_out for row in check["rows"])
    assert all(check["rows"] for check in checks)
    assert f"all passed{', 1 left out,' if left_out else ''} in " in done.stdout


# ---- what a run makes of processes that die ----


def played(monkeypatch: pytest.MonkeyPatch, act: Callable[[RowFile], int]) -> None:
    """Plays a part's process: the act writes to the rows and gives the exit status."""

    def start(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, act(RowFile(Path(command[command.index("--rows") + 1]))))

    monkeypatch.setattr(subprocess, "run", start)


def run_three(folder: Path, seconds: float = 60.0) -> list[CheckResult]:
    end = time.monotonic() + seconds
    return list(run.run_checks("kernels", ["first", "second", "third"], "cpu", True, folder, end).values())


def get_into_second(rows: RowFile) -> int:
    rows.begin("first")
    rows.add("first", Row("a", True))
    rows.end("first", 1.5)
    rows.begin("second")
    rows.add("second", Row("b", True))
    return -11


def test_a_crash_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played(monkeypatch, get_into_second)
    first, second, third = run_three(tmp_path)
    assert first == CheckResult("first", "passed", 1.5, [Row("a", True)])
    assert second == CheckResult("second", "crashed", 0.0, [Row("b", True)])
    assert third == CheckResult("third", "not run")


def test_time_that_is_up_is_told_from_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def act(rows: RowFile) -> int:
        get_into_second(rows)
        raise subprocess.TimeoutExpired("part", 1.0)

    played(monkeypatch, act)
    assert [check.status for check in run_three(tmp_path)] == ["passed", "out of time", "not run"]


def test_nothing_starts_when_no_time_is_left(tmp_path: Path) -> None:
    assert [check.status for check in run_three(tmp_path, seconds=-1.0)] == ["not run"] * 3


def test_a_wrong_row_fails_its_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def act(rows: RowFile) -> int:
        rows.begin("first")
        for row in (Row("a", True), Row("b", False), Row("c")):
            rows.add("first", row)
        rows.end("first", 1.0)
        return 0

    played(monkeypatch, act)
    assert run_three(tmp_path)[0].status == "failed"


@pytest.mark.parametrize(
    ("device", "reason"), [("cuda", "compute capability 8.9"), ("cpu", "cannot multiply bfloat16")]
)
def test_a_check_that_compared_nothing_was_left_out(
    device: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def act(rows: RowFile) -> int:
        rows.begin("only")
        rows.end("only", 1.0)
        return 0

    played(monkeypatch, act)
    found = run.run_parts({"kernels": ["only"]}, device, True, tmp_path, workers=1)
    assert found["kernels"]["only"].status == "left out"
    assert reason in table_of(found)
    assert run.passed(found)


@pytest.mark.parametrize(("device", "groups"), [("cuda", [["a"], ["b"], ["c"]]), ("cpu", [["a", "b"], ["c"]])])
def test_on_a_gpu_each_check_has_a_process(
    device: str, groups: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(json.loads(command[command.index("--checks") + 1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", start)
    found = run.run_parts({"engine": ["a", "b"], "kernels": ["c"]}, device, True, tmp_path, workers=2)
    assert sorted(started) == groups
    assert {part: list(checks) for part, checks in found.items()} == {"engine": ["a", "b"], "kernels": ["c"]}


def test_an_error_becomes_a_row() -> None:
    def look(count: int) -> Any:
        yield Row("fine", True)
        raise ValueError(f"{count} is odd")

    fine, wrong = attempt("odd", look, 3)
    assert fine.ok
    assert wrong.ok is False
    assert "ValueError: 3 is odd" in wrong.note


def test_the_table_names_what_is_wrong(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows")
    for name, row in {
        "norms": Row("rms_norm", False, {"error": 0.5}, note="3 are NaN"),
        "speed": Row("copy", values={"GB/s": 4300.0}, aim="share >= 80%", aim_met=False),
    }.items():
        rows.begin(name)
        rows.add(name, row)
        rows.end(name, 2.0)
    table = table_of({"kernels": rows.read(["norms", "speed"])})
    assert "FAILED rms_norm" in table
    assert "3 are NaN" in table
    assert "4,300.000" in table
    assert "NOT MET" in table
    assert "FAILED" not in line_of(Row("copy"))


def test_a_part_that_cannot_be_imported_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def checks(part: str) -> dict[str, Any]:
        if part == "kernels":
            raise ImportError("no such module")
        return {"paths": None}

    def act(rows: RowFile) -> int:
        rows.begin("paths")
        rows.add("paths", Row("a", True))
        rows.end("paths", 1.0)
        return 0

    monkeypatch.setattr(run, "checks_of", checks)
    played(monkeypatch, act)
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["run", "--device", "cpu", "--tiny", "--only", "kernels,engine", "--json", str(out)]
    )
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 1
    found = json.loads(out.read_text())["parts"]
    assert found["engine"][0]["status"] == "passed"
    assert found["kernels"][0]["status"] == "failed"
    assert "no such module" in capsys.readouterr().out


# ---- arithmetic ----


def test_shapes_have_the_models_parameters() -> None:
    """As published: 8.03 billion, 1.24 billion, 0.596 billion; norms are less than a thousandth."""
    assert LLAMA_8B.layer_parameters + 2 * LLAMA_8B.head_parameters == pytest.approx(8.03e9, rel=2e-3)
    assert LLAMA_1B.layer_parameters + LLAMA_1B.head_parameters == pytest.approx(1.236e9, rel=2e-3)
    assert QWEN3_600M.layer_parameters + QWEN3_600M.head_parameters == pytest.approx(0.596e9, rel=2e-3)


def test_floors_count_what_a_step_must_do() -> None:
    weights = 2 * (LLAMA_8B.layer_parameters + LLAMA_8B.head_parameters)
    assert decode_bytes(LLAMA_8B, 1, 0) == weights
    # 128 KiB of keys and values a token.
    assert decode_bytes(LLAMA_8B, 3, 100) - weights == 3 * 100 * 131_072
    assert decode_flops(LLAMA_8B, 5) == 5 * weights
    # One token sees itself alone: 4 operations for each entry of its queries' heads in each layer.
    assert prefill_flops(LLAMA_8B, 1) == weights + 4 * 32 * 4096
    assert prefill_flops(LLAMA_8B, 2) - prefill_flops(LLAMA_8B, 1) == 2 * LLAMA_8B.layer_parameters + 2 * 4 * 32 * 4096


def test_the_workload_is_the_same_every_time() -> None:
    work = Work.draw(256, 100, 1024, 10_000)
    assert work == Work.draw(256, 100, 1024, 10_000)
    assert {len(work.prompts), len(work.lengths)} == {256}
    assert all(100 <= len(prompt) <= 1024 for prompt in work.prompts)
    assert 100 <= min(work.lengths) < 150 < 950 < max(work.lengths) <= 1024
