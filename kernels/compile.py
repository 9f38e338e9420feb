"""Compiles every GPU kernel for every architecture, on a machine without a GPU: `python -m kernels.compile`.

Prints what each compiled kernel takes of a multiprocessor, and fails where one does not compile, does not fit or spills
more bytes of registers than its variant declares (the column `allowed`). Results are kept, so that only what changed is
compiled again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import triton_key

from kernels.gpu import activation, attention, embedding, kv_write, logits, logprobs, norm, sampling, step_input
from kernels.gpu.variants import CAPABILITIES, Variant

VARIANTS: tuple[Callable[[], Iterator[Variant]], ...] = (
    activation.variants,
    attention.variants,
    embedding.variants,
    kv_write.variants,
    logits.variants,
    logprobs.variants,
    norm.variants,
    sampling.variants,
    step_input.variants,
)
"""`variants` of every module with kernels."""

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one thread block can have, by compute capability.

Source: CUDA C++ Programming Guide, technical specifications per compute capability.
"""
TENSOR_COLUMNS = 512
"""Of tensor memory, which only compute capability 10.0 has."""

INTERPRETED = "TRITON_INTERPRET is set, with which Triton compiles nothing: unset it"

CACHE = Path.home() / ".cache" / "manta" / "kernels"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel takes.

    Attributes:
        registers: per thread.
        shared_bytes: of shared memory per thread block.
        tensor_columns: of tensor memory per thread block.
        spill_bytes: spill stores and loads in its code, per thread.
        seconds: that its compilation took.
    """

    registers: int
    shared_bytes: int
    tensor_columns: int
    spill_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Compilation:
    """One variant for one architecture, and what came of it: its usage, or the compiler's words.

    `cached` tells that it was compiled before.
    """

    variant: Variant
    capability: int
    cached: bool
    usage: Usage | None
    error: str = ""

    @property
    def problem(self) -> str | None:
        """Why this variant must not be launched on this architecture."""
        if self.usage is None:
            return f"does not compile:\n{self.error}"
        limits = {
            "bytes of shared memory": (self.usage.shared_bytes, SHARED_BYTES[self.capability]),
            "columns of tensor memory": (self.usage.tensor_columns, TENSOR_COLUMNS),
            "bytes of spilled registers": (self.usage.spill_bytes, self.variant.spill_bytes),
        }
        found = [f"{used:,} {what}, {limit:,} allowed" for what, (used, limit) in limits.items() if used > limit]
        return "; ".join(found) or None

    def __str__(self) -> str:
        return f"{self.variant.kernel.__name__} [{self.variant.name}] for {_dotted(self.capability)}"


def compile_variants(variants: Iterable[Variant], cache: Path, jobs: int) -> list[Compilation]:
    """Compiles what is not in the cache folder, `jobs` at a time, and puts it there.

    Returns:
        One for each variant and each architecture from its min_capability on, in their order.

    Raises:
        RuntimeError: Triton is its interpreter (TRITON_INTERPRET), which compiles nothing.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(INTERPRETED)
    cache.mkdir(parents=True, exist_ok=True)
    todo = [(v, c) for v in variants for c in CAPABILITIES if c >= v.min_capability]
    files = [cache / f"{_key(variant, capability)}.json" for variant, capability in todo]
    missing = [index for index, file in enumerate(files) if not file.exists()]
    errors: dict[int, str] = {}
    if missing:
        triton_key()  # Reads all of Triton, and is remembered: once here, not in each child.
        progress = tqdm(_in_children(todo, files, missing, jobs), "compiling", len(missing), leave=False)
        errors = {index: error for index, error in progress if error}

    def result(index: int) -> Compilation:
        error = errors.get(index, "")
        usage = None if error else Usage(**json.loads(files[index].read_text()))
        return Compilation(*todo[index], cached=index not in compiled, usage=usage, error=error)

    compiled = set(missing)
    return [result(index) for index in range(len(todo))]


def _in_children(
    todo: Sequence[tuple[Variant, int]], files: Sequence[Path], missing: Iterable[int], jobs: int
) -> Iterator[tuple[int, str]]:
    """Compiles in a process each, forked, so that a compiler that crashes takes along nothing but its own result.

    Yields:
        Index and error of what has ended; no error where its file is there.
    """
    fork = multiprocessing.get_context("fork")
    indices = iter(missing)
    running: dict[int, tuple[Any, int, tempfile.TemporaryDirectory[str]]] = {}
    while True:
        while len(running) < jobs and (index := next(indices, None)) is not None:
            folder = tempfile.TemporaryDirectory(prefix="manta_compile_")
            arguments = (*todo[index], files[index], Path(folder.name))
            process = fork.Process(target=_compile_to_file, args=arguments, daemon=True)
            process.start()
            running[process.sentinel] = process, index, folder
        if not running:
            return
        for sentinel in set(running).intersection(wait(running)):
            process, index, folder = running.pop(sentinel)
            process.join()
            with folder:
                log = (Path(folder.name) / "log").read_text(errors="replace").strip()
            ended = f"the compiler's process ended with exit code {process.exitcode}"
            yield index, "" if process.exitcode == 0 else (log[-3000:] or ended)


def _compile_to_file(variant: Variant, capability: int, file: Path, folder: Path) -> None:
    """Compiles in this process, which is nobody else's: its output goes to the folder's log."""
    with open(folder / "log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    tempfile.tempdir = str(folder)
    triton.knobs.cache.dir = str(folder)
    triton.knobs.nvidia.dump_ptxas_log = True
    try:
        usage = _compile(variant, capability)
    except Exception as error:
        # An error in what a kernel calls is the cause of one in the kernel.
        cause: BaseException | None = error
        while cause is not None:
            print(f"{type(cause).__name__}: {cause}", file=sys.stderr)
            cause = cause.__cause__
        sys.exit(1)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(usage)))
    part.replace(file)


def _compile(variant: Variant, capability: int) -> Usage:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source_of(variant), target=_target(capability), options=compile_options(variant))
    seconds = time.perf_counter() - start
    registers, spill_bytes = read_ptxas_log(log.getvalue())
    metadata = compiled.metadata
    return Usage(registers, metadata.shared, metadata.tmem_size or 0, spill_bytes, round(seconds, 2))


def read_ptxas_log(log: str) -> tuple[int, int]:
    """Registers per thread and bytes of spill stores and loads, from what `ptxas -v` says.

    Functions that were not inlined have properties of their own; theirs add up.
    """
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not spills:
        raise ValueError(f"no registers or spills in the log of ptxas:\n{log}")
    return max(registers), sum(int(stores) + int(loads) for stores, loads in spills)


def source_of(variant: Variant) -> ASTSource:
    """The variant as a launch would describe it: arguments in order, pointers divisible by 16 where the kernel asks."""
    params = variant.kernel.params
    signature = {param.name: variant.signature.get(param.name, "constexpr") for param in params}
    constants = {(param.num,): variant.constants[param.name] for param in params if param.name in variant.constants}
    hinted = [p for p in params if not (p.do_not_specialize or p.do_not_specialize_on_alignment)]
    pointers = [param.num for param in hinted if signature[param.name].startswith("*")]
    return ASTSource(variant.kernel, signature, constants, {(at,): [["tt.divisibility", 16]] for at in pointers})


def compile_options(variant: Variant) -> dict[str, Any]:
    return {name: getattr(variant, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}


def _target(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


def _key(variant: Variant, capability: int) -> str:
    """Of all that determines a result: sources, types, constants, options, Triton's and ptxas's versions."""
    versions = triton.__version__, make_backend(_target(capability)).hash(), [field.name for field in fields(Usage)]
    try:
        source = source_of(variant).hash()
    except Exception as error:
        raise ValueError(f"{variant.kernel.__name__} [{variant.name}]: {error}") from error
    return hashlib.sha256(repr((versions, source, compile_options(variant))).encode()).hexdigest()[:32]


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def print_table(compilations: Sequence[Compilation]) -> None:
    """A row for each variant and architecture; shared memory and spills, found and allowed, in bytes."""
    rows = [("kernel", "variant", "for", "registers", "shared", "spills", "allowed", "seconds")]
    for done in compilations:
        name = done.variant.kernel.__name__, done.variant.name, _dotted(done.capability)
        use = done.usage
        used = (use.registers, use.shared_bytes, use.spill_bytes) if use else ("-",) * 3
        seconds = f"{use.seconds:.1f}" if use else "-"
        rows.append((*name, *map(str, used), str(done.variant.spill_bytes), seconds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(w) if i < 2 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells))


def main(arguments: Sequence[str] | None = None, variants: Iterable[Variant] | None = None) -> int:
    """The command; variants are those of all kernels unless given. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of results (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilations at a time")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        print(f"error: {INTERPRETED}", file=sys.stderr)
        return 2
    if variants is None:
        variants = (variant for source in VARIANTS for variant in source())
    start = time.perf_counter()
    compilations = compile_variants(variants, options.cache, options.jobs)
    print_table(compilations)
    failed = [done for done in compilations if done.problem]
    for done in failed:
        print(f"\n{done}: {done.problem}")
    new = sum(not done.cached for done in compilations)
    seconds = time.perf_counter() - start
    print(f"\n{len(compilations)} compilations, {new} of them now in {seconds:.1f} s, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
