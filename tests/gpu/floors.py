"""What a step cannot do without: bytes through memory and floating-point operations."""

from __future__ import annotations

from tests.gpu.models import Shape

BF16_BYTES = 2


def decode_bytes(shape: Shape, batch: int, context: float, *, kv_value_bytes: float = BF16_BYTES) -> float:
    """Bytes that a decode step of bfloat16 weights reads: all matrices once, and each request's keys and values.

    Args:
        context: keys that each request's token sees, on average.
    """
    weights = BF16_BYTES * (shape.layer_parameters + shape.head_parameters)
    return weights + batch * context * shape.kv_values_per_token * kv_value_bytes


def decode_flops(shape: Shape, batch: int) -> float:
    """Of a decode step's products."""
    return 2.0 * batch * (shape.layer_parameters + shape.head_parameters)


def prefill_flops(shape: Shape, length: int) -> float:
    """Of one prompt: its tokens' products, causal attention, and one token's logits."""
    keys = length * (length + 1) / 2
    attention = 4.0 * keys * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    return 2.0 * length * shape.layer_parameters + attention + 2.0 * shape.head_parameters
