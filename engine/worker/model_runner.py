"""Runs a step: rows → flat input → model → logits → tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.models import KVCache
from engine.outputs import SampledStep, SchedulerOutput, TokenLogprobs
from engine.protocols import AttentionBackend
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import sample
from engine.sampling.state import SamplingState
from engine.worker.input_batch import InputBatch
from engine.worker.model_input import InputBuffers, ModelInput
from kernels.cpu.library import CpuKernels

PROMPT_LOGPROB_ROWS = 256
"""Positions whose logits are held at once for prompt_logprobs: bounds the memory that they take."""


class CausalLM(Protocol):
    """A model, or the plan of one: see DecoderForCausalLM."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[KVCache],
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Prompt tokens of one request that a step predicts.

    Attributes:
        index: of the request in the step.
        start: the first of the tokens in the flat batch that predict them.
        targets: int64, what they are.
        alternatives: most likely tokens that are asked for beside each.
    """

    index: int
    start: int
    targets: np.ndarray
    alternatives: int


class ModelRunner:
    """One model with its KV blocks and the requests that it works on. Touched on the engine's thread alone."""

    def __init__(
        self,
        attention: AttentionBackend,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        device: torch.device,
        kernels: CpuKernels | None = None,
    ) -> None:
        self._model: CausalLM
        self._attention = attention
        self._batch = InputBatch(max_num_seqs, max_model_len, block_size)
        self._buffers = InputBuffers(max_num_batched_tokens, max_num_seqs, block_size)
        self._sampling = SamplingState(max_num_seqs, vocab_size, kernels)
        self._device = device
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # row: alternatives, tokens reported before
        self._kv_caches: list[KVCache] = []

    def bind(self, model: CausalLM, kv_caches: list[KVCache]) -> None:
        """Called once, before the first step."""
        self._model = model
        self._kv_caches = kv_caches

    @torch.inference_mode()
    def execute(self, work: SchedulerOutput) -> list[SampledStep]:
        """Computes one step; one result for each of work.steps, in order."""
        self._apply_deltas(work)
        if not work.steps:
            return []
        model_input = self._buffers.prepare(work, self._batch)
        self._attention.prepare(model_input.attention)
        token_ids, positions = model_input.token_ids.to(self._device), model_input.positions.to(self._device)
        sampling = np.array([index for index, step in enumerate(work.steps) if step.samples], np.int64)
        last_tokens = torch.from_numpy(model_input.query_start[sampling + 1] - 1).to(self._device)
        parts = self._prompt_parts(work, model_input)
        if parts:
            every = self._model.forward(token_ids, positions, self._kv_caches)
            prompt_logprobs = {part.index: self._compute_prompt_logprobs(part, every) for part in parts}
            hidden = every[last_tokens]
        else:
            prompt_logprobs = {}
            hidden = self._model.forward(token_ids, positions, self._kv_caches, last_tokens)
        return self._sample(work, model_input, sampling, hidden, prompt_logprobs)

    def reset(self) -> None:
        """Forgets all requests."""
        for row in self._batch.clear():
            self._sampling.remove(row)
        self._prompt_logprobs.clear()

    def _apply_deltas(self, work: SchedulerOutput) -> None:
        for request_id in work.released:
            if request_id in self._batch:
                row = self._batch.remove(request_id)
                self._sampling.remove(row)
                self._prompt_logprobs.pop(row, None)
        for start in work.starts:
            row = self._batch.add(start)
            self._sampling.add(row, start.spec, start.token_ids)
            if start.spec.params.prompt_logprobs is not None:
                self._prompt_logprobs[row] = (start.spec.params.prompt_logprobs, start.num_prompt_logprobs)
        for step in work.steps:
            if step.new_block_ids:
                self._batch.append_blocks(self._batch.row_of(step.request_id), step.new_block_ids)

    def _prompt_parts(self, work: SchedulerOutput, model_input: ModelInput) -> list[_PromptPart]:
        """The prompt tokens that this step predicts and whose log-probabilities are asked for."""
        parts: list[_PromptPart] = []
        if not self._prompt_logprobs:
            return parts
        for index, step in enumerate(work.steps):
            row = int(model_input.rows[index])
            if row not in self._prompt_logprobs:
                continue
            alternatives, num_reported = self._prompt_logprobs[row]
            # A position's logits are of the token after it; the first token of a prompt has none.
            first = max(step.num_computed_tokens, num_reported) + 1
            last = min(step.num_computed_tokens + step.num_tokens + 1, int(self._batch.num_prompt_tokens[row]))
            if first < last:
                start = int(model_input.query_start[index]) + first - 1 - step.num_computed_tokens
                targets = self._batch.token_ids[row, first:last].astype(np.int64)
                parts.append(_PromptPart(index, start, targets, alternatives))
        return parts

    def _compute_prompt_logprobs(self, part: _PromptPart, hidden: torch.Tensor) -> TokenLogprobs:
        chunks = []
        for at in range(0, len(part.targets), PROMPT_LOGPROB_ROWS):
            chosen = part.targets[at : at + PROMPT_LOGPROB_ROWS]
            logits = self._model.compute_logits(hidden[part.start + at : part.start + at + len(chosen)])
            chunks.append(token_logprobs(logits, chosen, part.alternatives))
        return _concatenate(chunks)

    def _sample(
        self,
        work: SchedulerOutput,
        model_input: ModelInput,
        sampling: np.ndarray,
        hidden: torch.Tensor,
        prompt_logprobs: dict[int, TokenLogprobs],
    ) -> list[SampledStep]:
        """
        Args:
            sampling: int64, the requests of the step that get a token.
            hidden: [len(sampling), hidden], of their last tokens.
            prompt_logprobs: by request of the step.
        """
        results = [SampledStep(prompt_logprobs=prompt_logprobs.get(index)) for index in range(len(work.steps))]
        if not len(sampling):
            return results
        rows = model_input.rows[sampling]
        logits = self._model.compute_logits(hidden)
        chosen = sample(logits, self._sampling, rows, self._batch.num_tokens[rows])
        usable = np.ones(len(rows), np.bool_)
        usable[list(chosen.broken)] = False
        self._batch.append_tokens(rows[usable], chosen.token_ids[usable])
        drawn = zip(sampling.tolist(), rows.tolist(), chosen.token_ids.tolist(), strict=True)
        for place, (index, row, token) in enumerate(drawn):
            if place in chosen.broken:
                results[index] = SampledStep(error="the model gave no usable logits (NaN) for this request")
                continue
            self._sampling.record(row, (token,))
            results[index] = SampledStep((token,), chosen.logprobs[place], prompt_logprobs.get(index))
        return results


def _concatenate(chunks: list[TokenLogprobs]) -> TokenLogprobs:
    if len(chunks) == 1:
        return chunks[0]
    return TokenLogprobs(
        np.concatenate([chunk.token_ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        np.concatenate([chunk.ranks for chunk in chunks]),
    )
