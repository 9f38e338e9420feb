"""What sampling remembers of the requests that a worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.request import EngineRequest
from engine.sampling.penalties import Penalties
from kernels.cpu.library import CpuKernels
from kernels.cpu.sampling_library import SamplingRow

_SEED_MASK = 2**64 - 1
NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Adjustments:
    """What changes a request's logits before anything is chosen. Token ids outside the vocabulary are left out.

    Attributes:
        stop_ids: tokens that cannot come while the sequence is shorter than its min_length.
        bias_ids, bias_values: int64 and float32 [biases].
        penalties: None where the request has none.
    """

    stop_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    penalties: Penalties | None


class SamplingState:
    """Sampling parameters of all running requests, one row each, a row for a request's life.

    Owned by a worker and touched on its thread alone. Everything lies in host memory, whatever device the logits are
    on; only rows with penalties hold arrays of the vocabulary's size.

    Attributes:
        kernels: what samples from logits on a CPU in place of numpy; None is numpy.
        table: SamplingRow [rows], all that follows up to min_length, as the kernels read it.
        temperature: float32 [rows]; 0 takes the best token.
        top_k: int64 [rows], vocab_size where it is off. top_p, min_p: float64 [rows].
        seed: uint64 [rows].
        logprobs: int64 [rows], alternatives to report; NO_LOGPROBS is nothing at all.
        min_length: int64 [rows]; a sequence with fewer tokens, prompt included, cannot stop.
        always_adjusted: bool [rows], whether a bias or a penalty changes the logits at every step.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, kernels: CpuKernels | None = None) -> None:
        self.vocab_size = vocab_size
        self.kernels = kernels
        self.table = np.zeros(max_num_seqs, np.dtype(SamplingRow))
        self.temperature = self.table["temperature"]
        self.top_k = self.table["top_k"]
        self.top_p = self.table["top_p"]
        self.min_p = self.table["min_p"]
        self.seed = self.table["seed"]
        self.logprobs = self.table["logprobs"]
        self.min_length = self.table["min_length"]
        self.always_adjusted = np.zeros(max_num_seqs, np.bool_)
        self._adjustments: dict[int, _Adjustments] = {}
        for row in range(max_num_seqs):
            self.remove(row)

    def add(self, row: int, spec: EngineRequest, token_ids: Sequence[int]) -> None:
        """Gives a row to a request, whatever the row held before.

        Args:
            token_ids: all of its tokens so far; its output begins where the original prompt ends.
        """
        self.remove(row)
        params, num_prompt = spec.params, len(spec.prompt_token_ids)
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = int(spec.seed) & _SEED_MASK
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if params.min_tokens > 0:
            self.min_length[row] = num_prompt + params.min_tokens
        penalties = None
        if params.needs_penalties:
            penalties = Penalties(params, self.vocab_size, token_ids[:num_prompt], token_ids[num_prompt:])
        self.always_adjusted[row] = bool(params.logit_bias) or penalties is not None
        if self.always_adjusted[row] or params.min_tokens > 0:
            bias = {token: value for token, value in params.logit_bias.items() if token < self.vocab_size}
            stops = {*spec.eos_token_ids, *params.stop_token_ids}
            self._adjustments[row] = _Adjustments(
                stop_ids=np.array(sorted(token for token in stops if token < self.vocab_size), np.int64),
                bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
                bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
                penalties=penalties,
            )
            self._point_at(row, self._adjustments[row])

    def remove(self, row: int) -> None:
        """Frees a row and all that it held."""
        self.table[row] = np.zeros((), self.table.dtype)
        self.table["repetition"][row] = 1
        self.top_k[row] = self.vocab_size
        self.top_p[row] = 1
        self.logprobs[row] = NO_LOGPROBS
        self.always_adjusted[row] = False
        self._adjustments.pop(row, None)

    def record(self, row: int, token_ids: Sequence[int]) -> None:
        """Tells of tokens that were appended to a row's sequence."""
        adjustments = self._adjustments.get(row)
        if adjustments is not None and adjustments.penalties is not None:
            adjustments.penalties.record(token_ids)
            self._point_at_seen(row, adjustments.penalties)

    def adjusted(self, row: int, num_tokens: int, logits: np.ndarray) -> np.ndarray:
        """A copy of a row's logits, float32 [vocab], after min_tokens, logit_bias and penalties, in that order."""
        logits = logits.copy()
        adjustments = self._adjustments[row]
        if num_tokens < self.min_length[row]:
            logits[adjustments.stop_ids] = -np.inf
        logits[adjustments.bias_ids] += adjustments.bias_values
        if adjustments.penalties is not None:
            adjustments.penalties.apply(logits)
        return logits

    def _point_at(self, row: int, adjustments: _Adjustments) -> None:
        entry = self.table[row]
        entry["stop_ids"], entry["stops"] = adjustments.stop_ids.ctypes.data, adjustments.stop_ids.size
        entry["bias_ids"], entry["biases"] = adjustments.bias_ids.ctypes.data, adjustments.bias_ids.size
        entry["bias_values"] = adjustments.bias_values.ctypes.data
        if adjustments.penalties is not None:
            entry["repetition"] = adjustments.penalties.repetition
            self._point_at_seen(row, adjustments.penalties)

    def _point_at_seen(self, row: int, penalties: Penalties) -> None:
        entry = self.table[row]
        entry["seen"] = penalties.seen
        entry["seen_ids"] = penalties.ids.ctypes.data
        entry["frequency_losses"] = penalties.frequency_losses.ctypes.data
        entry["presence_losses"] = penalties.presence_losses.ctypes.data
