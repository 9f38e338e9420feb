"""Token embeddings."""

from __future__ import annotations

from typing import overload

import torch.nn.functional as F
from torch import Tensor

from engine.layers.recorder import Recorded
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

    @overload
    def __call__(self, token_ids: Tensor) -> Tensor: ...
    @overload
    def __call__(self, token_ids: Recorded) -> Recorded: ...
    def __call__(self, token_ids: Tensor | Recorded) -> Tensor | Recorded:
        """int64 [tokens] to [tokens, size]."""
        if isinstance(token_ids, Recorded):
            return token_ids.recorder.embed(self._table)
        return F.embedding(token_ids, self._table)
