"""Token embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.layers.weight import Weight, Weights


class Embedding:
    """The rows of a table, [vocab, size]."""

    def __init__(self, vocab_size: int, size: int) -> None:
        self._shape = (vocab_size, size)
        self._table: Tensor

    def weights(self, name: str) -> Weights:
        return {name: Weight(self._shape, self.load)}

    def load(self, tensor: Tensor) -> None:
        self._table = tensor

    @property
    def table(self) -> Tensor:
        return self._table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [tokens] to [tokens, size]."""
        return F.embedding(token_ids, self._table)
