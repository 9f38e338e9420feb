"""Fused projections with packed weights."""

from __future__ import annotations

import weakref

import pytest
import torch

from engine.layers.linear import Linear, packing_for
from engine.layers.weight import Placement

TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)]


def packed(dtype):
    cpu = torch.device("cpu")
    return Placement(dtype, cpu, packing_for(dtype, cpu))


def fused(in_features, sizes, dtype, bias):
    """A Linear and the tensors that it was loaded from, of which nothing else holds the weights."""
    generator = torch.Generator().manual_seed(0)
    parts = {f"part{index}": size for index, size in enumerate(sizes)}
    linear = Linear(in_features, parts, bias=bias, placement=packed(dtype))
    weights = linear.weights("layer.")
    assert next(iter(weights)) == "layer.part0.weight"
    tensors = {name: torch.randn(w.shape, generator=generator).to(dtype) for name, w in weights.items()}
    for name in reversed(weights):
        weights[name].load(tensors[name].clone())
    return linear, tensors


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "sizes"), [(64, (64,)), (5, (7,)), (129, (33, 11, 1)), (576, (192, 192))])
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_fused_parts_equal_float64(dtype, tolerance, in_features, sizes, bias):
    with torch.inference_mode():
        linear, tensors = fused(in_features, sizes, dtype, bias)
        x = torch.randn(21, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight = torch.cat([t for name, t in tensors.items() if name.endswith("weight")]).double()
        expected = x.double() @ weight.T
        if bias:
            expected += torch.cat([t for name, t in tensors.items() if name.endswith("bias")]).double()
        output = linear(x)
        assert output.dtype == dtype
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(output.double(), expected, rtol=0.0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_the_batch(dtype):
    with torch.inference_mode():
        linear, _ = fused(576, (576, 192, 192), dtype, True)
        x = torch.randn(300, 576, generator=torch.Generator().manual_seed(1)).to(dtype)
        every = linear(x)
        for rows in (1, 2, 7, 33, 128):
            torch.testing.assert_close(linear(x[-rows:]), every[-rows:], rtol=0.0, atol=1e-6)


def test_packed_weight_replaces_the_plain_one():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch cannot pack weights")
    with torch.inference_mode():
        linear = Linear(16, {"proj": 8}, bias=False, placement=packed(torch.float32))
        tensor = torch.randn(8, 16)
        gone = weakref.ref(tensor)
        linear.weights("")["proj.weight"].load(tensor)
        del tensor
        assert gone() is None
        assert linear(torch.ones(1, 16)).shape == (1, 8)
