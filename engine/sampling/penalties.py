"""Penalties on tokens that a request has already seen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.sampling_params import SamplingParams

_ROOM = 256


class Penalties:
    """Repetition, presence and frequency penalties of one request, and the tokens that they count.

    Owned by a SamplingState. Repetition looks at prompt and output, the other two at the output alone, which begins
    where the original prompt ends. Whatever is in either is one of `seen` tokens.

    Attributes:
        repetition: 1 where it is off.
        seen: tokens that a penalty touches.
        ids: int64, distinct; the first `seen` count. The arrays are replaced when they are full.
        frequency_losses, presence_losses: float32, what those penalties take from the tokens' logits.

    Source: Keskar et al. 2019, "CTRL" (repetition).
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Iterable[int], output_ids: Iterable[int]
    ) -> None:
        self.repetition = params.repetition_penalty
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        ids = np.unique(np.array(list(prompt_ids), np.int64)) if self.repetition != 1.0 else np.empty(0, np.int64)
        self.seen = ids.size
        room = np.zeros(_ROOM, np.float32)
        self.ids = np.concatenate((ids, room.astype(np.int64)))
        self.frequency_losses = np.concatenate((np.zeros(ids.size, np.float32), room))
        self.presence_losses = self.frequency_losses.copy()
        self._counts = np.zeros(vocab_size, np.int32)
        self._places = np.full(vocab_size, -1, np.int32)
        self._places[ids] = np.arange(ids.size)
        self.record(output_ids)

    def record(self, token_ids: Iterable[int]) -> None:
        """Counts tokens that were appended to the output."""
        for token in token_ids:
            place = self._places[token]
            if place < 0:
                place = self._places[token] = self._new_place()
                self.ids[place] = token
            self._counts[token] += 1
            self.frequency_losses[place] = self._frequency * np.float32(self._counts[token])
            self.presence_losses[place] = self._presence

    def apply(self, logits: np.ndarray) -> None:
        """Changes a row of logits, float32 [vocab], in place."""
        ids = self.ids[: self.seen]
        values = logits[ids]
        if self.repetition != 1.0:
            values = np.where(values > 0, values / self.repetition, values * self.repetition)
        values -= self.frequency_losses[: self.seen]
        values -= self.presence_losses[: self.seen]
        logits[ids] = values

    def _new_place(self) -> int:
        if self.seen == self.ids.size:
            for name in ("ids", "frequency_losses", "presence_losses"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self.seen += 1
        return self.seen - 1
