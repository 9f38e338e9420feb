"""What the layers of a model do beside products and attention."""

from kernels.gpu.activation import silu_and_mul
from kernels.gpu.embedding import embedding
from kernels.gpu.norm import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "embedding", "rms_norm", "silu_and_mul"]
