"""Norms, activation and embedding: Triton's interpreter against formulas written out and the references' roundings."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.activation import silu_and_mul
from kernels.gpu.embedding import embedding
from kernels.gpu.norm import add_rms_norm, rms_norm

# Triton's interpreter cuts off what does not fit into bfloat16, where a GPU rounds.
TYPES = [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
types = pytest.mark.parametrize(("dtype", "tolerance"), TYPES, ids=["fp32", "fp16", "bf16"])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@types
@pytest.mark.parametrize("size", [8, 64, 1000, 1024, 2568, 4096, 5120, 8192, 16384])
def test_rms_norm(size, dtype, tolerance):
    x, weight = random(3, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.25).sqrt() * weight.double()
    got = rms_norm(x, weight, 0.25)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=2 * tolerance, atol=1e-7)


@types
@pytest.mark.parametrize("size", [8, 64, 1000, 5120])
def test_add_rms_norm_norms_the_rounded_sum(size, dtype, tolerance):
    x, residual = random(3, size, dtype=dtype), random(3, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    if dtype == torch.bfloat16:
        torch.testing.assert_close(total, x + residual, rtol=tolerance, atol=0.0)
    else:
        assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))
    torch.testing.assert_close(normed, reference.rms_norm(total, weight, 1e-6), rtol=2 * tolerance, atol=1e-7)


def test_norms_round_before_the_weight():
    x, weight = random(4, 512, dtype=torch.float16), random(512, dtype=torch.float16, seed=1)
    # Sums in another order move a few elements to the neighbouring number, not more.
    different = rms_norm(x, weight, 1e-6) != reference.rms_norm(x, weight, 1e-6)
    assert different.float().mean() < 0.02


def test_norms_sum_in_float32():
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # whose square float16 does not have
    assert rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6).eq(1.0).all()


def test_norms_keep_the_shape_and_treat_each_row_alone():
    x, weight = random(2, 150, 16, dtype=torch.float32), random(16, dtype=torch.float32, seed=1)
    x[1, 149] = torch.nan
    got = rms_norm(x, weight, 1e-6)
    assert got.shape == x.shape
    assert got[1, 149].isnan().all()
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-6), equal_nan=True)


def test_norms_refuse_sizes_that_are_odd_or_too_large():
    for size in (20, 16392):
        with pytest.raises(ValueError, match=f"size={size}: must be a multiple of 8 and at most 16,384"):
            rms_norm(torch.ones(1, size), torch.ones(size), 1e-6)
    with pytest.raises(ValueError, match="must be contiguous"):
        rms_norm(torch.ones(2, 16)[:, :8], torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="must be contiguous"):
        add_rms_norm(torch.ones(2, 8), torch.ones(2, 16)[:, :8], torch.ones(8), 1e-6)


@types
@pytest.mark.parametrize("shape", [(1, 8), (3, 1024), (2, 2, 1032), (300, 40), (1, 4864)], ids=str)
def test_silu_and_mul(shape, dtype, tolerance):
    gate, up = 4 * random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    got = silu_and_mul(torch.cat((gate, up), dim=-1))
    assert got.dtype == dtype
    expected = gate.double() * gate.double().sigmoid() * up.double()
    # What float16 has below its normal numbers is coarse.
    torch.testing.assert_close(got.double(), expected, rtol=2 * tolerance, atol=1e-6)


def test_silu_is_rounded_before_the_product():
    gate_up = random(8, 1024, dtype=torch.float16)
    different = silu_and_mul(gate_up) != reference.silu_and_mul(gate_up)
    assert different.float().mean() < 0.005


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_very_large_gates():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 0.0, 0.0, 0.0]])
    assert silu_and_mul(torch.cat((gate, torch.ones(1, 8)), dim=-1)).tolist() == gate.clamp(min=0).tolist()


def test_silu_and_mul_refuses_odd_sizes_and_strides():
    with pytest.raises(ValueError, match=r"gate_up\[\.\.\., 24\]: must be twice a multiple of 8"):
        silu_and_mul(torch.ones(1, 24))
    with pytest.raises(ValueError, match="must be contiguous"):
        silu_and_mul(torch.ones(2, 32)[:, :16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (5, 2056), (3, 4096), (700, 48)])
def test_embedding(tokens, size, dtype):
    table = random(131, size, dtype=dtype)
    token_ids = torch.randint(131, (tokens,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    token_ids[-1] = 130
    for implementation in (embedding, reference.embedding):
        assert torch.equal(implementation(token_ids, table), table[token_ids.long()])


def test_embedding_of_a_table_larger_than_32_bits_can_index():
    # A sparse file: row 2 ** 18 begins 2 ** 32 entries in, which 32 bits would take for row 0.
    with tempfile.TemporaryFile() as file:
        table = torch.from_numpy(np.memmap(file, np.float16, "w+", shape=(2**18 + 1, 2**14)))
        table[2**18] = 3.0
        assert embedding(torch.tensor([0, 2**18], dtype=torch.int32), table).float().mean(-1).tolist() == [0.0, 3.0]


def test_embedding_refuses_odd_sizes_and_strides():
    with pytest.raises(ValueError, match="size=20: must be a multiple of 8"):
        embedding(torch.zeros(1, dtype=torch.int32), torch.ones(4, 20))
    with pytest.raises(ValueError, match="must be contiguous"):
        embedding(torch.zeros(1, dtype=torch.int32), torch.ones(4, 32)[:, :16])


def test_no_rows_are_no_work():
    none = torch.ones(0, 16)
    assert rms_norm(none, torch.ones(16), 1e-6).shape == (0, 16)
    assert silu_and_mul(none).shape == (0, 8)
    assert embedding(torch.zeros(0, dtype=torch.int32), torch.ones(4, 16)).shape == (0, 16)
