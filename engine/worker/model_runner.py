"""Runs a step: rows → flat input → model → logits → tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from engine.outputs import SampledStep, ScheduledStart, ScheduledStep, SchedulerOutput, TokenLogprobs
from engine.protocols import AttentionBackend, KVCache
from engine.request import EngineRequest
from engine.sampling.sampler import SampleResult
from engine.worker.fence import fence
from engine.worker.model_input import ModelInput

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


class Samples(Protocol):
    """Tokens that were drawn where the logits are.

    Attributes:
        token_ids: integers [n], as the buffers take them.
    """

    @property
    def token_ids(self) -> Any: ...

    def result(self) -> SampleResult:
        """On the host; called once the device has done all that was enqueued with it."""
        ...


class Logprobs(Protocol):
    """Log-probabilities that were computed where the logits are."""

    def result(self) -> TokenLogprobs:
        """As of Samples."""
        ...


class Sampler(Protocol):
    """Draws tokens; it keeps what it needs of each request in the request's row."""

    def add(self, row: int, spec: EngineRequest, token_ids: Sequence[int]) -> None: ...

    def remove(self, row: int) -> None: ...

    def sample(self, logits: torch.Tensor, rows: np.ndarray, num_tokens: np.ndarray) -> Samples: ...

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: np.ndarray, k: int) -> Logprobs: ...


class Buffers(Protocol):
    """The requests' rows, and a step's flat input made of them: on the host, or on the device."""

    def __contains__(self, request_id: str) -> bool: ...

    def row_of(self, request_id: str) -> int: ...

    def add(self, start: ScheduledStart) -> int: ...

    def remove(self, request_id: str) -> int: ...

    def clear(self) -> list[int]: ...

    def append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None: ...

    def prepare(self, work: SchedulerOutput, padded: int | None = None) -> ModelInput: ...

    def append_tokens(self, rows: np.ndarray, token_ids: Any) -> None: ...


class _PromptLogprobs(NamedTuple):
    """What a request wants to know of its prompt.

    Attributes:
        alternatives: most likely tokens that are asked for beside each of the prompt's.
        num_reported: rows that were put out before.
        token_ids: int64, the prompt.
    """

    alternatives: int
    num_reported: int
    token_ids: np.ndarray


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


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the device works on. See engine.protocols.StepHandle.

    Attributes:
        num_steps: requests in it.
        sampling: int64, those that get a token.
        samples: theirs; None where there are none.
        prompt_logprobs: by request of the step, in chunks.
        wait: returns when the device has done all of it.
    """

    num_steps: int
    sampling: np.ndarray
    samples: Samples | None
    prompt_logprobs: dict[int, list[Logprobs]]
    wait: Callable[[], None]

    def result(self) -> list[SampledStep]:
        """One for each request of the step, in order."""
        self.wait()
        prompts = {
            index: _concatenate([chunk.result() for chunk in chunks]) for index, chunks in self.prompt_logprobs.items()
        }
        results = [SampledStep(prompt_logprobs=prompts.get(index)) for index in range(self.num_steps)]
        if self.samples is None:
            return results
        drawn = self.samples.result()
        for place, (index, token) in enumerate(zip(self.sampling.tolist(), drawn.token_ids.tolist(), strict=True)):
            if place in drawn.broken:
                results[index] = SampledStep(error="the model gave no usable logits (NaN) for this request")
            else:
                results[index] = SampledStep((token,), drawn.logprobs[place], prompts.get(index))
        return results


class DecodeGraphs(Protocol):
    """Decode steps of certain sizes that a device replays as a whole."""

    def padded_size(self, num_requests: int) -> int | None:
        """The size that serves so many requests; None where there is none."""
        ...

    def replay(self, padded: int) -> torch.Tensor:
        """Logits [padded, vocab] of the step that the buffers were prepared for."""
        ...


class ModelRunner:
    """One model with its KV blocks and the requests that it works on. Touched on the worker's thread alone.

    What differs between devices is passed in: where the rows are kept, what samples, and what repeats decode steps.
    """

    def __init__(
        self, attention: AttentionBackend, buffers: Buffers, sampler: Sampler, *, device: torch.device
    ) -> None:
        self._attention = attention
        self._buffers = buffers
        self._sampler = sampler
        self._device = device
        self._model: CausalLM
        self._kv_caches: list[KVCache] = []
        self._graphs: DecodeGraphs | None = None
        self._prompt_logprobs: dict[int, _PromptLogprobs] = {}

    def bind(self, model: CausalLM, kv_caches: list[KVCache], graphs: DecodeGraphs | None = None) -> None:
        """Called once, before the first step."""
        self._model = model
        self._kv_caches = kv_caches
        self._graphs = graphs

    @torch.inference_mode()
    def submit(self, work: SchedulerOutput) -> StepInFlight:
        """Begins a step; on a GPU it returns long before the step is done.

        What the step draws is where the next one looks for it, so that this one need not be waited for.
        """
        self._apply_deltas(work)
        if not work.steps:
            return StepInFlight(0, np.empty(0, np.int64), None, {}, fence(self._device))
        padded = self._padded_size(work.steps)
        model_input = self._buffers.prepare(work, padded)
        if padded is not None and self._graphs is not None:
            logits: torch.Tensor | None = self._graphs.replay(padded)[: len(work.steps)]
            prompt_logprobs: dict[int, list[Logprobs]] = {}
        else:
            prompt_logprobs, logits = self._compute(model_input, self._prompt_parts(work.steps, model_input))
        samples = None
        if logits is not None:
            rows = model_input.rows[model_input.sampling]
            samples = self._sampler.sample(logits, rows, model_input.num_tokens[model_input.sampling])
            self._buffers.append_tokens(rows, samples.token_ids)
        return StepInFlight(len(work.steps), model_input.sampling, samples, prompt_logprobs, fence(self._device))

    def reset(self) -> None:
        """Forgets all requests."""
        for row in self._buffers.clear():
            self._sampler.remove(row)
        self._prompt_logprobs.clear()

    def _apply_deltas(self, work: SchedulerOutput) -> None:
        for request_id in work.released:
            if request_id in self._buffers:
                row = self._buffers.remove(request_id)
                self._sampler.remove(row)
                self._prompt_logprobs.pop(row, None)
        for start in work.starts:
            row = self._buffers.add(start)
            self._sampler.add(row, start.spec, start.token_ids)
            if start.spec.params.prompt_logprobs is not None:
                self._prompt_logprobs[row] = _PromptLogprobs(
                    start.spec.params.prompt_logprobs,
                    start.num_prompt_logprobs,
                    np.array(start.spec.prompt_token_ids, np.int64),
                )
        for step in work.steps:
            if step.new_block_ids:
                self._buffers.append_blocks(self._buffers.row_of(step.request_id), step.new_block_ids)

    def _padded_size(self, steps: Sequence[ScheduledStep]) -> int | None:
        """Of the graph that runs a step; None where none does."""
        if self._graphs is None or self._prompt_logprobs or any(step.num_tokens > 1 for step in steps):
            return None
        return self._graphs.padded_size(len(steps)) if all(step.samples for step in steps) else None

    def _compute(
        self, model_input: ModelInput, parts: list[_PromptPart]
    ) -> tuple[dict[int, list[Logprobs]], torch.Tensor | None]:
        """Log-probabilities of prompt tokens, and logits [len(sampling), vocab] to sample from."""
        self._attention.prepare(model_input.attention)
        inputs = model_input.token_ids, model_input.positions, self._kv_caches
        if parts:
            every = self._model.forward(*inputs)
            prompt_logprobs = {part.index: self._compute_prompt_logprobs(part, every) for part in parts}
            hidden = every.index_select(0, model_input.kept)
        else:
            prompt_logprobs = {}
            hidden = self._model.forward(*inputs, model_input.kept)
        return prompt_logprobs, self._model.compute_logits(hidden) if len(model_input.sampling) else None

    def _prompt_parts(self, steps: Sequence[ScheduledStep], model_input: ModelInput) -> list[_PromptPart]:
        """The prompt tokens that a step predicts and whose log-probabilities are asked for."""
        parts: list[_PromptPart] = []
        if not self._prompt_logprobs:
            return parts
        for index, step in enumerate(steps):
            wanted = self._prompt_logprobs.get(int(model_input.rows[index]))
            if wanted is None:
                continue
            # A position's logits are of the token after it; the first token of a prompt has none.
            first = max(step.num_computed_tokens, wanted.num_reported) + 1
            targets = wanted.token_ids[first : step.num_computed_tokens + step.num_tokens + 1]
            if step.num_computed_tokens + step.num_tokens >= len(wanted.token_ids):
                del self._prompt_logprobs[int(model_input.rows[index])]  # these are the last
            if len(targets):
                start = int(model_input.query_start[index]) + first - 1 - step.num_computed_tokens
                parts.append(_PromptPart(index, start, targets, wanted.alternatives))
        return parts

    def _compute_prompt_logprobs(self, part: _PromptPart, hidden: torch.Tensor) -> list[Logprobs]:
        chunks = []
        for at in range(0, len(part.targets), PROMPT_LOGPROB_ROWS):
            chosen = part.targets[at : at + PROMPT_LOGPROB_ROWS]
            logits = self._model.compute_logits(hidden[part.start + at : part.start + at + len(chosen)])
            chunks.append(self._sampler.prompt_logprobs(logits, chosen, part.alternatives))
        return chunks


def _concatenate(chunks: list[TokenLogprobs]) -> TokenLogprobs:
    if len(chunks) == 1:
        return chunks[0]
    return TokenLogprobs(
        np.concatenate([chunk.token_ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        np.concatenate([chunk.ranks for chunk in chunks]),
    )
