"""From projected rows to queries, keys and values, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.protocols import HeadNorm, Heads
from kernels.reference import rms_norm, rotary_embedding

Angles = tuple[Tensor, Tensor]


def whole_angles(angles: Angles, dtype: torch.dtype) -> Angles:
    """cos and sin as kernels.reference.rotary_embedding takes them, from those of half a head."""
    cos, sin = angles
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def split_heads(qkv: Tensor, angles: Angles, heads: Heads, norm: HeadNorm | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed and turned, and values: [tokens, heads, head_dim] each.

    Args:
        qkv: [tokens, (queries + 2 * keys) * head_dim].
        angles: of whole heads.
    """
    queries, keys = heads.queries, heads.keys
    rows = qkv.view(qkv.shape[0], queries + 2 * keys, heads.dim)
    turned, value = rows[:, : queries + keys], rows[:, queries + keys :]
    if norm is not None:
        query, key = turned[:, :queries], turned[:, queries:]
        turned = torch.cat((rms_norm(query, norm.query, norm.eps), rms_norm(key, norm.key, norm.eps)), dim=1)
    turned = rotary_embedding(turned, *angles)
    return turned[:, :queries], turned[:, queries:], value
