"""The RPCs. Serve's gRPC proxy calls the ingress's method that is named like the RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext
from starlette.requests import Request

from app.grpc import manta_pb2 as pb
from app.grpc.answers import answer
from app.grpc.exchange import MOST_WATCHERS, Exchange, GrpcSide
from app.grpc.requests import chat_request, completion_request, read, tokenize_chat_request
from app.openai.chat import chat_params, process_chat
from app.openai.completions import completion_params, process_completion
from app.openai.errors import ApiError
from app.openai.service import Service, on_cpu
from app.openai.sse import EventStream
from app.openai.tokenize import detokenized, refuse_long, render
from app.transport import TransportError

SERVICE = pb.DESCRIPTOR.services_by_name["Manta"].full_name

WATCH_POLL_S = 1.0
WATCH_S = 60.0
"""After which a watcher is asked to come again: an ingress that stops waits for its calls to end."""

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)


class Serialized(bytes):
    """A message that has been serialised, as Serve takes it."""

    def SerializeToString(self) -> bytes:
        return bytes(self)


class MessageStream(EventStream):
    """An EventStream of messages in place of events. What is sent together is one message: bytes of messages in a row
    are those of the merged one."""

    async def messages(self) -> AsyncGenerator[Serialized, None]:
        """
        Raises:
            Exception: what the source raised, behind all that came before.
        """
        while self._ready or not self._ended:
            if self._ready:
                sent = Serialized(self._ready)
                self._ready.clear()
                yield sent
            else:
                await self._wait_for_news()
        if self._failure is not None:
            raise self._failure


def _streaming(
    start: Callable[[GrpcServicer, Asked, Request], Awaitable[AsyncGenerator[bytes, None]]],
) -> Callable[[GrpcServicer, Asked, RayServegRPCContext], AsyncGenerator[Serialized, None]]:
    """An RPC with a stream of messages, from what makes their source: serialised ones, behind all checks."""

    async def call(
        self: GrpcServicer, request: Asked, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Serialized, None]:
        side = self.grpc_side
        service = side.service
        with Exchange(side, start.__name__, request, grpc_context) as exchange:
            source = await start(self, request, exchange.admit())
            with MessageStream(source, pace=service.pace, heartbeat=service.limits.heartbeat) as stream:
                async with aclosing(stream.messages()) as messages:
                    exchange.show_metadata()
                    async for each in messages:
                        yield each
        if exchange.failed:
            yield Serialized()

    return call


class GrpcServicer:
    """What the ingress inherits; its event loop runs everything.

    Attributes:
        grpc_side: set before the first call.
    """

    grpc_side: GrpcSide

    @_streaming
    async def Generate(self, request: pb.GenerateRequest, http: Request) -> AsyncGenerator[bytes, None]:
        service = self.grpc_side.service
        model = service.model(request.model or None)
        body = await read(request, lambda: completion_request(request, model.name))
        call = service.call(http, model, body, "cmpl")
        prompts = body.prompts()
        params = completion_params(body, call)
        service.check_choices(len(prompts), params.n)
        processed = await on_cpu(len(prompts[0]), lambda: process_completion(prompts, params, body, call))
        return call.in_time(answer(call.generation(processed), params, pb.GenerateResponse))

    @_streaming
    async def Chat(self, request: pb.ChatRequest, http: Request) -> AsyncGenerator[bytes, None]:
        service = self.grpc_side.service
        model = service.model(request.model or None)
        body = await read(request, lambda: chat_request(request, model.name))
        call = service.call(http, model, body, "chatcmpl")
        params = chat_params(body, call)
        service.check_choices(1, params.n)
        processed = await on_cpu(body.characters(), lambda: process_chat(body, params, call))
        return call.in_time(answer(call.generation([processed]), params, pb.ChatResponse))

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        async def work(service: Service) -> pb.TokenizeResponse:
            model = service.model(request.model or None)
            tokenizer = model.tokenizer

            def response(tokens: Sequence[int]) -> pb.TokenizeResponse:
                return pb.TokenizeResponse(
                    token_ids=tokens,
                    texts=map(tokenizer.token_text, tokens) if request.with_texts else (),
                    max_model_len=model.model_config.max_model_len,
                )

            if request.WhichOneof("input") == "conversation":
                chat = await read(request, lambda: tokenize_chat_request(request))
                refuse_long("conversation", chat.characters())
                return await on_cpu(chat.characters(), lambda: response(render(tokenizer, chat)))
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            text = request.text
            refuse_long("text", len(text))
            return await on_cpu(len(text), lambda: response(tokenizer.encode(text, add_special_tokens=special)))

        return await self._unary("Tokenize", request, grpc_context, work, pb.TokenizeResponse())

    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.DetokenizeResponse:
        async def work(service: Service) -> pb.DetokenizeResponse:
            text = await detokenized(service.model(request.model or None), request.token_ids)
            return pb.DetokenizeResponse(text=text)

        return await self._unary("Detokenize", request, grpc_context, work, pb.DetokenizeResponse())

    async def Models(self, request: pb.ModelsRequest, grpc_context: RayServegRPCContext) -> pb.ModelsResponse:
        async def work(service: Service) -> pb.ModelsResponse:
            return pb.ModelsResponse(
                models=[
                    pb.Model(name=each.name, max_model_len=each.model_config.max_model_len, created=each.created)
                    for each in service.models.values()
                ]
            )

        return await self._unary("Models", request, grpc_context, work, pb.ModelsResponse())

    async def Check(self, request: HealthCheckRequest, grpc_context: RayServegRPCContext) -> HealthCheckResponse:
        """grpc.health.v1.Health/Check."""

        async def work(_: Service) -> HealthCheckResponse:
            if request.service not in ("", SERVICE):
                raise ApiError(404, f"there is no service of that name; the one here is {SERVICE}")
            return HealthCheckResponse(status=await self._health())

        return await self._unary("Check", request, grpc_context, work, HealthCheckResponse(), is_open=True)

    async def Watch(
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        """grpc.health.v1.Health/Watch. Ends after a time, and when the service is about to end."""
        side = self.grpc_side
        with Exchange(side, "Watch", request, grpc_context, is_open=True) as exchange:
            exchange.admit()
            if side.watchers.locked():
                text = f"{MOST_WATCHERS} clients watch already; call Check, or come again"
                raise ApiError(429, text, code="too_many_watchers", headers={"retry-after": str(round(WATCH_S))})
            with side.intake.request():  # an end waits until watchers have heard of it
                async with side.watchers, aclosing(self._statuses(request.service)) as statuses:
                    async for status in statuses:
                        yield HealthCheckResponse(status=status)
        if exchange.failed:
            yield HealthCheckResponse()

    async def _statuses(self, name: str) -> AsyncGenerator[Any, None]:
        """A service's status, and again whenever it changes."""
        now = asyncio.get_running_loop().time
        end = now() + WATCH_S
        last = None
        while now() < end:
            is_last = self.grpc_side.intake.closed
            status = await self._health() if name in ("", SERVICE) else HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield status
                last = status
            if is_last:
                return
            await asyncio.sleep(WATCH_POLL_S)

    async def _health(self) -> Any:
        try:
            await self.grpc_side.check_ready()
        except TransportError:
            return HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVING

    async def _unary(
        self,
        method: str,
        message: Message,
        context: RayServegRPCContext,
        work: Callable[[Service], Awaitable[Answered]],
        nothing: Answered,
        *,
        is_open: bool = False,
    ) -> Answered:
        """The work's answer, or the message that a failed call needs."""
        with Exchange(self.grpc_side, method, message, context, is_open=is_open) as exchange:
            exchange.admit()
            return await work(self.grpc_side.service)
        return nothing
