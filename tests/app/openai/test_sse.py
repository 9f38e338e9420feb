from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from app.openai.sse import DONE, ChunkWriter, EventStream, Pace


async def test_what_came_while_a_send_was_underway_goes_together() -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        for data in (b"a", b"b", b"c"):
            yield data

    chunks = []
    with EventStream(source(), pace=Pace(0.0), heartbeat=60) as stream:
        await stream.first()
        async for chunk in stream.chunks():
            chunks.append(chunk)
            await asyncio.sleep(0.01)  # a send takes its time
    assert b"".join(chunks) == b"abc"
    assert len(chunks) < 3


def test_waits_grow_with_streams_up_to_the_limit() -> None:
    pace = Pace(0.08)
    waits = []
    for streams in (1, 8, 16, 24, 1000):
        pace.open_streams = streams
        waits.append(pace.wait())
    assert waits == [0.0, 0.0, 0.02, 0.03, 0.04]


async def test_leaving_ends_the_source_and_gives_the_place_back() -> None:
    closed = asyncio.Event()

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.sleep(3600)
        finally:
            closed.set()

    pace = Pace(0.0)
    with EventStream(source(), pace=pace, heartbeat=60) as stream:
        await stream.first()
        assert pace.open_streams == 1
    assert pace.open_streams == 0
    await asyncio.wait_for(closed.wait(), 10)


async def test_failure_before_the_first_bytes_is_raised() -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        raise ValueError("no")
        yield b""

    pace = Pace(0.0)
    with pytest.raises(ValueError, match="no"), EventStream(source(), pace=pace, heartbeat=60) as stream:
        await stream.first()
    assert pace.open_streams == 0


def test_chunks_are_json_with_and_without_usage() -> None:
    for include_usage in (False, True):
        writer = ChunkWriter({"id": "x", "model": 'a"b'}, include_usage=include_usage)
        chunk = json.loads(writer.chunk({"index": 0, "text": "\ud800\n"}).removeprefix(b"data: "))
        assert chunk["choices"] == [{"index": 0, "text": "\ud800\n"}]
        assert ("usage" in chunk) == include_usage
        *last, done = writer.end({"total_tokens": 3}).split(b"\n\n")[:-1]
        assert done + b"\n\n" == DONE
        usages = [json.loads(each.removeprefix(b"data: ")) for each in last]
        assert [each["usage"] for each in usages] == ([{"total_tokens": 3}] if include_usage else [])
