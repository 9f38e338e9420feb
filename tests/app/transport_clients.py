"""Clients of scripted replicas over Ray Serve, and what tests ask of them."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from app.engine_client import RayEngineClient
from engine.request import EngineRequest

LONG = 100_000
"""Tokens that no test waits for."""


@asynccontextmanager
async def client_of(handle: Any, replica_wait_s: float = 5.0, ingress: Any = None) -> AsyncIterator[RayEngineClient]:
    client = RayEngineClient(handle, ingress_id=uuid.uuid4().hex, ingress=ingress, replica_wait_s=replica_wait_s)
    try:
        yield client
    finally:
        await client.close()


def new_id() -> str:
    return uuid.uuid4().hex[:8]


async def tokens_of(client: RayEngineClient, *requests: EngineRequest, on_trial: bool = False) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {r.request_id: [] for r in requests}
    async for outputs in client.generate(requests, on_trial=on_trial):
        for output in outputs:
            got[output.request_id] += output.new_token_ids
    return got


async def eventually(check: Callable[[], Awaitable[Any]], seconds: float = 30.0) -> Any:
    """The first true value of check; the last value where none comes."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        value = await check()
        if value or asyncio.get_running_loop().time() > deadline:
            return value
        await asyncio.sleep(0.02)


async def on_replicas(client: RayEngineClient, key: str) -> list[Any]:
    """One entry of every replica's state, joined."""
    states = await client.call_replicas("state", 10.0)
    return [entry for state in states.values() for entry in state[key]]
