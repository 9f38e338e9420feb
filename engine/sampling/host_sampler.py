"""Sampling from logits in host memory, or brought there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.outputs import TokenLogprobs
from engine.request import EngineRequest
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import SampleResult, sample
from engine.sampling.state import SamplingState
from kernels.cpu.library import CpuKernels


@dataclass(frozen=True, slots=True, eq=False)
class HostSamples:
    """What a step drew, known at once."""

    drawn: SampleResult

    @property
    def token_ids(self) -> np.ndarray:
        """int64 [n]; those of broken rows mean nothing."""
        return self.drawn.token_ids

    def result(self) -> SampleResult:
        return self.drawn


@dataclass(frozen=True, slots=True, eq=False)
class HostLogprobs:
    """Log-probabilities, known at once."""

    found: TokenLogprobs

    def result(self) -> TokenLogprobs:
        return self.found


class HostSampler:
    """Draws tokens with the C++ kernels, or with numpy where there are none. Touched on the worker's thread alone."""

    def __init__(self, max_num_seqs: int, vocab_size: int, kernels: CpuKernels | None = None) -> None:
        self._state = SamplingState(max_num_seqs, vocab_size, kernels)

    def add(self, row: int, spec: EngineRequest, token_ids: Sequence[int]) -> None:
        """Gives a row to a request; token_ids are all that it has so far."""
        self._state.add(row, spec, token_ids)

    def remove(self, row: int) -> None:
        self._state.remove(row)

    def sample(self, logits: torch.Tensor, rows: np.ndarray, num_tokens: np.ndarray) -> HostSamples:
        """Draws and remembers the next token of each row; see engine.sampling.sampler.sample."""
        drawn = sample(logits, self._state, rows, num_tokens)
        for place in np.flatnonzero(self._state.always_adjusted[rows]).tolist():
            if place not in drawn.broken:
                self._state.record(int(rows[place]), (int(drawn.token_ids[place]),))
        return HostSamples(drawn)

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: np.ndarray, k: int) -> HostLogprobs:
        """See engine.sampling.logprobs.token_logprobs."""
        return HostLogprobs(token_logprobs(logits, token_ids, k))
