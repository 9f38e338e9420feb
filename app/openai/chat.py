"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.openai.body import parse_body
from app.openai.errors import json_response
from app.openai.generation import Generation
from app.openai.logprobs import chat_logprobs, prompt_logprobs
from app.openai.protocol import ChatCompletionRequest
from app.openai.service import Call, Service, ending_at, logprobs_asked, on_cpu, usage_of
from engine.outputs import CompletionOutput
from engine.processor import ProcessedRequest
from engine.sampling_params import InvalidParameter, SamplingParams
from engine.tokenizer import Tokenizer


async def create_chat_completion(service: Service, request: Request) -> Response:
    body = await parse_body(request, ChatCompletionRequest, service.limits.max_body_bytes)
    call = service.call(request, service.model(body.model), body, "chatcmpl")
    try:
        params = chat_params(body, call)
        service.check_choices(1, params.n)
        processed = await on_cpu(body.characters(), lambda: process_chat(body, params, call))
        generation = call.generation([processed])
    except InvalidParameter as refused:
        raise _as_named_here(refused, body) from None
    answers = _Answers(generation, call.model.tokenizer, body.top_logprobs or 0)
    if body.stream:
        return call.stream(_events(call, answers, params.n))
    results = await call.results(answers.generation)

    def answer() -> Response:
        content = {
            **call.head("chat.completion"),
            "choices": [answers.choice(completion) for completion in results[0].outputs],
            "usage": usage_of(results),
        }
        if body.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs or ())
        return json_response(content)

    return await on_cpu(sum(logprobs_asked([processed], 1)), answer)


async def _events(call: Call, answers: _Answers, n: int) -> AsyncGenerator[bytes, None]:
    writer = call.chunk_writer("chat.completion.chunk")
    opening = b"".join(writer.chunk(_delta(index, {"role": "assistant", "content": ""})) for index in range(n))
    async with aclosing(answers.generation.steps()) as steps:
        async for deltas in steps:
            data = opening + b"".join(
                writer.chunk(answers.delta(completion))
                for _, delta in deltas
                for completion in delta.outputs
                if completion.text or completion.logprobs or completion.finished
            )
            opening = b""
            if data:
                yield data
    yield writer.end(usage_of(answers.generation.outputs()))


def chat_params(body: ChatCompletionRequest, call: Call) -> SamplingParams:
    return body.sampling_params(
        call.model.model_config.generation_defaults,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def process_chat(body: ChatCompletionRequest, params: SamplingParams, call: Call) -> ProcessedRequest:
    """Where max_tokens is absent, it is what the context leaves, and no more than there may be log-probabilities of."""
    processed = call.model.processor.process_chat(
        body.template_messages(), params, request_id=call.id, **body.template_args(), **call.processor_args
    )
    if params.max_tokens is None and params.logprobs is not None:
        most = call.service.limits.max_logprobs // (params.n * (1 + params.logprobs))
        processed = ending_at(processed, max(1, most))
    return processed


def _as_named_here(refused: InvalidParameter, body: ChatCompletionRequest) -> InvalidParameter:
    """The error with the field that the client wrote, where the engine calls it otherwise."""
    if refused.param == "logprobs":
        return InvalidParameter("top_logprobs", f"top_{refused}")
    if refused.param == "max_tokens" and body.max_tokens is None:
        return InvalidParameter("max_completion_tokens", str(refused).replace("max_tokens", "max_completion_tokens", 1))
    return refused


@dataclass(slots=True)
class _Answers:
    """Turns completions into choices, whole or as deltas.

    Attributes:
        top: how many alternatives are shown beside each token.
    """

    generation: Generation
    tokenizer: Tokenizer
    top: int

    def choice(self, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def delta(self, completion: CompletionOutput) -> dict[str, Any]:
        choice = _delta(completion.index, {"content": completion.text} if completion.text else {})
        if completion.logprobs:
            choice["logprobs"] = self._logprobs(completion)
        if completion.finished:
            choice["finish_reason"] = completion.finish_reason
            choice["stop_reason"] = completion.stop_reason
        return choice

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        return chat_logprobs(completion.logprobs, completion.token_ids, self.top, self.tokenizer.token_bytes)


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
