"""Server-sent events: bytes that go out at once when there are few streams, and together when there are many."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.openai.errors import api_error, is_unexpected
from app.transport import gathering_s

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"

T = TypeVar("T")

_dumps = json.JSONEncoder(separators=(",", ":")).encode


def event(payload: Any) -> bytes:
    return b"data: " + _dumps(payload).encode() + b"\n\n"


class ChunkWriter:
    """Writes a stream's chunks: what they have in common is serialised once."""

    def __init__(self, common: Mapping[str, Any], *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._head = b"data: " + _dumps(common).encode()[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        return self._head + _dumps(choice).encode() + self._tail

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """The last bytes, with a chunk of usage where the client asked for it."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _dumps(usage).encode() + b"}\n\n" + DONE


class Pace:
    """How long a generation waits before it takes more tokens; what comes meanwhile is one event, and one send.

    Half as long as a replica gathers: then a stream is ready when its replica's next item comes, whenever its own
    first token came, and all streams of a replica go on together.

    Attributes:
        open_streams: there are in this process.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self.open_streams = 0

    def wait(self) -> float:
        """In seconds, for whoever has just been given something."""
        return gathering_s(self.open_streams, self._longest) / 2


class EventStream:
    """A source of SSE bytes, read ahead by a task of its own; what was read during a send goes together.

    Counts among its pace's streams while it is open. Belongs to one response, on one loop. Used in a `with`: entering
    starts the task, leaving cancels it, and the task closes the source. Leaving awaits nothing, so that no
    cancellation, however many come and whenever, keeps a source open.
    """

    def __init__(self, source: AsyncGenerator[bytes, None], *, pace: Pace, heartbeat: float) -> None:
        self._source = source
        self._pace = pace
        self._heartbeat = heartbeat
        self._ready = bytearray()
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._ended = False

    def __enter__(self) -> Self:
        self._pace.open_streams += 1
        self._reader = asyncio.create_task(self._read())
        return self

    def __exit__(self, *_: object) -> None:
        self._pace.open_streams -= 1
        self._reader.cancel()

    async def first(self) -> None:
        """Waits for the first bytes, but for no longer than a heartbeat, so that an early failure has its own status.

        Raises:
            Exception: what the source raised before its first bytes.
        """
        await self._wait_for_news()
        if self._failure is not None and not self._ready:
            raise self._failure

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """All bytes to the end, with comments while there are none; a failure is an error event before [DONE]."""
        while True:
            if self._ready:
                sent = bytes(self._ready)
                self._ready.clear()
                yield sent
            elif self._ended:
                break
            elif not await self._wait_for_news():
                yield HEARTBEAT
        if self._failure is not None:
            if is_unexpected(self._failure):
                logger.error("stream_failed", exc_info=self._failure)
            yield event(api_error(self._failure).body()) + DONE

    async def _read(self) -> None:
        try:
            async with aclosing(self._source):
                async for data in self._source:
                    self._ready += data
                    self._news.set()
        except Exception as error:
            self._failure = error
        finally:
            self._ended = True
            self._news.set()

    async def _wait_for_news(self) -> bool:
        self._news.clear()
        try:
            async with asyncio.timeout(self._heartbeat):
                await self._news.wait()
        except TimeoutError:
            return False
        return True


class EventStreamResponse(StreamingResponse):
    """Runs an EventStream and sends it; ends it as soon as the client goes away.

    The stream starts no earlier than the response is called: between an endpoint's end and that moment a cancellation
    would find no owner of it. What fails before the first bytes is raised before anything is sent.

    Starlette's own response learns of a disconnect from a failing send alone where the server allows it, which a
    stream that waits for its next token does not notice.
    """

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._chunks = stream.chunks()
        super().__init__(self._chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        with self._stream as stream:
            await stream.first()
            async with aclosing(self._chunks):
                try:
                    await self.stream_response(send)
                except OSError:  # a server's other way to say that the client has gone
                    raise ClientDisconnect from None


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; for after the body has been read.

    The work is a task that owns all it opens. It is cancelled, once, when the client goes away and when the caller is
    cancelled; whether the caller can wait for its end makes no difference to it.

    Raises:
        ClientDisconnect: the client went away first.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    # Once cancelled, nobody may be left to ask how it ended.
    worker.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait([worker, watcher], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        watcher.result()
        raise ClientDisconnect
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.wait([worker, watcher])


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
