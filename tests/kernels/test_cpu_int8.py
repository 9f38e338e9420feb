"""Products with int8 weights on the C++ kernels, at every instruction set that this processor has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config import cache_folder
from kernels.cpu.build import build, supported_levels
from kernels.cpu.library import (
    GROUP,
    PANEL,
    QUAD,
    Batch,
    CpuKernels,
    Epilogue,
    Format,
    Kind,
    Operation,
    array_of,
    pack_int8,
    quantized_bytes,
)

# in_features, out_features: whole groups and panels, and sizes that fill neither.
SIZES = [(64, 32), (2, 1), (54, 90), (130, 33), (576, 200)]
FORMATS = [Format.INT8, Format.INT8_ACTIVATIONS]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=supported_levels())
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(build(request.param, cache_folder() / "kernels"), num_threads=2)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose size differs from group to group, as that of a model's activations does."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape[-1], generator=generator).exp()
    return torch.randn(shape, generator=generator) * sizes


def step_of(format: Format, dtype: torch.dtype) -> int:
    return QUAD if format is Format.INT8_ACTIVATIONS else 2 if dtype == torch.bfloat16 else 1


def quantize(kernels: CpuKernels, x: Tensor) -> Tensor:
    """What QUANTIZE gives: int8 [rows, quantized_bytes]."""
    result = torch.full((len(x), quantized_bytes(x.shape[1])), -1, dtype=torch.int8)
    operation = Operation(kind=Kind.QUANTIZE, input=x.data_ptr(), output=result.data_ptr(), in_features=x.shape[1])
    kernels.run(x.dtype, array_of([operation]), Batch(tokens=len(x)))
    return result


def product(kernels: CpuKernels, format: Format, x: Tensor, packed: Tensor, outputs: int, bias: Tensor) -> Tensor:
    """float32 [rows, outputs]; buffers hold NaNs before."""
    result = torch.full((len(x), outputs), float("nan"))
    source = quantize(kernels, x) if format is Format.INT8_ACTIVATIONS else x
    padded = torch.nn.functional.pad(bias, (0, -outputs % PANEL))
    operation = Operation(
        kind=Kind.LINEAR,
        input=source.data_ptr(),
        output=result.data_ptr(),
        weight=packed.data_ptr(),
        bias=padded.data_ptr(),
        in_features=x.shape[1],
        out_features=outputs,
        epilogue=Epilogue.STORE_FLOAT,
        format=format,
    )
    kernels.run(x.dtype, array_of([operation]), Batch(tokens=len(x)))
    return result


def unpacked_activations(rows: Tensor) -> Tensor:
    """[rows, inputs], padded, in float64. Each group's sum is checked."""
    groups = rows.view(len(rows), -1, GROUP + 8)
    values = groups[..., :GROUP].double()
    scales = groups[..., GROUP : GROUP + 4].contiguous().view(torch.float32)
    sums = groups[..., GROUP + 4 :].contiguous().view(torch.int32)
    assert torch.equal(sums.double(), values.sum(-1, keepdim=True))
    return (values * scales.double()).flatten(1)


def rounding_step(values: Tensor) -> Tensor:
    """For each of [rows, columns], a 127th of the greatest magnitude in its group, in float64."""
    groups = values.double().split(GROUP, dim=1)
    return torch.cat([group.abs().amax(1, keepdim=True).expand_as(group) / 127 for group in groups], dim=1)


def unpacked(packed: Tensor, step: int) -> Tensor:
    """[outputs, inputs], both padded, in float64."""
    panels, groups, _ = packed.shape
    scales = packed[..., : 4 * PANEL].contiguous().view(torch.float32)
    values = packed[..., 4 * PANEL :].view(panels, groups, GROUP // step, PANEL, step).double()
    values *= scales.double()[:, :, None, :, None]
    return values.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, groups * GROUP)


@pytest.mark.parametrize("step", [1, 2, QUAD])
@pytest.mark.parametrize(("inputs", "outputs"), [*SIZES, (70, 70 * PANEL)])
def test_weights_are_rounded_to_127_steps_and_padded_with_zeros(inputs: int, outputs: int, step: int) -> None:
    weight = random(outputs, inputs)
    weight[0] = 0.0
    packed = unpacked(pack_int8(weight, step), step)
    difference = (packed[:outputs, :inputs] - weight.double()).abs()
    assert (difference <= 0.5001 * rounding_step(weight)).all()
    packed[:outputs, :inputs] = 0.0
    assert not packed.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [2, 54, 130, 576])
def test_activations_are_rounded_to_127_steps_and_padded_with_zeros(
    kernels: CpuKernels, dtype: torch.dtype, inputs: int
) -> None:
    x = random(21, inputs).to(dtype)
    x[3] = 0.0
    x[4] = 1e-38
    rows = unpacked_activations(quantize(kernels, x))
    difference = (rows[:, :inputs] - x.double()).abs()
    assert (difference <= 0.5001 * rounding_step(x) + 1e-30).all()
    assert not rows[:, inputs:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_equal_float64(
    kernels: CpuKernels, format: Format, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    bias = random(outputs, seed=1)
    packed = pack_int8(random(outputs, inputs), step_of(format, dtype))
    weight = unpacked(packed, step_of(format, dtype))[:outputs, :inputs]
    for rows in (1, 21):
        x = random(rows, inputs, seed=2).to(dtype)
        seen = unpacked_activations(quantize(kernels, x)) if format is Format.INT8_ACTIVATIONS else x.double()
        expected = seen[:, :inputs] @ weight.T + bias.double()
        result = product(kernels, format, x, packed, outputs, bias)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_row_does_not_depend_on_the_others(kernels: CpuKernels, format: Format, dtype: torch.dtype) -> None:
    inputs, outputs = 130, 70
    packed, bias = pack_int8(random(outputs, inputs), step_of(format, dtype)), random(outputs, seed=1)
    x = random(300, inputs, seed=2).to(dtype)
    every = product(kernels, format, x, packed, outputs, bias)
    for first, last in ((0, 1), (299, 300), (3, 10), (20, 33), (100, 197), (7, 200)):
        assert torch.equal(product(kernels, format, x[first:last], packed, outputs, bias), every[first:last])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_what_is_no_number_stays_in_its_row(kernels: CpuKernels, format: Format, broken: float) -> None:
    packed, bias = pack_int8(random(40, 130), step_of(format, torch.float32)), torch.zeros(40)
    x = random(5, 130, seed=2)
    whole = product(kernels, format, x, packed, 40, bias)
    x[2, 70] = broken
    result = product(kernels, format, x, packed, 40, bias)
    assert not result[2].isfinite().any()
    assert torch.equal(result[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])
