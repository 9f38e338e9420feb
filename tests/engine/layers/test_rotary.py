"""Rotary frequencies and angles against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.attention.projections import whole_angles
from engine.config import RopeConfig
from engine.layers.rotary import RotaryEmbedding
from engine.sampling_params import InvalidParameter
from kernels.reference import rotary_embedding

TRAINED = {"original_max_position_embeddings": 512}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}
ROPES = [
    ("default", {}),
    ("linear", {"factor": 3.0}),
    ("dynamic", {"factor": 3.0}),
    ("yarn", {"factor": 4.0, **TRAINED}),
    ("yarn", {"factor": 4.0, "attention_factor": 0.7, "beta_fast": 16, "beta_slow": 2, "truncate": False, **TRAINED}),
    ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, **TRAINED}),
    ("llama3", LLAMA3),
]


def rotary(rope_type, scaling, *, head_dim=64, max_model_len=2048):
    rope = RopeConfig(theta=50_000.0, rope_type=rope_type, scaling=scaling)
    return RotaryEmbedding(rope, head_dim=head_dim, max_model_len=max_model_len, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rope_type", "scaling"), ROPES)
def test_rotation_equals_transformers(rope_type, scaling, dtype):
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": rope_type, "rope_theta": 50_000.0, **scaling},
    )
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 17, 511, 512, 2047])
    x = torch.randn(6, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = rotary(rope_type, scaling)
    assert torch.equal(ours._inv_freq, theirs.inv_freq)
    assert ours._attention_factor == theirs.attention_scaling
    expected, _ = apply_rotary_pos_emb(x[None], x[None], *theirs(x, positions[None]), unsqueeze_dim=2)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    turned = rotary_embedding(x, *whole_angles(ours.angles(positions), dtype))
    torch.testing.assert_close(turned, expected[0], rtol=tolerance, atol=tolerance)


def test_dynamic_scaling_is_refused_beyond_the_trained_context():
    assert rotary("dynamic", {"factor": 3.0, **TRAINED}, max_model_len=512)
    with pytest.raises(InvalidParameter, match="max_model_len=513: must be at most 512") as caught:
        rotary("dynamic", {"factor": 3.0, **TRAINED}, max_model_len=513)
    assert caught.value.param == "max_model_len"


@pytest.mark.parametrize(
    ("rope_type", "missing"),
    [
        ("llama3", "original_max_position_embeddings"),
        ("yarn", "original_max_position_embeddings"),
        ("linear", "factor"),
    ],
)
def test_scaling_that_lacks_a_number_is_refused(rope_type, missing):
    scaling = {name: value for name, value in LLAMA3.items() if name != missing}
    with pytest.raises(InvalidParameter, match=f"{missing} is missing; {rope_type} rope scaling needs it"):
        rotary(rope_type, scaling)


def test_unknown_type_lists_the_known():
    with pytest.raises(InvalidParameter, match="rope_type='longrope': must be one of default, linear, dynamic"):
        rotary("longrope", {})


def test_partial_rotation_is_refused():
    with pytest.raises(InvalidParameter, match=r"partial_rotary_factor=0\.5"):
        rotary("linear", {"factor": 2.0, "partial_rotary_factor": 0.5})
