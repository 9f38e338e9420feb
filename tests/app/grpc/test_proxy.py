"""What stands between gRPC and Serve's handlers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from app.grpc.proxy import relayed

CALL = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1")


@pytest.mark.parametrize("end", ["closed", "dropped"])
async def test_a_call_that_ends_during_a_write_is_cancelled_where_it_waits(end: str) -> None:
    cancelled = asyncio.Event()

    async def handler(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        yield b"first"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    relay = relayed(handler)(None, CALL)
    assert await anext(relay) == b"first"
    await asyncio.sleep(0)
    if end == "closed":
        await relay.aclose()
    del relay  # as gRPC drops the handler that wrote
    gc.collect()
    async with asyncio.timeout(5):
        await cancelled.wait()


async def test_all_messages_pass_in_order_before_a_failure() -> None:
    async def handler(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        for message in request:
            yield message
        raise KeyError(context.peer())

    relay = relayed(handler)([b"a", b"b", b"c"], CALL)
    assert [await anext(relay) for _ in range(3)] == [b"a", b"b", b"c"]
    with pytest.raises(KeyError, match="ipv4"):
        await anext(relay)
