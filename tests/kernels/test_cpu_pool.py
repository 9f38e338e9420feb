"""The threads of the CPU kernels: how they begin and end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.config import cache_folder
from kernels.cpu.build import build, supported_levels

# A plan whose threads have something to do.
START = """
import os, resource, sys, threading, torch
from pathlib import Path
from kernels.cpu.library import Batch, CpuKernels, Kind, Operation, array_of

kernels = CpuKernels(Path(sys.argv[1]), 3)
rows, weight = torch.ones(64, 512), torch.ones(512)
plan = array_of([Operation(kind=Kind.RMS_NORM, input=rows.data_ptr(), output=rows.data_ptr(), weight=weight.data_ptr(),
                           in_features=512, out_features=512, eps=1e-6)] * 8)
run = lambda: kernels.run(torch.float32, plan, Batch(tokens=64))
run()
"""

ENDS = {
    "while a thread computes": """
def forever():
    while True:
        run()
threading.Thread(target=forever, daemon=True).start()
""",
    "in a forked process": """
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "after others were given back": """
del kernels
kernels = CpuKernels(Path(sys.argv[1]), 2)
run()
""",
}


def python(code: str) -> subprocess.CompletedProcess[str]:
    library = str(build(supported_levels()[0], cache_folder() / "kernels"))
    command = [sys.executable, "-c", START + code, library]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_without_ado(end: str) -> None:
    for _ in range(3):
        done = python(ENDS[end])
        assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_the_system_does_not_give_are_an_error() -> None:
    done = python("""
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    CpuKernels(Path(sys.argv[1]), 5_000)
except OSError as error:
    print(error)
run()
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the system does not give 5,000 threads\n"
