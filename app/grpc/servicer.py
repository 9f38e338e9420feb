"""The RPCs. Serve's gRPC proxy calls the ingress's method that is named like the RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext
from starlette.requests import Request

from app.grpc import manta_pb2 as pb
from app.grpc.answers import answer
from app.grpc.exchange import Exchange, GrpcSide
from app.grpc.requests import chat_request, completion_request, read, tokenize_chat_request
from app.openai.chat import chat_params, process_chat
from app.openai.completions import completion_params, process_completion
from app.openai.errors import ApiError
from app.openai.service import Service, on_cpu
from app.openai.sse import EventStream
from app.openai.tokenize import detokenized, render
from app.transport import TransportError

SERVICE = pb.DESCRIPTOR.services_by_name["Manta"].full_name

WATCH_POLL_S = 1.0
WATCH_S = 60.0
"""After which a watcher is asked to come again: an ingress that stops waits for its calls to end."""

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


class GrpcServicer:
    """What the ingress inherits; its event loop runs everything.

    Attributes:
        grpc_side: set before the first call.
    """

    grpc_side: GrpcSide

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Serialized, None]:
        async def start(service: Service, http: Request) -> AsyncGenerator[bytes, None]:
            model = service.model(request.model or None)
            body = await read(request, lambda: completion_request(request, model.name))
            call = service.call(http, model, body, "cmpl")
            prompts = body.prompts()
            params = completion_params(body, call)
            service.check_choices(len(prompts), params.n)
            processed = await on_cpu(len(prompts[0]), lambda: process_completion(prompts, params, body, call))
            return call.in_time(answer(call.generation(processed), params, pb.GenerateResponse))

        async with aclosing(self._stream("Generate", request, grpc_context, start)) as messages:
            async for message in messages:
                yield message

    async def Chat(
        self, request: pb.ChatRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Serialized, None]:
        async def start(service: Service, http: Request) -> AsyncGenerator[bytes, None]:
            model = service.model(request.model or None)
            body = await read(request, lambda: chat_request(request, model.name))
            call = service.call(http, model, body, "chatcmpl")
            params = chat_params(body, call)
            service.check_choices(1, params.n)
            processed = await on_cpu(body.characters(), lambda: process_chat(body, params, call))
            return call.in_time(answer(call.generation([processed]), params, pb.ChatResponse))

        async with aclosing(self._stream("Chat", request, grpc_context, start)) as messages:
            async for message in messages:
                yield message

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        async def work(service: Service) -> pb.TokenizeResponse:
            model = service.model(request.model or None)
            if request.WhichOneof("input") == "conversation":
                chat = await read(request, lambda: tokenize_chat_request(request))
                tokens = await on_cpu(chat.characters(), lambda: render(model.tokenizer, chat))
            else:
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                text = request.text
                tokens = await on_cpu(len(text), lambda: model.tokenizer.encode(text, add_special_tokens=special))
            return pb.TokenizeResponse(
                token_ids=tokens,
                texts=map(model.tokenizer.token_text, tokens),
                max_model_len=model.model_config.max_model_len,
            )

        return await self._unary("Tokenize", request, grpc_context, work, pb.TokenizeResponse())

    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.DetokenizeResponse:
        async def work(service: Service) -> pb.DetokenizeResponse:
            text = await detokenized(service.model(request.model or None), list(request.token_ids))
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
        """grpc.health.v1.Health/Watch."""
        with Exchange(self.grpc_side, "Watch", request, grpc_context, is_open=True) as exchange:
            exchange.admit()
            known = request.service in ("", SERVICE)
            last = None
            end = asyncio.get_running_loop().time() + WATCH_S
            while asyncio.get_running_loop().time() < end:
                status = await self._health() if known else HealthCheckResponse.SERVICE_UNKNOWN
                if status != last:
                    yield HealthCheckResponse(status=status)
                    last = status
                await asyncio.sleep(WATCH_POLL_S)
        if exchange.failed:
            yield HealthCheckResponse()

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

    async def _stream(
        self,
        method: str,
        message: Message,
        context: RayServegRPCContext,
        start: Callable[[Service, Request], Awaitable[AsyncGenerator[bytes, None]]],
    ) -> AsyncGenerator[Serialized, None]:
        service = self.grpc_side.service
        with Exchange(self.grpc_side, method, message, context) as exchange:
            source = await start(service, exchange.admit())
            with MessageStream(source, pace=service.pace, heartbeat=service.limits.heartbeat) as stream:
                async with aclosing(stream.messages()) as messages:
                    exchange.show_metadata()
                    async for each in messages:
                        yield each
        if exchange.failed:
            yield Serialized()
