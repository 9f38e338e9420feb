"""Gated activations."""

from kernels.reference import silu_and_mul

__all__ = ["silu_and_mul"]
