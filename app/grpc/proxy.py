"""What Serve's gRPC proxy calls when it starts: `grpc_servicer_functions` of a service file name these functions.

Serve's proxy tells a replica of a cancelled call only where it waits for the replica's next message. A cancellation, or
a deadline, that comes while it writes one to the client is lost, and the replica goes on for nobody.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any

from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from app.grpc.manta_pb2_grpc import add_MantaServicer_to_server


def add_manta(servicer: Any, server: Any) -> None:
    """manta.v1.Manta."""
    _add(add_MantaServicer_to_server, servicer, server)


def add_health(servicer: Any, server: Any) -> None:
    """grpc.health.v1.Health."""
    _add(add_HealthServicer_to_server, servicer, server)


def _add(add_to_server: Callable[[Any, Any], None], servicer: Any, server: Any) -> None:
    factory = server.service_handler_factory

    def relaying_factory(**method: Any) -> Any:
        handler = factory(**method)
        return relayed(handler) if inspect.isasyncgenfunction(handler) else handler

    server.service_handler_factory = relaying_factory
    try:
        add_to_server(servicer, server)
    finally:
        server.service_handler_factory = factory


class WithPeer:
    """A call's context whose `peer` may be asked for after its end: Serve's log does, and gRPC's own crashes then."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()

    def peer(self) -> str:
        return self._peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def relayed(handler: Callable[[Any, Any], AsyncGenerator[bytes, None]]) -> Callable[[Any, Any], Any]:
    """A streaming handler that waits for its next message all the time, in a task of its own, to be cancelled there."""

    async def relay(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        messages: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in handler(request, WithPeer(context)):
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await reader
        finally:
            reader.cancel()

    return relay
