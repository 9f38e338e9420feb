"""Whether a worker runs the Triton kernels: on a GPU that they suit, and for tests in Triton's interpreter."""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine.config import GpuKernels, KVCacheDType, ModelConfig
from engine.sampling_params import InvalidParameter

logger = logging.getLogger(__name__)

BLOCK_SIZES = (16, 32)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
SIZE_STEP = 8
MAX_HIDDEN_SIZE = 16_384

MIN_CAPABILITY = (8, 0)
"""The compute capability that the kernels are written and compiled for at least."""

FP8_CAPABILITY = (8, 9)
"""GPUs have conversions of FP8 (e4m3) from this compute capability on."""

INTERPRETED_SMS = 4
"""Multiprocessors that the interpreter is taken to have: enough for kernels to split their work."""


def use_gpu_kernels(
    choice: GpuKernels,
    model_config: ModelConfig,
    *,
    block_size: int,
    kv_cache_dtype: KVCacheDType,
    device: torch.device,
) -> bool:
    """Whether the Triton kernels run the model; otherwise plain torch or the CPU's kernels do.

    Raises:
        InvalidParameter: they were asked for and cannot run it, or FP8 keys and values were.
    """
    wanted = choice == "triton" or (choice == "auto" and device.type == "cuda")
    reason = _unsuited(model_config, block_size, device) if wanted else None
    if reason is not None and choice == "triton":
        raise InvalidParameter.of("gpu_kernels", choice, reason)
    used = wanted and reason is None
    if kv_cache_dtype == "fp8":
        if not used:
            rule = f"needs the Triton kernels of a GPU{f', but {reason}' if reason else ''}"
            raise InvalidParameter.of("kv_cache_dtype", kv_cache_dtype, rule)
        _check_fp8(device)
    if reason is not None:
        logger.warning("gpu_kernels=torch, which is slower, since %s", reason)
    return used


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_SMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _unsuited(model: ModelConfig, block_size: int, device: torch.device) -> str | None:
    """Why the Triton kernels cannot run a model there."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if missing := _missing_capability(device, MIN_CAPABILITY):
        return f"the Triton kernels need {missing}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10 and _version(triton) < (3, 8):
        return f"the products of Triton {triton.__version__} are not always right on compute capability 10; 3.8's are"
    from kernels.gpu.attention import max_group

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return "the Triton kernels need a GPU; a CPU has only Triton's interpreter, for tests (TRITON_INTERPRET=1)"
    if block_size not in BLOCK_SIZES:
        sizes = " or ".join(map(str, BLOCK_SIZES))
        return f"the Triton kernels have KV blocks of {sizes} tokens, not of {block_size}"
    if model.head_dim % HEAD_DIM_STEP or model.head_dim > MAX_HEAD_DIM:
        return (
            f"the Triton kernels have heads of a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM} dimensions, "
            f"not of {model.head_dim}"
        )
    largest = max_group(model.head_dim, getattr(torch, model.dtype))
    if model.num_heads // model.num_kv_heads > largest:
        return f"the Triton kernels have at most {largest} query heads of this kind to a KV head"
    if model.hidden_size % SIZE_STEP or model.hidden_size > MAX_HIDDEN_SIZE or model.intermediate_size % SIZE_STEP:
        return (
            f"the Triton kernels have sizes of a multiple of {SIZE_STEP}, hidden ones up to {MAX_HIDDEN_SIZE:,}; the "
            f"model has hidden_size={model.hidden_size:,} and intermediate_size={model.intermediate_size:,}"
        )
    return None


def _version(package: Any) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in package.__version__.split(".")[:2])


def _check_fp8(device: torch.device) -> None:
    if missing := _missing_capability(device, FP8_CAPABILITY):
        raise InvalidParameter.of("kv_cache_dtype", "fp8", f"needs {missing}")


def _missing_capability(device: torch.device, needed: tuple[int, int]) -> str | None:
    """What is needed and what there is, where a GPU is older than that."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device)) >= needed:
        return None
    least, have = (".".join(map(str, version)) for version in (needed, capability))
    return f"a GPU of compute capability {least} or newer; {torch.cuda.get_device_name(device)} has {have}"
