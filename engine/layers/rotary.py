"""Rotary position embeddings, with the frequency scalings that transformers knows."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import ROPE_TYPES, RopeConfig
from engine.sampling_params import InvalidParameter


class RotaryEmbedding:
    """The angles by which queries and keys are turned.

    They are computed once a step, in float32, and serve all layers.

    `dynamic` scaling changes every frequency with the length of the sequence, keys that are already cached included,
    but only beyond the context that the model was trained with. It is exact up to that length, and refused beyond.
    """

    def __init__(self, rope: RopeConfig, *, head_dim: int, max_model_len: int, device: torch.device) -> None:
        """
        Raises:
            InvalidParameter: the type is unknown, a number of it is missing, or `dynamic` would have to change with the
                sequence.
        """
        inv_freq, self._attention_factor = rope_frequencies(rope, head_dim=head_dim, max_model_len=max_model_len)
        self._inv_freq = inv_freq.to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Integers [tokens] to cos and sin for one half of a head, float32 [tokens, head_dim / 2] each."""
        angles = positions[:, None].float() * self._inv_freq
        return angles.cos().mul_(self._attention_factor), angles.sin().mul_(self._attention_factor)


def rope_frequencies(rope: RopeConfig, *, head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin."""
    if rope.rope_type not in ROPE_TYPES:
        raise InvalidParameter.of("rope_type", rope.rope_type, f"must be one of {', '.join(ROPE_TYPES)}")
    if rope.rope_type == "default":
        return 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0
    needed = ("factor", "original_max_position_embeddings") if rope.rope_type in ("yarn", "llama3") else ("factor",)
    for name in needed:
        if rope.scaling.get(name) is None:
            raise InvalidParameter(name, f"{name} is missing; {rope.rope_type} rope scaling needs it")
    trained = rope.scaling.get("original_max_position_embeddings") or max_model_len
    if rope.rope_type == "dynamic" and max_model_len > trained:
        raise InvalidParameter.of(
            "max_model_len", max_model_len, f"must be at most {trained}, beyond which dynamic rope scaling is not exact"
        )
    # Only models with scaled frequencies need transformers, which takes a second to import.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=int(trained * rope.scaling["factor"]),
        rope_parameters={**rope.scaling, "rope_type": rope.rope_type, "rope_theta": rope.theta},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
    if inv_freq.numel() * 2 != head_dim:
        raise InvalidParameter.of(
            "partial_rotary_factor", rope.scaling.get("partial_rotary_factor"), "must be 1: whole heads are rotated"
        )
    return inv_freq, attention_factor
