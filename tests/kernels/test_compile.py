"""`python -m kernels.compile`: on the engine's kernels, and on small ones that must and must not pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import cache_folder
from kernels.compile import VARIANTS, compile_variants, main, read_ptxas_log
from kernels.gpu.variants import CAPABILITIES
from tests.kernels.small_kernels import variants

ROOT = Path(__file__).parents[2]


def run(module: str, cache: Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs the command where Triton compiles, which in the tests' own process it does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", module, "--cache", str(cache)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def table(stdout: str) -> dict[tuple[str, str, str], list[str]]:
    """Registers, shared bytes, spilled bytes and those allowed, by kernel, variant and architecture."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in stdout.split("\n\n")[0].splitlines()[1:]]
    return {(row[0], row[1], row[2]): row[3:7] for row in rows}


def compiled_now(stdout: str) -> int:
    found = re.search(r"compilations, (\d+) of them now", stdout)
    assert found
    return int(found[1])


def test_every_kernel_compiles_fits_and_spills_no_more_than_it_declares() -> None:
    done = run("kernels.compile", cache_folder() / "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {
        (variant.kernel.__name__, variant.name, f"{capability / 10:.1f}")
        for source in VARIANTS
        for variant in source()
        for capability in CAPABILITIES
        if capability >= variant.min_capability
    }
    assert set(table(done.stdout)) == expected


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def small(cache: Path) -> subprocess.CompletedProcess[str]:
    return run("tests.kernels.small_kernels", cache)


def test_a_row_tells_registers_shared_memory_and_spills(small: subprocess.CompletedProcess[str]) -> None:
    rows = table(small.stdout)
    registers, shared, spills, allowed = rows["scaled", "bf16", "8.0"]
    assert 0 < int(registers) < 64
    assert (shared, spills, allowed) == ("0", "0", "0")
    registers, shared, spills, allowed = rows["normed", "spills", "9.0"]
    assert int(registers) == 255, "all that a thread can have"
    assert int(shared) > 0, "a sum over warps goes through shared memory"
    assert int(spills) > int(allowed) == 0
    spills, allowed = rows["normed", "spills as declared", "9.0"][2:]
    assert 0 < int(spills) <= int(allowed) == 1 << 20


def test_a_variant_is_not_compiled_below_its_capability(small: subprocess.CompletedProcess[str]) -> None:
    assert [row[2] for row in table(small.stdout) if row[:2] == ("scaled", "bf16")] == ["8.0", "9.0", "10.0"]
    assert [row[2] for row in table(small.stdout) if row[:2] == ("scaled", "fp8")] == ["9.0", "10.0"]


def test_what_does_not_fit_spills_or_compile_fails_by_name(small: subprocess.CompletedProcess[str]) -> None:
    assert small.returncode == 1
    failures = re.findall(r"\n\n(\w+ \[[^]]+\] for [\d.]+): ([\d,]+ )?([^,\n]+)", small.stdout)
    assert {name: why for name, _, why in failures} == {
        "normed [spills] for 9.0": "bytes of spilled registers",
        "normed [spills] for 10.0": "bytes of spilled registers",
        "product [7 stages] for 8.0": "bytes of shared memory",
        "mistaken [one] for 10.0": "does not compile:",
        "crashing [one] for 10.0": "does not compile:",
    }
    assert "no_such_name is not defined" in small.stdout


def test_a_second_run_compiles_only_what_failed(small: subprocess.CompletedProcess[str], cache: Path) -> None:
    again = run("tests.kernels.small_kernels", cache)
    assert compiled_now(small.stdout) == len(table(small.stdout))
    assert compiled_now(again.stdout) == 2
    assert table(again.stdout) == table(small.stdout)


CALLING = """
import sys
import triton
import triton.language as tl
from kernels.compile import main
from kernels.gpu.variants import Variant

@triton.jit
def answer():
    return {answer}

@triton.jit
def calling(x):
    tl.store(x, answer())

@triton.jit
def idle(x):
    tl.store(x, 0.0)

options = dict(constants={{}}, num_warps=1, num_stages=1, min_capability=100)
kernels = [calling, idle]
sys.exit(main(variants=[Variant(name="one", kernel=k, signature={{"x": "*fp32"}}, **options) for k in kernels]))
"""


def test_a_change_in_what_a_kernel_calls_compiles_it_again(tmp_path: Path) -> None:
    counts = []
    for answer in (42.0, 42.0, 43.0):
        (tmp_path / "changing.py").write_text(CALLING.format(answer=answer))
        counts.append(compiled_now(run("changing", tmp_path / "cache", tmp_path).stdout))
    assert counts == [2, 0, 1]


def test_the_interpreter_compiles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_variants(variants(), tmp_path, jobs=1)
    assert main(["--cache", str(tmp_path)], variants()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("error: TRITON_INTERPRET")


def test_spills_of_functions_that_are_not_inlined_count() -> None:
    log = """ptxas info    : Function properties for outer
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Function properties for inner
    0 bytes stack frame, 2 bytes spill stores, 1 bytes spill loads"""
    assert read_ptxas_log(log) == (40, 15)


def test_a_log_without_figures_is_not_taken_for_none_spilled() -> None:
    with pytest.raises(ValueError, match="no registers or spills"):
        read_ptxas_log("ptxas info    : 0 bytes gmem\n")
