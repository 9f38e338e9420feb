"""Paged attention against float64: odd sizes, shared heads, windows, splits, long contexts, FP8, padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.attention import paged_attention
from tests.gpu.check import Setup
from tests.gpu.compare import LIMITS, NAMES, dtypes, near, poisoned
from tests.gpu.report import Row


@dataclass(frozen=True, slots=True)
class Case:
    """A flat batch.

    Attributes:
        lengths: each request's new tokens, and the tokens computed before them.
        padding: requests that a captured graph adds.
    """

    name: str
    lengths: Sequence[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    padding: int = 0
    strided: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """A case's tensors on the device. Slots that no request may read, and the keys of padding, are NaN."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    table_rows: Tensor
    query_start: Tensor
    context_lens: Tensor
    query_lens: np.ndarray
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def draw(cls, case: Case, dtype: torch.dtype, setup: Setup, seed: int, *, fp8: bool = False) -> Batch:
        device, generator = setup.device, setup.generator(seed)
        new = np.array([length for length, _ in case.lengths] + [1] * case.padding, np.int64)
        contexts = np.array([length + computed for length, computed in case.lengths] + [0] * case.padding, np.int64)
        requests, needed = len(case.lengths), -(-contexts // case.block_size)
        num_blocks, width = int(needed.sum()) + 1, int(needed.max()) + 2
        order = torch.randperm(num_blocks - 1, generator=generator, device=device).cpu().numpy() + 1
        # Entries past a request's length name block 0, which holds NaNs alone.
        tables = np.zeros((requests + 3, width), np.int32)
        rows = np.random.default_rng(seed).permutation(requests + 3)[:requests]
        slots = []
        for request, (row, count) in enumerate(zip(rows, needed, strict=False)):
            tables[row, :count], order = order[:count], order[count:]
            positions = np.arange(contexts[request])
            slots.append(tables[row, positions // case.block_size] * case.block_size + positions % case.block_size)
        at = torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(device)
        shape = (num_blocks, case.kv_heads, case.block_size, case.head_dim)
        caches, scales = [], []
        for _ in range(2):
            values = torch.randn(len(at), case.kv_heads, case.head_dim, generator=generator, device=device)
            scale = None
            if fp8:
                values, vector_scales = reference.quantize_fp8(values)
                scale = torch.full(shape[:3], float("nan"), device=device)
                scale[at // case.block_size, :, at % case.block_size] = vector_scales.view(len(at), case.kv_heads)
            cache = torch.full(shape, float("nan"), device=device)
            cache[at // case.block_size, :, at % case.block_size] = values.float()
            caches.append(cache.to(torch.float8_e4m3fn if fp8 else dtype))
            scales.append(scale)
        tokens = int(new.sum())
        width = case.heads + (3 if case.strided else 0)
        query = torch.randn(tokens, width, case.head_dim, generator=generator, device=device)
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        return cls(
            query=query.to(dtype)[:, : case.heads],
            key_cache=caches[0],
            value_cache=caches[1],
            block_tables=torch.from_numpy(tables).to(device),
            table_rows=torch.from_numpy(np.concatenate([rows, np.zeros(case.padding)]).astype(np.int32)).to(device),
            query_start=torch.from_numpy(starts).to(device),
            context_lens=torch.from_numpy(contexts.astype(np.int32)).to(device),
            query_lens=new,
            key_scales=scales[0],
            value_scales=scales[1],
        )

    def attend(self, case: Case, *, max_context_len: int, num_sms: int) -> Tensor:
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.table_rows,
            self.query_start,
            self.context_lens,
            query_lens=self.query_lens,
            scale=case.head_dim**-0.5,
            sliding_window=case.window,
            max_context_len=max_context_len,
            num_sms=num_sms,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
        )

    def truth(self, case: Case) -> Tensor:
        """Of the requests that are no padding, in float64; each by itself, for its matrix of logits is large."""
        outputs, starts = [], self.query_start.tolist()
        for request in range(len(case.lengths)):
            blocks = self.block_tables[self.table_rows[request]].long()
            blocks = blocks[: -(-int(self.context_lens[request]) // case.block_size)]
            tokens = self.query[starts[request] : starts[request + 1]].double()
            outputs.append(
                reference.paged_attention(
                    tokens,
                    _wide(self.key_cache[blocks], None if self.key_scales is None else self.key_scales[blocks]),
                    _wide(self.value_cache[blocks], None if self.value_scales is None else self.value_scales[blocks]),
                    torch.arange(len(blocks), device=blocks.device, dtype=torch.int32)[None],
                    torch.tensor([0, len(tokens)], dtype=torch.int32),
                    self.context_lens[request : request + 1],
                    scale=case.head_dim**-0.5,
                    sliding_window=case.window,
                )
            )
        return torch.cat(outputs)


def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def attention(setup: Setup, *, dtype: torch.dtype) -> Iterator[Row]:
    if dtype not in dtypes(setup):
        return
    for seed, case in enumerate(_tiny_cases() if setup.tiny else _cases()):
        batch = Batch.draw(case, dtype, setup, seed)
        yield _row(case, dtype, batch, setup, limit=LIMITS[dtype])


def fp8_attention(setup: Setup) -> Iterator[Row]:
    if setup.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return
    cases = _tiny_cases()[:1] if setup.tiny else [case for case in _cases() if case.block_size == 16]
    for seed, case in enumerate(cases):
        dtype = torch.float32 if setup.tiny else torch.bfloat16
        batch = Batch.draw(case, dtype, setup, 100 + seed, fp8=True)
        yield _row(case, dtype, batch, setup, limit=1e-5 if setup.tiny else 1.2e-2, kind="fp8 ")


def long_attention(setup: Setup) -> Iterator[Row]:
    cases = [
        Case("decode, 32k", [(1, 32_767)]),
        Case("decodes, 32k beside short", [(1, 32_000), (1, 3), (1, 20_001), (1, 500)], heads=16),
        Case("chunk behind 32k", [(128, 32_000)]),
        Case("drafts behind 32k", [(5, 32_000)]),
    ]
    if setup.tiny:
        cases = [Case("decode, 600", [(1, 599)], heads=4, kv_heads=2, head_dim=16)]
    for seed, case in enumerate(cases):
        for dtype in (torch.float32,) if setup.tiny else (torch.bfloat16, torch.float32):
            batch = Batch.draw(case, dtype, setup, 200 + seed)
            yield _row(case, dtype, batch, setup, limit=LIMITS[dtype])


def _row(case: Case, dtype: torch.dtype, batch: Batch, setup: Setup, *, limit: float, kind: str = "") -> Row:
    longest = int(batch.context_lens.max())
    # A captured graph knows no better bound than the model's own.
    bound = 4 * longest if case.padding else longest
    with poisoned():
        out = batch.attend(case, max_context_len=bound, num_sms=num_sms(setup.device))
    truth = batch.truth(case)
    return near(f"{kind}{case.name}, {NAMES[dtype]}", out[: len(truth)], truth, limit)


def _cases() -> list[Case]:
    decodes = [(1, computed) for computed in (0, 15, 16, 1000, 2999, 77, 4096)]
    prefills = [(1, 0), (17, 0), (300, 0), (1025, 0)]
    mixed = [(1, 700), (3, 450), (8, 1), (200, 3000), (1, 0), (2, 2000), (64, 0)]
    cases = [
        Case("decodes", decodes),
        Case("many decodes", [(1, 13 * request % 1800) for request in range(150)]),
        Case("padded decodes", decodes[:5], padding=3),
        Case("prefills", prefills),
        Case("chunk", [(700, 5000)]),
        Case("mixed", mixed),
        Case("mixed, strided", mixed, strided=True),
        Case("mixed, block 32", mixed, block_size=32),
        Case("decodes, window", decodes, window=100),
        Case("mixed, window", mixed, window=1000),
        Case("mixed, window 1", mixed[:3], window=1),
    ]
    cases += [Case(f"mixed, heads of {size}", mixed, heads=8, kv_heads=2, head_dim=size) for size in (64, 80, 96, 256)]
    for heads, kv_heads in ((4, 4), (9, 3), (28, 4), (8, 1), (64, 8)):
        cases.append(Case(f"mixed, {heads} on {kv_heads} heads", mixed, heads=heads, kv_heads=kv_heads))
    return cases


def _tiny_cases() -> list[Case]:
    small: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    return [
        Case("mixed", [(1, 20), (3, 17), (20, 5)], **small),
        Case("padded decodes, window", [(1, 20), (1, 0)], padding=1, window=9, **small),
    ]


def _wide(cache: Tensor, scale: Tensor | None) -> Tensor:
    return cache.double() if scale is None else cache.double() * scale.double()[..., None]
