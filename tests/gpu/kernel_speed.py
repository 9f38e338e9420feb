"""Single kernels against the machine: share of the copy's bandwidth, or of the product's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from engine import SamplingParams
from engine.request import EngineRequest
from engine.sampling.device_sampler import DeviceSampler
from kernels.gpu.activation import silu_and_mul
from kernels.gpu.kv_write import rotate_and_store
from kernels.gpu.norm import add_rms_norm
from tests.gpu.attention import Batch, Case, num_sms
from tests.gpu.check import Setup
from tests.gpu.report import Row, attempt
from tests.gpu.timing import ceiling, graph_time, median_time


def kernel_speed(setup: Setup) -> Iterator[Row]:
    for name, look in (
        ("attention, decode", _decode_attention),
        ("attention, prefill", _prefill_attention),
        ("pointwise", _pointwise),
        ("sampling", _sampling),
    ):
        yield from attempt(name, look, setup)


def _dtype(setup: Setup) -> torch.dtype:
    return torch.float32 if setup.tiny else torch.bfloat16


def _decode_attention(setup: Setup) -> Iterator[Row]:
    """Bytes of keys and values, of heads as in an 8B Llama."""
    sms = num_sms(setup.device)
    shapes = [(2, 40)] if setup.tiny else [(1, 1024), (1, 32_768), (8, 8192), (32, 2048), (256, 1024)]
    for requests, context in shapes:
        case = _case(setup, "decode", [(1, context - 1)] * requests)
        for fp8 in (False,) if setup.tiny else (False, True):
            batch = Batch.draw(case, _dtype(setup), setup, seed=0, fp8=fp8)
            moved = (
                2
                * requests
                * context
                * case.kv_heads
                * (case.head_dim * batch.key_cache.element_size() + (4 if fp8 else 0))
            )
            yield _by_bytes(
                setup,
                f"attention, {requests} decodes over {context}{' fp8' if fp8 else ''}",
                graph_time(partial(batch.attend, case, max_context_len=context, num_sms=sms), setup.device),
                moved,
            )


def _prefill_attention(setup: Setup) -> Iterator[Row]:
    """Operations above the diagonal are not counted."""
    shapes = [[(20, 0)]] if setup.tiny else [[(8192, 0)], [(2048, 0)] * 4, [(512, 7680)]]
    for lengths in shapes:
        case = _case(setup, "prefill", lengths)
        batch = Batch.draw(case, _dtype(setup), setup, seed=0)
        longest = max(new + before for new, before in lengths)
        seconds = median_time(
            partial(batch.attend, case, max_context_len=longest, num_sms=num_sms(setup.device)),
            setup.device,
            repeats=3 if setup.tiny else 10,
            warmup=1 if setup.tiny else 3,
        )
        pairs = sum(new * before + new * (new + 1) / 2 for new, before in lengths)
        flops = 4 * pairs * case.heads * case.head_dim
        share = flops / seconds / ceiling(setup.device, setup.tiny).flops_per_second
        values = {"ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12, "share": share}
        yield Row(f"attention, prefill {lengths[0]} x {len(lengths)}", values=values)


def _case(setup: Setup, name: str, lengths: list[tuple[int, int]]) -> Case:
    return Case(name, lengths, heads=4, kv_heads=2, head_dim=16) if setup.tiny else Case(name, lengths)


def _pointwise(setup: Setup) -> Iterator[Row]:
    """Of an 8B Llama's layer, one decode step of 256 requests and one chunk of 8,192 tokens."""
    dtype, hidden, inner, heads, kv_heads, size = _dtype(setup), 4096, 14_336, 32, 8, 128
    if setup.tiny:
        hidden, inner, heads, kv_heads, size = 32, 48, 2, 1, 16
    for tokens in (2,) if setup.tiny else (1, 256, 8192):
        x, residual = (torch.randn(tokens, hidden, device=setup.device, dtype=dtype) for _ in range(2))
        weight = torch.ones(hidden, device=setup.device, dtype=dtype)
        gate_up = torch.randn(tokens, 2 * inner, device=setup.device, dtype=dtype)
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=setup.device, dtype=dtype)
        angles = torch.rand(tokens, size // 2, device=setup.device)
        caches = [torch.zeros(tokens // 16 + 1, kv_heads, 16, size, device=setup.device, dtype=dtype) for _ in range(2)]
        slots = torch.arange(tokens, device=setup.device, dtype=torch.int32)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "add_rms_norm": (partial(add_rms_norm, x, residual, weight, 1e-5), 4 * x.nbytes),
            "silu_and_mul": (partial(silu_and_mul, gate_up), gate_up.nbytes * 3 // 2),
            "rotate_and_store": (
                partial(rotate_and_store, qkv, angles, angles, slots, *caches, heads=heads, kv_heads=kv_heads),
                2 * qkv.nbytes + 2 * angles.nbytes,
            ),
        }
        for name, (call, moved) in calls.items():
            yield _by_bytes(setup, f"{name}, {tokens} tokens", graph_time(call, setup.device), moved)


def _sampling(setup: Setup) -> Iterator[Row]:
    """From logits to tokens on the device, launches of the host included."""
    vocab = 131 if setup.tiny else 151_936
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=0.6),
        "top_k, top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    }
    for count in (2,) if setup.tiny else (1, 256):
        logits = 3 * torch.randn(count, vocab, device=setup.device, dtype=_dtype(setup))
        rows, lengths = np.arange(count), np.full(count, 9)
        for name, params in kinds.items():
            sampler = DeviceSampler(count, vocab, setup.device)
            for row in range(count):
                spec = EngineRequest(request_id=str(row), prompt_token_ids=(1, 2, 3), params=params, seed=row)
                sampler.add(row, spec, spec.prompt_token_ids)
            yield _by_bytes(
                setup,
                f"sampling, {name}, {count} rows",
                median_time(partial(sampler.sample, logits, rows, lengths), setup.device),
                logits.nbytes,
            )


def _by_bytes(setup: Setup, name: str, seconds: float, moved: int) -> Row:
    share = moved / seconds / ceiling(setup.device, setup.tiny).bytes_per_second
    return Row(name, values={"us": seconds * 1e6, "GB/s": moved / seconds / 1e9, "share": share})
