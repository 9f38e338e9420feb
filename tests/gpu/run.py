"""Everything that needs a GPU, in one command: python -m tests.gpu.run --json OUT.json [--only kernels,engine,figures]

The parts:
  kernels   compares every Triton kernel with float64, and the sampler with the CPU's
  engine    compares the whole engine with transformers, and its paths with each other
  figures   measures the engine against what the machine can do

Without a GPU it says so and ends well. `--device cpu --tiny` under TRITON_INTERPRET=1 proves the script itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu.part import PARTS, checks_of
from tests.gpu.report import CheckResult, Row, RowFile, failure, table_of

Results = dict[str, dict[str, CheckResult]]
"""Of each part's checks, by name."""

SECONDS = {"kernels": 180.0, "engine": 180.0, "figures": 270.0}
"""Each part's budget. Kernels and engine share the GPU, which they hardly use; figures have it for themselves."""

SIDE_BY_SIDE = 6
"""Processes that look for errors at the same time, most of which is spent in Triton's compiler."""

LEFT_OUT = {
    "cuda": "FP8 needs a GPU of compute capability 8.9 or newer",
    "cpu": "Triton's interpreter cannot multiply bfloat16",
}
"""Why a check has nothing to compare on a device: the one thing that some checks need and may not find there."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where everything that was found goes")
    parser.add_argument(
        "--only", default=",".join(PARTS), help="parts to run, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cuda is the GPU at hand (default); cpu, with --tiny and TRITON_INTERPRET=1, runs the script without one",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="smallest sizes and fewest cases, as a CPU can take them; for --device cpu"
    )
    options = parser.parse_args()
    chosen = [part for part in PARTS if part in options.only.split(",")]
    if unknown := set(options.only.split(",")) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if (options.device == "cpu") != options.tiny:
        parser.error("--device cpu and --tiny go together: the full sizes are for a GPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here: nothing to check.")
        return

    if options.device == "cpu" and not _interprets():
        print("error: --device cpu interprets the Triton kernels: set TRITON_INTERPRET=1", file=sys.stderr)
        sys.exit(2)

    started = time.monotonic()
    parts: Results = {}
    with tempfile.TemporaryDirectory(prefix="manta-gpu-") as folder:
        side_by_side = SIDE_BY_SIDE if options.device == "cuda" else 1
        for together, workers in ((("engine", "kernels"), side_by_side), (("figures",), 1)):
            names: dict[str, list[str]] = {}
            for part in together:
                if part in chosen:
                    try:
                        names[part] = list(checks_of(part))
                    except Exception as error:  # of an import: the other parts may do without it
                        parts[part] = {part: CheckResult(part, "failed", rows=[failure(part, error)])}
            parts |= run_parts(names, options.device, options.tiny, Path(folder), workers)
            if options.json:  # also before the figures: whoever ends this early keeps what there is
                found = described(parts, options.device, options.tiny, time.monotonic() - started)
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table_of(parts))
    seconds = time.monotonic() - started
    verdict = "all passed" if passed(parts) else "NOT ALL PASSED"
    if count := sum(check.status == "left out" for checks in parts.values() for check in checks.values()):
        verdict += f", {count} left out,"
    print(f"\n{verdict} in {seconds:.0f} s on {machine(options.device)['device']}")
    sys.exit(0 if passed(parts) else 1)


def _interprets() -> bool:
    import triton  # only here: a machine without it may still be told that it has no GPU

    return bool(triton.knobs.runtime.interpret)


def passed(parts: Results) -> bool:
    return all(check.status in ("passed", "left out") for checks in parts.values() for check in checks.values())


def described(parts: Results, device: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """All of a run, for JSON."""
    return {
        "machine": machine(device),
        "tiny": tiny,
        "seconds": round(seconds, 1),
        "passed": passed(parts),
        "parts": {part: [asdict(check) for check in checks.values()] for part, checks in parts.items()},
    }


def run_parts(names: dict[str, list[str]], device: str, tiny: bool, folder: Path, workers: int) -> Results:
    """The results of some parts' checks, as many processes at a time as there are workers.

    On a GPU each check has a process of its own. A CPU, where nothing faults and starting takes longest, has one for
    each part.
    """
    ends = {part: time.monotonic() + SECONDS[part] for part in names}
    parts: Results = {part: {} for part in names}
    with ThreadPoolExecutor(workers) as pool:
        jobs = [
            (part, pool.submit(run_checks, part, group, device, tiny, folder, ends[part]))
            for part, checks in names.items()
            for group in ([[name] for name in checks] if device == "cuda" else [checks])
        ]
    for part, job in jobs:
        parts[part].update({name: _without_rows(check, device) for name, check in job.result().items()})
    return parts


def _without_rows(check: CheckResult, device: str) -> CheckResult:
    """A check that came to its end and compared nothing did not pass: it was left out."""
    if check.status != "passed" or check.rows:
        return check
    return replace(check, status="left out", rows=[Row(check.name, note=f"left out: {LEFT_OUT[device]}")])


def run_checks(
    part: str, names: list[str], device: str, tiny: bool, folder: Path, end: float
) -> dict[str, CheckResult]:
    """Runs checks in a process, which is ended when time.monotonic() passes `end`."""
    rows = RowFile(folder / f"{part} {names[0]}.rows")
    left = end - time.monotonic()
    if left <= 0:
        return rows.read(names)
    command = [sys.executable, "-m", "tests.gpu.part", part, "--checks", json.dumps(names), "--seconds", str(left)]
    command += ["--device", device, "--folder", str(folder), "--rows", str(rows.path), *(["--tiny"] if tiny else [])]
    try:
        subprocess.run(command, timeout=left, check=False, env=os.environ | {"TQDM_DISABLE": "1"})
    except subprocess.TimeoutExpired:
        return rows.read(names, stopped=True)
    return rows.read(names)


def machine(device: str) -> dict[str, str]:
    """What the results were found on."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers", "numpy")}
    if device != "cuda":
        return {"device": "CPU", "python": platform.python_version(), **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **versions,
    }


if __name__ == "__main__":
    main()
