"""Penalties on tokens that a request has already seen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.sampling_params import SamplingParams


class Penalties:
    """Repetition, presence and frequency penalties of one request, and the tokens that they count.

    Owned by a SamplingState. Repetition looks at prompt and output, the other two at the output alone, which begins
    where the original prompt ends.

    Source: Keskar et al. 2019, "CTRL" (repetition).
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Iterable[int], output_ids: Iterable[int]
    ) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._output_counts = np.zeros(vocab_size, np.int32)
        self._seen = np.zeros(vocab_size, np.bool_)
        if self._repetition != 1.0:
            self._seen[list(prompt_ids)] = True
        self.record(output_ids)

    def record(self, token_ids: Iterable[int]) -> None:
        """Counts tokens that were appended to the output."""
        for token in token_ids:
            self._output_counts[token] += 1
            self._seen[token] = True

    def apply(self, logits: np.ndarray) -> None:
        """Changes a row of logits, float32 [vocab], in place."""
        ids = np.flatnonzero(self._seen)
        values, counts = logits[ids], self._output_counts[ids]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts.astype(np.float32)
        values -= self._presence * (counts > 0).astype(np.float32)
        logits[ids] = values
