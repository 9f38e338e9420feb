"""Attention over paged keys and values, behind engine.protocols.AttentionBackend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.torch_attention import TorchAttention

if TYPE_CHECKING:
    import torch

    from engine.protocols import AttentionBackend

__all__ = ["select_backend"]


def select_backend(device: torch.device) -> AttentionBackend:
    """A new backend for one engine on that device. So far plain torch serves all of them."""
    del device
    return TorchAttention()
