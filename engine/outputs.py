"""What comes out of each stage: a step's schedule, what the device made of it, what a client is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.request import EngineRequest, FinishReason
from engine.step_times import NO_STEPS, StepTimes

if TYPE_CHECKING:
    import numpy as np


# ---- scheduler → executor ----


@dataclass(frozen=True, slots=True)
class ScheduledStart:
    """A request that (again) gets a row in the executor: new, or resumed after a preemption.

    Attributes:
        token_ids: all of its tokens so far, prompt and output.
        block_ids: all of its KV blocks, in the order of its tokens.
        num_computed_tokens: how many leading tokens need no computation.
        num_prompt_logprobs: rows of prompt logprobs that were put out before; steps give only later ones.
    """

    spec: EngineRequest
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What one request computes in one step.

    Attributes:
        num_tokens: tokens to compute from num_computed_tokens on, drafts included.
        new_block_ids: KV blocks it got since its last step (empty beside a ScheduledStart).
        samples: whether the step reaches its last token, so that a new one is sampled.
        spec_token_ids: drafts that this step verifies, its last num_tokens entries.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool
    spec_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. `steps` is the order of the flat batch.

    Attributes:
        starts: requests that need a row before this step; each is in `steps` as well.
        released: requests whose row is free before this step: finished, aborted or preempted.
    """

    steps: tuple[ScheduledStep, ...]
    starts: tuple[ScheduledStart, ...] = ()
    released: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)


# ---- executor → core ----


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens, of the raw logits.

    Attributes:
        token_ids: int32 [tokens, 1 + k]; the token itself, then the k best, best first.
        logprobs: float32 [tokens, 1 + k], of the same.
        ranks: int32 [tokens]; the token's own place among all, 1 is the best.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SampledStep:
    """What a request's step gave, in the order of SchedulerOutput.steps.

    Attributes:
        token_ids: new tokens: none in the middle of a prompt, one usually, more with accepted drafts.
        logprobs: of token_ids, where the request asked for them.
        prompt_logprobs: of the prompt tokens that this step predicted, where asked for: rows for the tokens at
            positions num_computed_tokens + 1 … of the prompt, without those put out before (ScheduledStart).
    """

    token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    error: str | None = None


# ---- core → text side ----


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """What one request's way through one engine took.

    Attributes:
        queued_at, scheduled_at, first_token_at, finished_at: in seconds by the engine's clock; None until they come.
        num_generated_tokens: that this engine generated so far.
    """

    queued_at: float
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EngineOutput:
    """What a step gave one request, as it travels from an engine to the text side.

    Attributes:
        new_token_ids: may be empty (a part of prompt_logprobs, an abort).
        logprobs: rows for new_token_ids.
        prompt_logprobs: rows for the next part of the prompt; the first token of a prompt has none.
        finish_reason: set on the request's last output.
        stop_reason: the stop token that ended it, where that was not an end-of-sequence token.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        timing: on the output with the first token and on the last output.
        error: what went wrong, where finish_reason is ERROR.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is after a step.

    Attributes:
        running, waiting: requests.
        queued_prefill_tokens: prompt tokens that waiting and running requests still have to compute, without those
            that the prefix cache had when the request came; what several have in common counts once.
        kv_blocks_used, kv_blocks_total: blocks that running requests hold, and all there are.
        received: requests that the engine has taken in so far, those that have ended included.
        step_times: of its steps lately.
    """

    running: int
    waiting: int
    queued_prefill_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    received: int = 0
    step_times: StepTimes = NO_STEPS


# ---- text side → user ----


class Logprob(NamedTuple):
    """A token's log-probability, its rank (1 is the best) and its text."""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobDict = dict[int, Logprob]
"""Token id to Logprob, the chosen token first."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n completions of a prompt.

    Attributes:
        text, token_ids: so far, or only what is new in a delta.
        cumulative_logprob: sum over all token_ids so far; None where logprobs were not asked for.
        logprobs: one entry for each of token_ids.
        finish_reason: `stop`, `length`, `abort` or `error`; None while it goes on.
        stop_reason: the stop string or stop token that ended it; None for end-of-sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What a prompt gave: n completions.

    Attributes:
        prompt: its text, where it came as text.
        prompt_logprobs: one entry for each prompt token, the first is None.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        timing: of the first completion.
        error: what went wrong, where a completion's finish_reason is `error`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobDict | None] | None = None
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
