"""What Triton would compile for the launches of a GPU engine, recorded on a machine without a GPU.

Triton's own launcher runs on tensors of the CPU up to the point where it would compile, with a driver that only names
an architecture. Run as a module (without TRITON_INTERPRET), it prints which of these launches `python -m
kernels.compile` does not cover, and which of what that covers was not launched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from engine.request import EngineRequest
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling_params import SamplingParams
from kernels.compile import VARIANTS, compile_options, source_of
from kernels.gpu import activation, attention, embedding, kv_write, norm, step_input

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS, KV_HEADS = 8, 2
BLOCKS = 8


class _Driver:
    """Of a GPU that can do all that the kernels ask for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def ints(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def caches(
    dtype: torch.dtype, head_dim: int, block_size: int, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Keys, values and their scales."""
    size = (BLOCKS, KV_HEADS, block_size, head_dim)
    keys, values = (torch.empty(size, dtype=torch.float8_e4m3fn if fp8 else dtype) for _ in range(2))
    scales = {name: torch.empty(size[:3]) for name in ("key_scales", "value_scales")} if fp8 else {}
    return keys, values, scales


def elementwise() -> None:
    for dtype, size in product(DTYPES, (576, 2048, 4096, 8192, 16384)):
        x, weight = torch.empty(3, size, dtype=dtype), torch.empty(size, dtype=dtype)
        norm.rms_norm(x, weight, 1e-5)
        norm.add_rms_norm(x, x, weight, 1e-6)
        activation.silu_and_mul(x)
        embedding.embedding(ints(3), x)


def writes_of_keys_and_values() -> None:
    for dtype, head_dim, block_size, fp8 in product(DTYPES, HEAD_DIMS, (16, 32), (False, True)):
        keys, values, scales = caches(dtype, head_dim, block_size, fp8)
        weight = torch.empty(head_dim, dtype=dtype)
        for tokens, norms in product((1, 16, 33), (None, (weight, weight, 1e-6))):
            qkv = torch.empty(tokens, (HEADS + 2 * KV_HEADS) * head_dim, dtype=dtype)
            angles = torch.empty(tokens, head_dim // 2)
            kv_write.rotate_and_store(
                qkv, angles, angles, ints(tokens), keys, values, heads=HEADS, kv_heads=KV_HEADS, norm=norms, **scales
            )


def step_inputs() -> None:
    for n, shift in product((1, 16, 33), (0, 1)):
        # Several arrays may lie in one buffer: only the first is aligned to 16 bytes.
        rows, starts, others = (ints(n + 1 + shift)[shift:] for _ in range(3))
        table = ints(64, 100)
        step_input.store_tokens(table, rows[:n], others[:n], ints(n))
        step_input.write_segments(table, rows[:n], others[:n], starts, ints(n))
        step_input.gather_step(
            table, table, rows, starts, others, ints(n), ints(n), ints(n), ints(n),
            num_requests=n, padded=n, block_size=16, max_query_len=1,
        )  # fmt: skip


def attentions() -> None:
    for dtype, head_dim, block_size, fp8 in product(DTYPES, HEAD_DIMS, (16, 32), (False, True)):
        keys, values, scales = caches(dtype, head_dim, block_size, fp8)
        for lengths in ([1], [1] * 16, [1] * 33, [500], [1, 3, 40, 500]):
            n, tokens = len(lengths), sum(lengths)
            attention.paged_attention(
                torch.empty(tokens, HEADS, head_dim, dtype=dtype), keys, values, ints(64, 100), ints(n), ints(n + 1),
                ints(n), query_lens=np.array(lengths), scale=0.1, max_context_len=1600, num_sms=132, **scales,
            )  # fmt: skip


SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=1.0),
    SamplingParams(temperature=0.7, top_k=20, logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.9, logit_bias={3: 1.0}, min_tokens=9),
)


def samplings() -> None:
    for dtype, vocab, params in product(DTYPES, (133, 152064), SAMPLINGS):
        sampler = DeviceSampler(33, vocab, torch.device("cpu"))
        spec = EngineRequest(request_id="r", prompt_token_ids=(1, 2), params=params, seed=7)
        for row in range(33):
            sampler.add(row, spec, [1, 2, 3])
        for n in (1, 2, 16, 33):
            logits, rows = torch.empty(n, vocab, dtype=dtype), np.arange(n)
            sampler.sample(logits, rows, np.full(n, 3))
            sampler.sample(logits, rows, np.full(n, 3), allowed=ints(1, vocab // 32 + 1), constrained=np.arange(1))
            sampler.prompt_logprobs(logits, rows, 5)


LAUNCHES: tuple[Callable[[], None], ...] = (
    elementwise,
    writes_of_keys_and_values,
    attentions,
    samplings,
    step_inputs,
)


def described(
    kernel: str, signature: Mapping[str, str], constants: Mapping[Any, Any], hints: Mapping[Any, Any], options: Any
) -> str:
    """One text for one compilation."""
    hints = {at: hint for at, hint in hints.items() if hint}
    return f"{kernel}: {signature}, {dict(sorted(constants.items()))}, {hints}, {options}"


def recorded() -> set[str]:
    """Of everything in LAUNCHES."""
    found = set()

    def instead_of_compiling(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        arguments = compile["signature"], compile["constants"], compile["configs"][0]
        found.add(described(fn.jit_function.__name__, *arguments, options))
        return True

    driver.set_active(_Driver())
    triton.knobs.runtime.jit_cache_hook = instead_of_compiling
    for launch in LAUNCHES:
        launch()
    return found


def compiled() -> dict[str, str]:
    """The name of each variant under what it is compiled from."""
    found = {}
    for variant in (variant for source in VARIANTS for variant in source()):
        source = source_of(variant)
        text = described(source.name, source.signature, source.constants, source.attrs, compile_options(variant))
        found[text] = f"{source.name} [{variant.name}]"
    return found


if __name__ == "__main__":
    launched, covered = recorded(), compiled()
    unused = sorted(name for text, name in covered.items() if text not in launched)
    json.dump({"not compiled": sorted(launched - set(covered)), "not launched": unused}, sys.stdout, indent=1)
