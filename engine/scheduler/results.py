"""What a step's results mean for a request: its new tokens, and where it ends."""

from __future__ import annotations

from typing import NamedTuple

from engine.outputs import EngineOutput, RequestTiming, SampledStep, ScheduledStep, TokenLogprobs
from engine.request import FinishReason, Request


class Stop(NamedTuple):
    """Why a request ends, and after how many of the tokens it was given.

    Attributes:
        stop_reason: the one of its params' stop tokens that ended it.
    """

    num_kept: int
    reason: FinishReason
    stop_reason: int | None = None


def token_limit(request: Request, max_model_len: int) -> int:
    """Tokens, prompt and output, at which it ends; max_tokens counts from the original prompt."""
    max_tokens = request.spec.params.max_tokens
    return max_model_len if max_tokens is None else min(max_model_len, request.num_prompt_tokens + max_tokens)


def waits_for_result(request: Request, max_model_len: int) -> bool:
    """Whether a running request with pending tokens has no part in the next step.

    So where what it computes next depends on which tokens these are (a grammar, drafts), and where they are its last:
    whatever they are, it then ends with them.
    """
    if request.spec_token_ids or request.spec.grammar is not None:
        return True
    return request.num_tokens + request.num_pending_tokens >= token_limit(request, max_model_len)


def find_stop(request: Request, new_token_ids: tuple[int, ...], max_model_len: int) -> Stop | None:
    """The first of new tokens, not yet appended, that ends a request.

    An end-of-sequence token counts before a stop token, and both before a limit that is reached with the same token.
    """
    spec = request.spec
    params = spec.params
    num_output, num_left = request.num_output_tokens, token_limit(request, max_model_len) - request.num_tokens
    for count, token_id in enumerate(new_token_ids, 1):
        if num_output + count >= params.min_tokens:
            if token_id in spec.eos_token_ids:
                return Stop(count, FinishReason.STOP)
            if token_id in params.stop_token_ids:
                return Stop(count, FinishReason.STOP, token_id)
        if count >= num_left:
            return Stop(count, FinishReason.LENGTH)
    return None


def apply_result(
    request: Request, step: ScheduledStep, result: SampledStep, max_model_len: int
) -> tuple[tuple[int, ...], TokenLogprobs | None, Stop | None, int]:
    """Appends a step's new tokens, which are pending no longer, up to the one that ends the request.

    Keys and values of rejected drafts stay in the blocks, beyond num_computed_tokens, to be overwritten: a step that
    verifies drafts is followed by none that starts from it before its result is here.

    Returns:
        The tokens, their logprobs, the end, and the number of computed tokens as of this step, whatever later ones in
        flight compute.
    """
    new, logprobs = result.token_ids, result.logprobs
    computed = step.num_computed_tokens + step.num_tokens
    if step.samples:
        request.num_pending_tokens -= 1 + len(step.spec_token_ids)
        if request.spec_token_ids:
            request.spec_token_ids = []  # verified, or made for a token that has come meanwhile
    if step.spec_token_ids:
        computed -= len(step.spec_token_ids) - (len(new) - 1)
        if request.is_running:
            request.num_computed_tokens = computed
    stop = find_stop(request, new, max_model_len) if new else None
    if stop is not None and stop.num_kept < len(new):
        new = new[: stop.num_kept]
        logprobs = None if logprobs is None else _first_rows(logprobs, stop.num_kept)
    request.token_ids.extend(new)
    if result.prompt_logprobs is not None:
        request.num_prompt_logprobs += len(result.prompt_logprobs.ranks)
    return new, logprobs, stop, min(computed, len(request.token_ids))


def last_output(request: Request, error: str | None) -> EngineOutput:
    """Of a request that ended without new tokens."""
    return EngineOutput(
        request.request_id,
        finish_reason=request.finish_reason,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        timing=timing_of(request),
        error=error,
    )


def timing_of(request: Request) -> RequestTiming:
    return RequestTiming(
        request.queued_at,
        request.scheduled_at,
        request.first_token_at,
        request.finished_at,
        request.num_output_tokens - len(request.spec.output_token_ids),
    )


def _first_rows(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    return TokenLogprobs(logprobs.token_ids[:count], logprobs.logprobs[:count], logprobs.ranks[:count])
