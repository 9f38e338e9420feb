"""Norm, rotation and cache write in one launch: Triton's interpreter and the reference against formulas written out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu import kv_write

both = pytest.mark.parametrize("module", [kv_write, reference], ids=["triton", "reference"])
# Triton's interpreter cuts off what does not fit into bfloat16, where a GPU rounds.
TYPES = [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
FP8 = torch.float8_e4m3fn


@dataclass
class Step:
    """Random tokens on their way to poisoned caches of 16-token blocks; token i goes to slots[i]."""

    slots: list[int]
    heads: int = 5
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    qkv: Tensor = field(init=False)
    cosines: Tensor = field(init=False)
    sines: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.head_dim)
        tokens, num_blocks = len(self.slots), max(self.slots) // 16 + 2
        self.qkv = torch.randn(tokens, (self.heads + 2 * self.kv_heads) * self.head_dim, generator=generator)
        self.qkv = self.qkv.to(self.dtype)
        angles = 100 * torch.randn(tokens, self.head_dim // 2, generator=generator)
        self.cosines, self.sines = angles.cos(), angles.sin()
        shape = (num_blocks, self.kv_heads, 16, self.head_dim)
        cache_dtype = self.cache_dtype or self.dtype
        self.key_cache, self.value_cache = (torch.full(shape, torch.nan).to(cache_dtype) for _ in range(2))
        self.key_scales, self.value_scales = (torch.full(shape[:3], torch.nan) for _ in range(2))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [tokens, heads, head_dim] each."""
        vectors = self.qkv.view(len(self.slots), -1, self.head_dim)
        return vectors.split([self.heads, self.kv_heads, self.kv_heads], dim=1)

    def run(self, module, **options) -> Tensor:
        if self.cache_dtype == FP8:
            options |= {"key_scales": self.key_scales, "value_scales": self.value_scales}
        return module.rotate_and_store(
            self.qkv,
            self.cosines,
            self.sines,
            torch.tensor(self.slots, dtype=torch.int32),
            self.key_cache,
            self.value_cache,
            heads=self.heads,
            kv_heads=self.kv_heads,
            **options,
        )

    def stored(self, cache: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each stored token and what a cache or its scales have for it; the rest must still be poison."""
        rest = cache.float().clone()
        for token, slot in enumerate(self.slots):
            if slot >= 0:
                yield token, cache[slot // 16, :, slot % 16].float()
                rest[slot // 16, :, slot % 16] = torch.nan
        assert rest.isnan().all()


def rotated(x: Tensor, step: Step) -> Tensor:
    """[tokens, heads, head_dim] in float64, as complex numbers."""
    first, second = x.double().chunk(2, dim=-1)
    turn = torch.complex(step.cosines.double(), step.sines.double())[:, None]
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def weight(head_dim: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(head_dim, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@both
@pytest.mark.parametrize("dtype", [dtype for dtype, _ in TYPES], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 96, 128, 256])
def test_what_is_not_turned_arrives_bit_by_bit(module, head_dim, dtype):
    step = Step([17, -1, 3, 47, 0], head_dim=head_dim, dtype=dtype)
    step.cosines.fill_(1.0)
    step.sines.fill_(0.0)
    queries, keys, values = step.parts
    assert torch.equal(step.run(module), queries)
    for cache, vectors in ((step.key_cache, keys), (step.value_cache, values)):
        for token, stored in step.stored(cache):
            assert torch.equal(stored, vectors[token].float())


@both
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("heads", [(5, 2, 64), (1, 1, 96), (3, 3, 128), (28, 4, 80), (8, 1, 256)], ids=str)
def test_queries_and_keys_are_turned_and_values_are_not(module, heads, dtype, tolerance):
    step = Step([40, -1, 5, 6], *heads, dtype=dtype)
    queries, keys, values = step.parts
    got = step.run(module)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), rotated(queries, step), rtol=tolerance, atol=tolerance)
    for token, stored in step.stored(step.key_cache):
        torch.testing.assert_close(stored.double(), rotated(keys, step)[token], rtol=tolerance, atol=tolerance)
    for token, stored in step.stored(step.value_cache):
        assert torch.equal(stored, values[token].float())


@both
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("head_dim", [24, 80, 128])
def test_queries_and_keys_are_normed_by_their_own_weights(module, head_dim, dtype, tolerance):
    step = Step([1, 2, -1], head_dim=head_dim, dtype=dtype)
    queries, keys, values = step.parts
    weights = weight(head_dim, dtype), -2 * weight(head_dim, dtype)
    got = step.run(module, norm=(*weights, 0.25))
    # Three roundings where the rotation alone has one.
    near = {"rtol": 3 * tolerance, "atol": 3 * tolerance}
    torch.testing.assert_close(got.double(), rotated(normed(queries, weights[0], 0.25), step), **near)
    for token, stored in step.stored(step.key_cache):
        torch.testing.assert_close(stored.double(), rotated(normed(keys, weights[1], 0.25), step)[token], **near)
    for token, stored in step.stored(step.value_cache):
        assert torch.equal(stored, values[token].float())


def test_norms_round_where_the_reference_rounds():
    step, again = (Step([1, 2, 3, 4], head_dim=128, dtype=torch.float16) for _ in range(2))
    norm = (weight(128, torch.float16), weight(128, torch.float16), 1e-6)
    # Sums in another order move a few elements to the neighbouring number, not more.
    got, expected = step.run(kv_write, norm=norm), again.run(reference, norm=norm)
    assert (got != expected).float().mean() < 0.02
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-4)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [24, 128])
def test_fp8_is_the_nearest_number_to_each_entry_over_its_vectors_scale(module, head_dim, dtype):
    step = Step([17, -1, 3, 0], head_dim=head_dim, dtype=dtype, cache_dtype=FP8)
    step.cosines.fill_(1.0)
    step.sines.fill_(0.0)
    _, keys, values = step.parts
    keys[0, 1] = 0.0
    values[2, 0, 1:] *= 1e-4  # subnormal in fp8
    step.run(module)
    for cache, scales, vectors in (
        (step.key_cache, step.key_scales, keys),
        (step.value_cache, step.value_scales, values),
    ):
        numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
        numbers = numbers[numbers.isfinite()]
        for token, scale in step.stored(scales):
            largest = vectors[token].float().abs().amax(-1)
            assert torch.equal(scale, torch.where(largest > 0, largest / 448, 1.0))
        for token, stored in step.stored(cache):
            slot = step.slots[token]
            exact = vectors[token].float() / scales[slot // 16, :, slot % 16, None]
            nearest = (exact[..., None] - numbers).abs().amin(-1)
            assert torch.equal((stored - exact).abs(), nearest)


def test_fp8_rounds_ties_to_even_as_torch_does():
    # 448 sets the scale to 1; all midpoints between neighbours, and what is just above and below them.
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    tested = torch.cat((numbers, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)))
    tested = torch.cat((tested, -tested))
    step = Step(list(range(8)), heads=1, kv_heads=1, head_dim=256, cache_dtype=FP8)
    step.cosines.fill_(1.0)
    step.sines.fill_(0.0)
    keys = step.parts[1].view(8, 256)
    keys[:] = 0.0
    keys[:, 0] = 448.0
    keys[:, 1:].view(8, -1)[:, :255].copy_(torch.nn.functional.pad(tested, (0, 8 * 255 - len(tested))).view(8, 255))
    step.run(kv_write)
    for token, stored in step.stored(step.key_cache):
        assert torch.equal(stored[0], keys[token].to(FP8).float())


def test_fp8_keys_are_quantised_once_from_what_the_rotation_gives():
    step = Step([5, 9], cache_dtype=FP8, dtype=torch.float16)
    step.run(kv_write)
    expected = rotated(step.parts[1], step)
    for token, stored in step.stored(step.key_cache):
        slot = step.slots[token]
        scale = step.key_scales[slot // 16, :, slot % 16, None]
        torch.testing.assert_close(scale[:, 0].double(), expected[token].abs().amax(-1) / 448)
        # Half of the distance between neighbours, and float32's own error.
        torch.testing.assert_close((stored * scale).double(), expected[token], rtol=2**-4 + 1e-6, atol=2e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_other_parts_of_a_token_do_not_reach_a_vector():
    step = Step([4])
    queries, keys, values = step.parts
    queries.fill_(torch.nan)
    keys.fill_(torch.nan)
    values[0, 0, 3], values[0, 0, 35], values[0, 1, 0] = torch.inf, -torch.inf, -0.0
    expected = values.clone()
    step.run(kv_write, norm=(torch.full((64,), torch.nan), torch.full((64,), torch.nan), 1e-6))
    stored = step.value_cache[0, :, 4]
    assert torch.equal(stored, expected[0])
    assert stored[1, 0].signbit()


@both
def test_padding_is_turned_but_not_stored(module):
    step = Step([-1, -1, -1], dtype=torch.float16)
    queries, _, _ = step.parts
    torch.testing.assert_close(step.run(module).double(), rotated(queries, step), rtol=2e-3, atol=2e-3)
    assert step.key_cache.isnan().all()
    assert step.value_cache.isnan().all()


def test_hundreds_of_tokens():
    slots = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:300].tolist()
    step, again = (Step(slots, heads=2, kv_heads=1, head_dim=16) for _ in range(2))
    torch.testing.assert_close(step.run(kv_write), again.run(reference))
    torch.testing.assert_close(step.key_cache, again.key_cache, equal_nan=True)
    assert torch.equal(step.value_cache.nan_to_num(-9.0), again.value_cache.nan_to_num(-9.0))


def test_no_tokens_are_no_work():
    step = Step([0])
    step.qkv, step.slots = step.qkv[:0], []
    assert step.run(kv_write).shape == (0, 5, 64)
    assert step.key_cache.isnan().all()


def test_caches_may_be_larger_than_32_bits_can_index():
    # Sparse files: block 2 ** 17 begins 2 ** 32 entries in, which 32 bits would take for block 0.
    shape, block = (2**17 + 1, 8, 16, 256), 2**17
    with tempfile.TemporaryFile() as keys, tempfile.TemporaryFile() as values:
        step = Step([3], heads=1, kv_heads=8, head_dim=256, cache_dtype=FP8)
        step.slots = [16 * block + 3]
        step.key_cache, step.value_cache = (
            torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=shape)).view(FP8) for file in (keys, values)
        )
        step.key_scales, step.value_scales = torch.zeros(shape[:3]), torch.zeros(shape[:3])
        step.run(kv_write)
        for cache in (step.key_cache, step.value_cache):
            assert cache[0].view(torch.uint8).eq(0).all()
            assert cache[block].float().abs().amax(-1)[:, 3].eq(448).all()


def test_odd_head_sizes_and_strided_tensors_are_refused():
    with pytest.raises(ValueError, match="head_dim=20: must be a multiple of 8"):
        Step([0], head_dim=20).run(kv_write)
    step = Step([0, 1])
    step.qkv = step.qkv.repeat(1, 2)[:, : step.qkv.shape[1]]
    with pytest.raises(ValueError, match=r"qkv with strides .*: must be contiguous"):
        step.run(kv_write)
