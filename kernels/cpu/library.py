"""The CPU kernels as Python sees them: operations, plans of them, and the call that runs one."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.sampling_library import SamplingBatch, SamplingRow

PANEL = 32
"""Columns of a panel of packed weights."""

LANES = 16
"""Floats in a vector."""

BLOCK_SIZE = 16
"""Keys in a KV block."""

MAX_HEAD_DIM = 256

GROUP = 64
"""Inputs of a quantised product that share a scale."""

QUAD = 4
"""int8 values in a 32-bit lane."""

PACK_PANELS = 8
"""Panels that are quantised at once."""


class Kind(IntEnum):
    """What an operation does; the numbers are those of step.cpp."""

    EMBED = 0
    RMS_NORM = 1
    LINEAR = 2
    ROTATE_AND_STORE = 3
    ATTEND = 4
    EMBED_FROM_PANELS = 5
    QUANTIZE = 6
    GATHER = 7


class Epilogue(IntEnum):
    """What LINEAR does with its sums before they are stored."""

    STORE = 0
    ADD_TO_RESIDUAL = 1
    SILU_AND_MULTIPLY = 2
    STORE_FLOAT = 3


class Format(IntEnum):
    """What LINEAR multiplies: panels of the activations' type, int8 panels, or those with int8 activations."""

    PANELS = 0
    INT8 = 1
    INT8_ACTIVATIONS = 2


class Operation(ctypes.Structure):
    """One operation; fields as in step.cpp. Tensors are given by their addresses, and whoever makes it keeps them."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("epilogue", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("on_kept", ctypes.c_int64),
    )


class Batch(ctypes.Structure):
    """One step's flat batch; fields as in step.cpp."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("requests", ctypes.c_int64),
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("kept_tokens", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
    )


class CpuKernels:
    """A built library and the threads that it runs on. Used from one thread at a time; a run releases the GIL.

    Raises:
        OSError: the library cannot be loaded, or there are not so many threads to be had.
    """

    def __init__(self, library: Path, num_threads: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.manta_pool_create.restype = ctypes.c_void_p
        self._library.manta_operation_bytes.restype = ctypes.c_int64
        self._library.manta_batch_bytes.restype = ctypes.c_int64
        assert self._library.manta_operation_bytes() == ctypes.sizeof(Operation)
        assert self._library.manta_batch_bytes() == ctypes.sizeof(Batch)
        self._library.manta_sampling_row_bytes.restype = ctypes.c_int64
        self._library.manta_sampling_batch_bytes.restype = ctypes.c_int64
        assert self._library.manta_sampling_row_bytes() == ctypes.sizeof(SamplingRow)
        assert self._library.manta_sampling_batch_bytes() == ctypes.sizeof(SamplingBatch)
        self._run = {
            torch.float32: self._library.manta_run_float32,
            torch.bfloat16: self._library.manta_run_bfloat16,
        }
        pool = ctypes.c_void_p(self._library.manta_pool_create(num_threads))
        if not pool:
            raise OSError(f"the system does not give {num_threads:,} threads")
        self._pool = pool
        # Not at exit: an engine's thread may still run then, and a forked process has none of the pool's threads.
        weakref.finalize(self, self._library.manta_pool_destroy, pool).atexit = False

    def run(self, dtype: torch.dtype, operations: ctypes.Array[Operation], batch: Batch) -> None:
        """Runs a plan, float32 or bfloat16."""
        self._run[dtype](self._pool, operations, ctypes.c_int64(len(operations)), ctypes.byref(batch))

    def sample(self, batch: SamplingBatch) -> None:
        """Draws the next token of each row, and finds the log-probabilities that it asks for."""
        self._library.manta_sample(self._pool, ctypes.byref(batch))


def array_of(operations: Sequence[Operation]) -> ctypes.Array[Operation]:
    return (Operation * len(operations))(*operations)


def pack_panels(weight: Tensor) -> Tensor:
    """[out_features, in_features] as LINEAR reads it, out_features padded to whole panels with zeros.

    Returns:
        float32 [panels, in_features, 32]; bfloat16 [panels, in_features / 2, 32, 2].
    """
    rows, columns = weight.shape
    panels = -(-rows // PANEL)
    step = 2 if weight.dtype == torch.bfloat16 else 1
    packed = weight.new_empty(panels, columns // step, PANEL, step)
    whole = rows // PANEL
    view = packed.permute(0, 2, 1, 3)  # [panels, 32, in_features / step, step]
    view[:whole].copy_(weight[: whole * PANEL].view(whole, PANEL, columns // step, step))
    if whole < panels:
        rest = rows - whole * PANEL
        view[whole, :rest].copy_(weight[whole * PANEL :].view(rest, columns // step, step))
        view[whole, rest:] = 0
    return packed


def pack_int8(weight: Tensor, step: int) -> Tensor:
    """[out_features, in_features] in int8 as LINEAR reads it, both sizes padded with zeros.

    Each output has a scale for every GROUP inputs, which brings the greatest of them to 127 or -127.

    Args:
        step: inputs that lie side by side: 1 for float32 activations, 2 for bfloat16, QUAD for int8.

    Returns:
        int8 [panels, groups, 4 * 32 + GROUP * 32]: float32 scales of the columns, then values [GROUP / step, 32, step].
    """
    rows, columns = weight.shape
    panels, groups = -(-rows // PANEL), -(-columns // GROUP)
    packed = torch.empty(panels, groups, PANEL * (4 + GROUP), dtype=torch.int8)
    # Some panels at a time: in float32 the whole weight would be larger than what it is packed into.
    for first in range(0, panels, PACK_PANELS):
        part = weight[first * PANEL : (first + PACK_PANELS) * PANEL]
        count = -(-len(part) // PANEL)
        padded = part.new_zeros(count * PANEL, groups * GROUP, dtype=torch.float32)
        padded[: len(part), :columns] = part
        grouped = padded.view(count, PANEL, groups, GROUP)
        scales = grouped.abs().amax(-1, keepdim=True) / 127
        values = (grouped / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        target = packed[first : first + count]
        target[..., : 4 * PANEL] = scales.squeeze(-1).transpose(1, 2).contiguous().view(torch.int8)
        target[..., 4 * PANEL :].view(count, groups, GROUP // step, PANEL, step).copy_(
            values.view(count, PANEL, groups, GROUP // step, step).permute(0, 2, 3, 1, 4)
        )
    return packed


def quantized_bytes(in_features: int) -> int:
    """Bytes of a row that QUANTIZE gives: for each group its values, a scale and their sum."""
    return -(-in_features // GROUP) * (GROUP + 8)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two equal projections in turn, 16 of each, padded with zeros: what SILU_AND_MULTIPLY expects.

    Args:
        gate, up: [size, ...].

    Returns:
        [2 * (size rounded up to 16), ...].
    """
    size = gate.shape[0]
    groups = -(-size // LANES)
    both = gate.new_zeros(groups, 2, LANES, *gate.shape[1:])
    for index, part in enumerate((gate, up)):
        padded = part.new_zeros(groups * LANES, *part.shape[1:])
        padded[:size] = part
        both[:, index] = padded.view(groups, LANES, *part.shape[1:])
    return both.view(groups * 2 * LANES, *gate.shape[1:])
