"""Draws the next token of each request of a batch on a device, without a word to the host.

The tokens are those of `sampler.sample` from the same logits. A step's parameters go to the device in one copy, and
what it drew stays there for the next step; the host's copy is under way when `sample` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.outputs import TokenLogprobs
from engine.request import EngineRequest
from engine.sampling.device_state import DeviceState, to_device
from engine.sampling.sampler import SampleResult
from engine.sampling.state import NO_LOGPROBS
from kernels.gpu.logits import adjust_logits, aligned
from kernels.gpu.logprobs import token_logprobs
from kernels.gpu.sampling import Workspace, draw_tokens, pick_best
from kernels.gpu.sampling_row import MASK, MIN_LENGTH, POSITION, SOURCE, TEMPERATURE, WEIGHED


class DeviceLogprobs:
    """Log-probabilities on their way to the host."""

    def __init__(self, token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> None:
        self._arrays = to_host(token_ids), to_host(logprobs), to_host(ranks)

    def result(self) -> TokenLogprobs:
        """The caller makes sure that what was enqueued before has completed."""
        token_ids, logprobs, ranks = self._arrays
        return TokenLogprobs(token_ids.numpy(), logprobs.numpy(), ranks.numpy())


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSamples:
    """What a step drew.

    Attributes:
        token_ids: int32 [n] on the device; 0 for a row without a usable logit.
    """

    token_ids: Tensor
    _drawn: Tensor
    _logprobs: DeviceLogprobs | None
    _alternatives: np.ndarray

    def result(self) -> SampleResult:
        """The same on the host. The caller makes sure that what was enqueued before has completed."""
        token_ids, broken = self._drawn.numpy()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            found = self._logprobs.result()
            for i, place in enumerate(np.flatnonzero(self._alternatives != NO_LOGPROBS).tolist()):
                row, columns = slice(i, i + 1), 1 + int(self._alternatives[place])
                logprobs[place] = TokenLogprobs(
                    found.token_ids[row, :columns], found.logprobs[row, :columns], found.ranks[row]
                )
        return SampleResult(token_ids.astype(np.int64), logprobs, tuple(np.flatnonzero(broken).tolist()))


class DeviceSampler:
    """Sampling of a worker's running requests on its device.

    Owned by the worker and touched on its thread alone. All device work is enqueued on the current stream, always the
    same one, and nothing waits for it. Memory: 4 bytes for each row and token of the vocabulary, from the start; as
    much again during `sample` for rows whose logits are adjusted.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._state = DeviceState(max_num_seqs, vocab_size, device)
        self._workspace = Workspace.allocate(max_num_seqs, vocab_size, device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)

    def add(self, row: int, spec: EngineRequest, token_ids: Sequence[int]) -> None:
        """Gives a row to a request, whatever the row held before.

        Args:
            token_ids: all of its tokens so far; its output begins where the original prompt ends.
        """
        self._state.add(row, spec, token_ids)

    def remove(self, row: int) -> None:
        """Frees a row and all that it held."""
        self._state.remove(row)

    def sample(
        self,
        logits: Tensor,
        table_rows: np.ndarray,
        num_tokens: np.ndarray,
        *,
        allowed: Tensor | None = None,
        constrained: np.ndarray | None = None,
    ) -> DeviceSamples:
        """The next token of each row; penalties count it at once.

        Args:
            logits: [n, vocab], raw, on the device; bfloat16, float16 or float32; not changed. NaN counts as -inf, +inf
                as the largest number.
            table_rows: integers [n], each logits row's row here.
            num_tokens: integers [n], tokens that the sequence has, which is the position of the next one.
            allowed: int32 [masks, ceil(vocab / 32)] on the device; bit t % 32 of word t // 32 is set where token t is
                allowed.
            constrained: integers [masks], which of the n rows they are for.
        """
        state, n = self._state, len(logits)
        aligned_logits = aligned(logits)
        params = state.table[table_rows]
        adjusted = state.always_adjusted[table_rows] | (num_tokens < params[:, MIN_LENGTH.value])
        if allowed is not None and constrained is not None:
            adjusted[constrained] = True
            params[constrained, MASK.value] = np.arange(len(constrained))
        if n > self._workspace.rows:
            self._workspace = Workspace.allocate(n, state.vocab_size, state.device)
        drawn = torch.empty(2, n, dtype=torch.int32, device=state.device)
        out = (self._workspace, drawn[0], drawn[1])
        greedy = not params[:, TEMPERATURE.value].any()
        num_adjusted = int(adjusted.sum())
        if greedy and num_adjusted == 0:
            if n:
                pick_best(aligned_logits, *out)
        else:
            params[:, POSITION.value] = num_tokens
            params[adjusted, SOURCE.value] = np.arange(num_adjusted)
            device_params = to_device(params, state.device)
            changed = self._nothing.view(torch.float32)
            if num_adjusted:
                masks = self._nothing if allowed is None else allowed
                changed = adjust_logits(aligned_logits, device_params, state.counts, masks, num_adjusted)
            row = (changed, device_params, state.counts)
            if greedy:
                pick_best(aligned_logits, *out, *row)
            else:
                draw_tokens(aligned_logits, *out, *row, any_weighed=bool(params[:, WEIGHED.value].any()))
        alternatives = np.minimum(state.logprobs[table_rows], state.vocab_size)
        return DeviceSamples(drawn[0], to_host(drawn), self._logprobs(logits, drawn[0], alternatives), alternatives)

    def prompt_logprobs(self, logits: Tensor, token_ids: np.ndarray, k: int) -> DeviceLogprobs:
        """Log-probabilities of one token a row and of the row's k best tokens.

        Args:
            logits: [n, vocab], raw, on the device.
            token_ids: integers [n] on the host.
            k: alternatives, 0 or more; cut to the vocabulary.
        """
        tokens = to_device(np.asarray(token_ids, np.int32), self._state.device)
        return DeviceLogprobs(*token_logprobs(logits, tokens, min(k, logits.shape[1])))

    def _logprobs(self, logits: Tensor, token_ids: Tensor, alternatives: np.ndarray) -> DeviceLogprobs | None:
        """Of the raw logits, for the rows that ask."""
        asking = np.flatnonzero(alternatives != NO_LOGPROBS)
        if asking.size == 0:
            return None
        if asking.size < len(alternatives):
            places = to_device(asking, self._state.device)
            logits, token_ids = logits.index_select(0, places), token_ids.index_select(0, places)
        return DeviceLogprobs(*token_logprobs(logits, token_ids, int(alternatives.max())))


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory that is under way, or the tensor itself where it is there."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
