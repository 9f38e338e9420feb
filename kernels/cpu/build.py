"""Builds the CPU kernels with the machine's C++ compiler, once for each instruction set, source and compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

LEVELS: Mapping[str, tuple[str, ...]] = {
    "avx512_bf16": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512bf16",
        "-mavx512vnni",
        "-mfma",
        "-mprefer-vector-width=512",
    ),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
"""Instruction sets, the best first, and the flags that let the compiler use them."""

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-gnu-unique", "-Wno-psabi")
COMPILERS = ("g++", "clang++", "c++")
SOURCES = Path(__file__).parent


class BuildError(RuntimeError):
    """There is no compiler, or it refused the source."""


def supported_levels() -> list[str]:
    """The levels that this processor runs, the best first."""
    has = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
        "portable": True,
    }
    return [level for level in LEVELS if has[level]]


def build(level: str, cache_folder: Path) -> Path:
    """The shared library for a level, built if it is not in the cache folder.

    Raises:
        BuildError: no C++ compiler was found, or it failed.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler was found (looked for {', '.join(COMPILERS)})")
    command = [compiler, *FLAGS, *LEVELS[level]]
    digest = hashlib.sha256("\0".join([*command, _version(compiler)]).encode())
    for path in sorted(SOURCES.glob("*.h")) + _units():
        digest.update(path.read_bytes())
    library = cache_folder / f"manta_cpu_{level}_{digest.hexdigest()[:16]}.so"
    if not library.exists():
        cache_folder.mkdir(parents=True, exist_ok=True)
        _compile(command, library)
    return library


def _compile(command: list[str], library: Path) -> None:
    """Compiles beside the library and moves it into place, so that nobody sees half of one."""
    handle, name = tempfile.mkstemp(prefix=library.stem, suffix=".tmp", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run([*command, *map(str, _units()), "-o", name], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{command[0]} failed:\n{done.stderr.strip()[-2000:]}")
        os.chmod(name, 0o755)
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _units() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
