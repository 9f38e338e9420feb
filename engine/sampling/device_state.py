"""What sampling on a device remembers of the requests that a worker runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.request import EngineRequest
from engine.sampling.state import NO_LOGPROBS
from kernels.gpu.logits import UNIT, count_tokens, row_units
from kernels.gpu.sampling import is_weighed
from kernels.gpu.sampling_row import (
    ENTRIES,
    FIELDS,
    FLOOR,
    FREQUENCY,
    MASK,
    MIN_LENGTH,
    NUM_ENTRIES,
    PRESENCE,
    REPETITION,
    SEED,
    SOURCE,
    TABLE_ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WEIGHED,
)

_SEED_MASK = 2**64 - 1


class DeviceState:
    """Sampling parameters of all running requests, one row each, a row for a request's life.

    Owned by a DeviceSampler and touched on its thread alone. What a step sends lies in host memory; what penalties
    count and lists of tokens lie on the device, where they are changed in the order of the current stream.

    Attributes:
        table: int64 [rows, FIELDS], as the kernels read it.
        logprobs: int64 [rows], alternatives to report; NO_LOGPROBS is nothing at all.
        always_adjusted: bool [rows], whether a bias or a penalty changes the logits at every step.
        counts: int32 [rows, whole units of the vocabulary] on the device, (times in the output << 1) | in the prompt.
            Only rows with penalties have their tokens there.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.table = np.zeros((max_num_seqs, FIELDS.value), np.int64)
        self.logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.always_adjusted = np.zeros(max_num_seqs, np.bool_)
        self.counts = torch.zeros(max_num_seqs, row_units(vocab_size) * UNIT, dtype=torch.int32, device=device)
        self._entries: dict[int, Tensor] = {}
        for row in range(max_num_seqs):
            self.remove(row)

    def add(self, row: int, spec: EngineRequest, token_ids: Sequence[int]) -> None:
        """Gives a row to a request, whatever the row held before.

        Args:
            token_ids: all of its tokens so far; its output begins where the original prompt ends.
        """
        self.remove(row)
        params, num_prompt, vocab = spec.params, len(spec.prompt_token_ids), self.vocab_size
        entry = self.table[row]
        top_k = min(params.top_k, vocab) if params.top_k > 0 else vocab
        # With top_k = 1 the best token is all that is left.
        entry[TEMPERATURE.value] = 0 if top_k == 1 else _bits(params.temperature)
        entry[TOP_K.value] = top_k
        entry[TOP_P.value] = _bits64(params.top_p)
        entry[FLOOR.value] = _bits(lowest_scaled(params.min_p))
        entry[WEIGHED.value] = is_weighed(top_k, params.top_p, vocab)
        entry[SEED.value] = np.array(int(spec.seed) & _SEED_MASK, np.uint64).view(np.int64)
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if params.min_tokens > 0:
            entry[MIN_LENGTH.value] = num_prompt + params.min_tokens
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab}
        stops = {*spec.eos_token_ids, *params.stop_token_ids} if params.min_tokens > 0 else set()
        tokens = sorted({*bias, *(token for token in stops if token < vocab)})
        if tokens:
            entries = np.zeros((3, len(tokens)), np.int32)
            entries[0] = tokens
            entries[1] = np.array([bias.get(token, 0.0) for token in tokens], np.float32).view(np.int32)
            entries[2] = [token in stops for token in tokens]
            self._entries[row] = to_device(entries, self.device)
            entry[ENTRIES.value], entry[NUM_ENTRIES.value] = self._entries[row].data_ptr(), len(tokens)
        if params.needs_penalties:
            self._start_counting(row, spec, token_ids)
        self.always_adjusted[row] = bool(bias) or params.needs_penalties

    def remove(self, row: int) -> None:
        """Frees a row and all that it held."""
        entry = self.table[row]
        entry[:] = 0
        entry[[TABLE_ROW.value, SOURCE.value, MASK.value]] = -1
        entry[TOP_K.value], entry[TOP_P.value] = self.vocab_size, _bits64(1.0)
        entry[FLOOR.value], entry[REPETITION.value] = _bits(-np.inf), _bits(1.0)
        self.logprobs[row] = NO_LOGPROBS
        self.always_adjusted[row] = False
        self._entries.pop(row, None)

    def _start_counting(self, row: int, spec: EngineRequest, token_ids: Sequence[int]) -> None:
        params, num_prompt, entry = spec.params, len(spec.prompt_token_ids), self.table[row]
        entry[TABLE_ROW.value] = row
        entry[REPETITION.value] = _bits(params.repetition_penalty)
        entry[PRESENCE.value] = _bits(params.presence_penalty)
        entry[FREQUENCY.value] = _bits(params.frequency_penalty)
        if params.repetition_penalty == 1.0:  # The other penalties do not look at the prompt.
            token_ids, num_prompt = token_ids[num_prompt:], 0
        self.counts[row].zero_()
        if token_ids:
            counted = to_device(np.array(token_ids, np.int32), self.device)
            count_tokens(self.counts[row], counted, num_prompt)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, which the host does not wait for."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


def lowest_scaled(min_p: float) -> float:
    """The least float32 whose exponential is min_p or more, -inf for 0.

    Floats of one sign are ordered by their bits, in which it is searched for.
    """
    if min_p <= 0:
        return -np.inf
    enough, too_far = 0, 0x44800000  # the bits of 0 and of 1024
    while too_far - enough > 1:
        middle = (enough + too_far) // 2
        size = np.array(middle, np.uint32).view(np.float32)
        if np.exp(-size, dtype=np.float64) >= min_p:
            enough = middle
        else:
            too_far = middle
    return -float(np.array(enough, np.uint32).view(np.float32))


def _bits(value: float) -> int:
    return int(np.array(value, np.float32).view(np.uint32))


def _bits64(value: float) -> int:
    return int(np.array(value, np.float64).view(np.int64))
