"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.openai.body import parse_body
from app.openai.errors import json_response
from app.openai.generation import Delta, Generation
from app.openai.logprobs import completion_logprobs, prompt_logprobs
from app.openai.protocol import COMPLETION_MAX_TOKENS, CompletionRequest
from app.openai.service import Call, Service, ending_at, logprobs_asked, on_cpu, usage_of
from engine.outputs import CompletionOutput, RequestOutput, TokenLogprobDict
from engine.processor import ProcessedRequest
from engine.sampling_params import InvalidParameter, SamplingParams


async def create_completion(service: Service, request: Request) -> Response:
    body = await parse_body(request, CompletionRequest, service.limits.max_body_bytes)
    call = service.call(request, service.model(body.model), body, "cmpl")
    prompts = body.prompts()
    params = completion_params(body, call)
    service.check_choices(len(prompts), params.n)
    size = sum(map(len, prompts))
    processed = await on_cpu(size, lambda: process_completion(prompts, params, body, call))
    echo = await on_cpu(size, lambda: [_text(prompt, params, call) for prompt in prompts]) if body.echo else None
    prompt_copies = params.n * ((body.prompt_logprobs is not None) + (body.echo and body.logprobs is not None))
    completions = _Completions(
        generation=call.generation(processed, prompt_copies=prompt_copies, shows_output=body.max_tokens != 0),
        n=params.n,
        echo=echo,
        prompt_alone=body.max_tokens == 0,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        token_text=call.model.tokenizer.token_text,
    )
    of_outputs, of_prompts = logprobs_asked(processed, prompt_copies)
    if body.stream:
        return call.stream(_events(call, completions, of_prompts + sum(map(len, echo or ()))))
    results = await call.results(completions.generation)

    def answer() -> Response:
        choices = [choice for index, result in enumerate(results) for choice in completions.choices(index, result)]
        return json_response({**call.head("text_completion"), "choices": choices, "usage": completions.usage(results)})

    return await on_cpu(of_outputs + of_prompts, answer)


async def _events(call: Call, completions: _Completions, prompt_size: int) -> AsyncGenerator[bytes, None]:
    """
    Args:
        prompt_size: characters and log-probabilities of prompts that their choices begin with.
    """
    writer = call.chunk_writer("text_completion")

    def chunks(deltas: Sequence[Delta]) -> bytes:
        return b"".join(
            writer.chunk(choice)
            for index, delta in deltas
            for choice in completions.choices(index, delta)
            if choice["text"] or choice["logprobs"] or choice["finish_reason"]
        )

    async with aclosing(completions.generation.steps()) as steps:
        async for deltas in steps:
            data = await on_cpu(prompt_size if completions.begin_in(deltas) else 0, partial(chunks, deltas))
            if data:
                yield data
    yield writer.end(completions.usage(completions.generation.outputs()))


def completion_params(body: CompletionRequest, call: Call) -> SamplingParams:
    decided: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs not in (None, body.logprobs):
            raise InvalidParameter("prompt_logprobs", "prompt_logprobs: must be equal to logprobs when echo is true")
        decided["prompt_logprobs"] = body.logprobs
    if body.echo and body.max_tokens == 0:
        # The engine has no work that ends without a token: one is made and left out of the answer.
        decided["max_tokens"] = 1
    return body.sampling_params(call.model.model_config.generation_defaults, **decided)


def process_completion(
    prompts: Sequence[str | list[int]], params: SamplingParams, body: CompletionRequest, call: Call
) -> list[ProcessedRequest]:
    processor, tokenizer = call.model.processor, call.model.tokenizer
    processed = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str) and not body.add_special_tokens:
            context = call.model.model_config.max_model_len
            if len(prompt) > context * tokenizer.longest_token:
                raise InvalidParameter(
                    "prompt", f"prompt has {len(prompt):,} characters; the model's context is {context:,} tokens"
                )
            prompt = tokenizer.encode(prompt, add_special_tokens=False)
        request_id = call.id if len(prompts) == 1 else f"{call.id}-{index}"
        one = processor.process(prompt, params, request_id=request_id, **call.processor_args)
        processed.append(ending_at(one, COMPLETION_MAX_TOKENS) if params.max_tokens is None else one)
    return processed


def _text(prompt: str | list[int], params: SamplingParams, call: Call) -> str:
    if isinstance(prompt, str):
        return prompt
    return call.model.tokenizer.decode(prompt, skip_special_tokens=params.skip_special_tokens)


@dataclass(slots=True, kw_only=True)
class _Completions:
    """Turns outputs into choices, whether they come whole or as deltas.

    Attributes:
        echo: each prompt's text, which starts its choices; None leaves it out.
        prompt_alone: nothing was asked for beside the echo.
    """

    generation: Generation
    n: int
    echo: Sequence[str] | None
    prompt_alone: bool
    shows_prompt_logprobs: bool
    token_text: Callable[[int], str]
    _offsets: dict[int, int] = field(default_factory=dict)
    _prompt_logprobs: dict[int, list[TokenLogprobDict | None]] = field(default_factory=dict)

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of the index-th prompt that an output has news of."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        return [self._choice(index, output, self._asked_for(completion)) for completion in output.outputs]

    def begin_in(self, deltas: Sequence[Delta]) -> bool:
        """Whether some choice's first words are among what is new."""
        return any(
            self._position(index, completion) not in self._offsets
            for index, delta in deltas
            for completion in delta.outputs
        )

    def usage(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        return usage_of([replace(each, outputs=[self._asked_for(c) for c in each.outputs]) for each in results])

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        position = self._position(index, completion)
        text, token_ids = completion.text, completion.token_ids
        entries: Sequence[TokenLogprobDict | None] | None = completion.logprobs
        choice: dict[str, Any] = {"index": position, "text": text, "logprobs": None}
        if position not in self._offsets and (token_ids or completion.finished):
            self._offsets[position] = 0
            if self.echo is not None:
                choice["text"] = self.echo[index] + text
                if entries is not None:
                    prompt_ids = output.prompt_token_ids
                    entries = [*self._prompt_logprobs.get(index, (None,) * len(prompt_ids)), *entries]
                    token_ids = [*prompt_ids, *token_ids]
            if self.shows_prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs.get(index, ()))
        if entries is not None and (entries or completion.finished):
            choice["logprobs"], self._offsets[position] = completion_logprobs(
                entries, token_ids, self._offsets[position], self.token_text
            )
        choice["finish_reason"] = completion.finish_reason
        choice["stop_reason"] = completion.stop_reason
        return choice

    def _position(self, index: int, completion: CompletionOutput) -> int:
        return index * self.n + completion.index

    def _asked_for(self, completion: CompletionOutput) -> CompletionOutput:
        if not self.prompt_alone:
            return completion
        return replace(
            completion,
            text="",
            token_ids=[],
            logprobs=None if completion.logprobs is None else [],
            finish_reason="length" if completion.finished else None,
            stop_reason=None,
        )
