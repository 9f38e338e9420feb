"""What the endpoints share: the models, the limits, and how a generation becomes a response."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from app.openai.errors import ApiError, cut
from app.openai.generation import Generation
from app.openai.metrics import IngressMetrics
from app.openai.protocol import SamplingFields
from app.openai.rate_limits import Client
from app.openai.served_model import Limits, ServedModel
from app.openai.sse import ChunkWriter, EventStream, EventStreamResponse, Pace, unless_disconnected
from engine.outputs import RequestOutput
from engine.processor import ProcessedRequest
from engine.request import Clock
from engine.sampling_params import InvalidParameter, SamplingParams

DEADLINE_SLACK_S = 1.0
"""How much later than the ingress the engine gives a request up: an end by the engine looks like an abort."""

LONG_TEXT = 4_000
"""Characters whose tokenisation, some milliseconds, the event loop need not wait for."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One ingress; its endpoints run on one event loop."""

    models: Mapping[str, ServedModel]
    limits: Limits
    metrics: IngressMetrics
    clock: Clock
    pace: Pace

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; None is the first one.

        Raises:
            ApiError: 404, there is none.
        """
        if name is None:
            name = next(iter(self.models), "")
        model = self.models.get(name)
        if model is None:
            raise ApiError(404, f"the model {cut(name)!r} does not exist", param="model", code="model_not_found")
        return model

    def check_choices(self, prompts: int, n: int) -> None:
        limit = self.limits.max_choices
        if prompts * n > limit:
            raise InvalidParameter(
                "n" if prompts == 1 else "prompt",
                f"{prompts} prompts with n={n} are too many: at most {limit} choices are made for one request",
            )

    def call(self, request: Request, model: ServedModel, body: SamplingFields, id_prefix: str) -> Call:
        return Call(self, request, model, body, f"{id_prefix}-{uuid.uuid4().hex}")


@dataclass(frozen=True, slots=True)
class Call:
    """One request for completions on its way to a response."""

    service: Service
    request: Request
    model: ServedModel
    body: SamplingFields
    id: str

    @property
    def arrived(self) -> float:
        return self.request.state.arrived

    @property
    def client(self) -> Client:
        """Who makes the request."""
        return self.request.state.client

    @property
    def processor_args(self) -> dict[str, Any]:
        """What the Processor is told beside prompt and parameters."""
        timeout = self.service.limits.request_timeout
        return {
            "client_request_id": self.request.state.request_id,
            "model": self.model.name,
            "priority": self.client.priority(self.body.priority),
            "deadline": None if timeout is None else self.arrived + timeout + DEADLINE_SLACK_S,
            "cache_salt": self.client.cache_salt(self.body.cache_salt),
        }

    @property
    def seconds_left(self) -> float | None:
        """Until the request is given up; None is never."""
        timeout = self.service.limits.request_timeout
        return None if timeout is None else max(0.0, self.arrived + timeout - self.service.clock())

    def head(self, kind: str) -> dict[str, Any]:
        """What an answer and each of its chunks begin with."""
        return {"id": self.id, "object": kind, "created": int(self.arrived), "model": self.model.name}

    def chunk_writer(self, kind: str) -> ChunkWriter:
        options = self.body.stream_options
        return ChunkWriter(self.head(kind), include_usage=options is not None and options.include_usage)

    def generation(
        self, processed: Sequence[ProcessedRequest], *, prompt_copies: int = 1, shows_output: bool = True
    ) -> Generation:
        """Of prompts that the client's limits admit.

        Args:
            shows_output: whether the answer has the tokens that are made, and the client pays for them.
            prompt_copies: how often the answer says the log-probabilities of a prompt, where they are asked for.

        Raises:
            ApiError: 400 or 429, they do not.
            InvalidParameter: they ask for too many log-probabilities.
        """
        self._check_logprobs(processed, prompt_copies)
        prompt_tokens = sum(len(each.prompt_token_ids) for each in processed)
        choices = sum(len(each.children) for each in processed)
        self.client.admit(self.request.state.admission, choices=choices, prompt_tokens=prompt_tokens)

        def first_token() -> None:
            seconds = max(0.0, self.service.clock() - self.arrived)
            self.service.metrics.time_to_first_token.labels(self.model.name).observe(seconds)

        return Generation(
            self.model.client,
            self.model.tokenizer,
            processed,
            idle_timeout=self.service.limits.idle_timeout,
            pause=self.service.pace.wait,
            on_first_token=first_token,
            on_tokens=self.client.charge_output if shows_output else lambda _: None,
            on_refused=lambda index: self.client.give_back(len(processed[index].prompt_token_ids)),
        )

    def _check_logprobs(self, processed: Sequence[ProcessedRequest], prompt_copies: int) -> None:
        of_outputs, of_prompts = logprobs_asked(processed, prompt_copies)
        of_prompts_name = "logprobs" if self.body.prompt_logprobs is None else "prompt_logprobs"  # by `echo`
        limit = self.service.limits.max_logprobs
        for name, count in (("logprobs", of_outputs), (of_prompts_name, of_prompts)):
            if count > limit:
                raise InvalidParameter(
                    name, f"{name}: the answer could have {count:,} log-probabilities; at most {limit:,} are allowed"
                )

    async def results(self, generation: Generation) -> list[RequestOutput]:
        """All outputs, when they have ended; ends the generation as soon as the client goes away."""

        async def run() -> list[RequestOutput]:
            async with asyncio.timeout(self.seconds_left):
                return await generation.results()

        return await unless_disconnected(self.request.receive, run())

    def stream(self, events: AsyncGenerator[bytes, None]) -> Response:
        """A response of SSE bytes, which starts them when it is sent."""
        stream = EventStream(self.in_time(events), pace=self.service.pace, heartbeat=self.service.limits.heartbeat)
        return EventStreamResponse(stream)

    async def in_time(self, source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The source's items, until the request is given up.

        Raises:
            TimeoutError: it is.
        """
        async with asyncio.timeout(self.seconds_left), aclosing(source):
            async for data in source:
                yield data


def ending_at(processed: ProcessedRequest, most: int) -> ProcessedRequest:
    """With a bound on the tokens that the client did not ask for: unlike its own max_tokens it is never refused as more
    than the context leaves. The client's min_tokens go before it."""

    def bounded(params: SamplingParams) -> SamplingParams:
        return replace(params, max_tokens=max(params.min_tokens, min(most, params.max_tokens or most)))

    children = tuple(replace(child, params=bounded(child.params)) for child in processed.children)
    return replace(processed, params=bounded(processed.params), children=children)


async def on_cpu(characters: int, work: Callable[[], T]) -> T:
    """Runs text work here, or on a thread where it is long; of a prompt of tokens they are what is counted."""
    return await asyncio.to_thread(work) if characters > LONG_TEXT else work()


def logprobs_asked(processed: Sequence[ProcessedRequest], prompt_copies: int) -> tuple[int, int]:
    """How many log-probabilities an answer may have: of outputs, and of prompts."""
    of_outputs = of_prompts = 0
    for each in processed:
        params = each.params
        if params.logprobs is not None:
            of_outputs += params.n * (params.max_tokens or 0) * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            of_prompts += prompt_copies * len(each.prompt_token_ids) * (1 + params.prompt_logprobs)
    return of_outputs, of_prompts


def usage_of(results: Sequence[RequestOutput]) -> dict[str, Any]:
    """Prompts count once, whatever n is."""
    prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
    completion_tokens = sum(len(completion.token_ids) for result in results for completion in result.outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in results)},
    }
