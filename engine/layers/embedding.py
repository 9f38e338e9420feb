"""Token embeddings."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.operations import Operations
from engine.layers.recorder import Recorded
from engine.layers.weight import Weight, Weights


class Embedding:
    """The rows of a table, [vocab, size]."""

    def __init__(self, vocab_size: int, size: int, operations: Operations) -> None:
        self._shape = (vocab_size, size)
        self._operations = operations
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
        """Integers [tokens] to [tokens, size]."""
        if isinstance(token_ids, Recorded):
            return token_ids.recorder.embed(self._table)
        return self._operations.embedding(token_ids, self._table)


class TiedEmbedding:
    """The table of a model whose head has the same one, in the head's packed weight."""

    def __init__(self, head: Linear, size: int) -> None:
        self._head = head
        self._size = size

    def weights(self, name: str) -> Weights:
        """The head's, under the table's name."""
        (weight,) = self._head.weights("").values()
        return {name: weight}

    def __call__(self, token_ids: Recorded) -> Recorded:
        return token_ids.recorder.embed_from_panels(self._head.packed_weight, self._size)
