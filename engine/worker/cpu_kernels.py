"""Which kernels a worker on a CPU runs: those in C++ where they can be built and suit the model, else torch's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from engine.config import CpuKernels as Choice
from engine.config import ModelConfig, Quantization
from engine.layers.weight import Packing
from engine.sampling_params import InvalidParameter
from kernels.cpu.build import BuildError, build, supported_levels
from kernels.cpu.library import BLOCK_SIZE, LANES, MAX_HEAD_DIM, CpuKernels

logger = logging.getLogger(__name__)


PACKINGS: Mapping[Quantization | None, Packing] = {
    None: "panels",
    "int8": "panels_int8",
    "int8_w8a8": "panels_int8_w8a8",
}
"""How the C++ kernels want a model's weights."""


def load_cpu_kernels(
    choice: Choice,
    model_config: ModelConfig,
    *,
    block_size: int,
    num_threads: int,
    cache_folder: Path,
    quantization: Quantization | None = None,
) -> CpuKernels | None:
    """The C++ kernels, built at their first use; None is torch's.

    Raises:
        InvalidParameter: an instruction set was asked for that the processor lacks or that cannot be had here; weights
            are to be quantised, which torch's kernels do not do.
    """
    if choice == "torch":
        return None
    levels = supported_levels()
    if choice != "auto" and choice not in levels:
        raise InvalidParameter.of("cpu_kernels", choice, f"this processor has {', '.join(levels)}")
    try:
        if reason := _unsuited(model_config, block_size):
            raise BuildError(reason)
        library = build(levels[0] if choice == "auto" else choice, cache_folder)
        kernels = CpuKernels(library, num_threads)
    except (BuildError, OSError) as error:
        if choice != "auto":
            raise InvalidParameter.of("cpu_kernels", choice, str(error)) from error
        if quantization is not None:
            rule = f"needs the C++ kernels, which cannot be had: {error}"
            raise InvalidParameter.of("quantization", quantization, rule) from error
        logger.warning("cpu_kernels=torch, which is slower, since %s", error)
        return None
    logger.info("cpu_kernels=%s threads=%d", library.stem, num_threads)
    return kernels


def _unsuited(model: ModelConfig, block_size: int) -> str | None:
    """Why the C++ kernels cannot run a model."""
    if model.dtype == "float16":
        return "they compute in float32 and bfloat16, not in float16"
    if block_size != BLOCK_SIZE:
        return f"they have KV blocks of {BLOCK_SIZE} tokens, not of {block_size}"
    if model.head_dim % LANES or model.head_dim > MAX_HEAD_DIM:
        return f"they have heads of a multiple of {LANES} up to {MAX_HEAD_DIM} dimensions, not of {model.head_dim}"
    if model.hidden_size % 2 or model.intermediate_size % 2:
        return "they have hidden sizes that are even"
    return None
