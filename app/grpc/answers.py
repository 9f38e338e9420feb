"""What engines put out as messages of `manta.proto`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from app.grpc import manta_pb2 as pb
from app.openai.generation import Generation
from app.openai.service import on_cpu, usage_of
from engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobDict
from engine.sampling_params import SamplingParams


async def answer(
    generation: Generation, params: SamplingParams, message: type[pb.GenerateResponse] | type[pb.ChatResponse]
) -> AsyncGenerator[bytes, None]:
    """The messages of one prompt's answer, serialised: joined bytes are the merged message."""

    def serialized(output: RequestOutput, with_prompt: bool) -> bytes:
        response = message()
        if with_prompt:
            response.prompt_logprobs.extend(_prompt_logprobs(output, params.prompt_logprobs or 0))
        for completion in output.outputs:
            if completion.text or completion.token_ids or completion.finished:
                response.deltas.append(_delta(completion, params.logprobs or 0))
        return response.SerializeToString()

    held = params.prompt_logprobs is not None
    async with aclosing(generation.steps()) as steps:
        async for news in steps:
            for _, output in news:
                size = 0
                with_prompt = held and output.prompt_logprobs is not None
                if with_prompt:
                    held = False
                    size = len(output.prompt_token_ids) * (1 + (params.prompt_logprobs or 0))
                if data := await on_cpu(size, partial(serialized, output, with_prompt)):
                    yield data
    yield message(usage=_usage(generation.outputs())).SerializeToString()


def _usage(results: Sequence[RequestOutput]) -> pb.Usage:
    usage = usage_of(results)
    return pb.Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def _delta(completion: CompletionOutput, top: int) -> pb.Delta:
    delta = pb.Delta(index=completion.index, text=completion.text, token_ids=completion.token_ids)
    if completion.logprobs is not None:
        delta.logprobs.extend(
            _token(token, entry, top) for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        )
    if completion.finish_reason is not None:
        delta.finish_reason = completion.finish_reason
    match completion.stop_reason:
        case str(text):
            delta.stop_string = text
        case int(token):
            delta.stop_token_id = token
    return delta


def _prompt_logprobs(output: RequestOutput, top: int) -> Iterator[pb.TokenLogprobs]:
    for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
        yield _token(token, entry, top)


def _token(token: int, entry: TokenLogprobDict | None, top: int) -> pb.TokenLogprobs:
    if not entry:  # nothing is known of it
        return pb.TokenLogprobs()
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:top]
    return pb.TokenLogprobs(token=_logprob(token, entry[token]), top=[_logprob(*item) for item in ranked])


def _logprob(token: int, logprob: Logprob) -> pb.Logprob:
    return pb.Logprob(token_id=token, logprob=logprob.logprob, rank=logprob.rank, text=logprob.decoded_token)
