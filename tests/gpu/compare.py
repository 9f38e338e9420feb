"""Compares what a kernel wrote with the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.gpu.check import Setup
from tests.gpu.report import Row

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of ||out - truth|| / ||truth||: a few roundings of the type; TF32 in place of float32 would be 3e-4."""

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def dtypes(setup: Setup) -> list[torch.dtype]:
    """Of all kernels; without bfloat16 in Triton's interpreter, which neither multiplies nor rounds it."""
    return [dtype for dtype in NAMES if not (setup.tiny and dtype == torch.bfloat16)]


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out in here is full of NaNs or the largest integer: what a kernel leaves out shows."""
    # What torch does to find such errors in itself, unless torch.utils.deterministic.fill_uninitialized_memory is off.
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def near(name: str, out: Tensor, truth: Tensor, limit: float | None = None) -> Row:
    """A row on how far out is from the truth; NaN anywhere is wrong.

    Args:
        truth: float64, of out's shape.
        limit: of the relative error; None is that of out's type.
    """
    limit = LIMITS[out.dtype] if limit is None else limit
    if out.shape != truth.shape:
        return Row(name, False, note=f"shape {list(out.shape)}, and should be {list(truth.shape)}")
    difference = out.double() - truth
    error = float(difference.norm() / truth.norm().clamp(min=1e-30))
    values = {"error": error, "limit": limit, "max": float(difference.abs().max()) if out.numel() else 0.0}
    note = "" if error <= limit else f"{int(out.isnan().sum())} of {out.numel()} are NaN"
    return Row(name, error <= limit, values, note=note)


def equal(name: str, out: Tensor, truth: Tensor) -> Row:
    """A row on whether two tensors are the same bits."""
    if out.shape != truth.shape or out.dtype != truth.dtype:
        kinds = f"{out.dtype} {list(out.shape)}", f"{truth.dtype} {list(truth.shape)}"
        return Row(name, False, note=f"{kinds[0]}, and should be {kinds[1]}")
    same = (out == truth) | ((out != out) & (truth != truth))
    wrong = int((~same).sum())
    return Row(name, wrong == 0, {"wrong": wrong, "of": out.numel()})
