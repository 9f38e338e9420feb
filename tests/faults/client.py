"""Real HTTP clients, and what each of them saw."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from tests.faults.service import MODEL

TIMEOUT_S = 240.0
"""Without a byte; longer than four starts of a replica may take on a busy machine."""
LOGPROB_TOLERANCE = 1e-4
RECEIVE_BUFFER_BYTES = 4096
"""Of a slow reader's socket: what does not fit waits in the service."""


@dataclass
class Answer:
    """What a client got.

    Attributes:
        status: of the response; None where none came.
        text: of all choices, by index.
        tokens: the tokens' texts of all choices, by index.
        logprobs: the tokens' own, in the same way.
        finish_reasons: by index, of those that ended.
        error: the error object, or what the response said instead of one.
        broken: how the connection failed.
        done: whether a stream ended by [DONE].
        arrivals: when tokens came, by the monotonic clock; of a whole answer when it came.
        num_bytes: of the body.
        left: whether the client closed the connection.
        began: when it was sent, by the monotonic clock.
    """

    status: int | None = None
    text: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: dict[str, Any] | str | None = None
    broken: str | None = None
    done: bool = False
    arrivals: list[float] = field(default_factory=list)
    num_bytes: int = 0
    left: bool = False
    began: float = field(default_factory=time.monotonic)

    def take(self, payload: dict[str, Any]) -> None:
        if "error" in payload:
            self.error = payload["error"]
            return
        for choice in payload["choices"]:
            index = choice["index"]
            self.text[index] = self.text.get(index, "") + choice["text"]
            if choice["logprobs"]:
                self.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"]:
                self.finish_reasons[index] = choice["finish_reason"]
        self.arrivals.append(time.monotonic())

    def same_as(self, other: Answer) -> bool:
        """Whether both have the same words, with the same probabilities, and ends."""
        words = (self.text, self.tokens, self.finish_reasons)
        return words == (other.text, other.tokens, other.finish_reasons) and all(
            math.isclose(a, b, abs_tol=LOGPROB_TOLERANCE)
            for index, logprobs in self.logprobs.items()
            for a, b in zip(logprobs, other.logprobs[index], strict=True)
        )

    def starts(self, other: Answer) -> bool:
        """Whether what came is the beginning of another answer."""
        return all(other.tokens[index][: len(tokens)] == tokens for index, tokens in self.tokens.items())

    def seconds(self) -> float:
        """From its start to its last token."""
        return self.arrivals[-1] - self.began

    def longest_pause(self, since: float) -> float:
        """Seconds without a token."""
        return max((b - a for a, b in pairwise(self.arrivals) if b > since), default=0.0)

    def seen(self, undisturbed: Answer) -> str:
        """In a few words what the client saw."""
        if self.left:
            return "left" if self.starts(undisturbed) else "left, and wrong tokens"
        if self.broken:
            return f"broken off ({self.broken})" if self.starts(undisturbed) else "broken off, and wrong tokens"
        if self.error is not None:
            code = self.error["code"] if isinstance(self.error, dict) else "text/plain"
            if not self.starts(undisturbed):
                return f"{code}, and wrong tokens"
            return f"error event {code}" if self.status == 200 and self.done else f"{self.status} {code}"
        if not self.same_as(undisturbed):
            return "wrong tokens"
        if self.done != undisturbed.done:
            return "all tokens, without [DONE]"
        return "all tokens, no error"


class Client:
    """One client, whose request is in a task of its own.

    Args:
        url: the service's.
        name: the request's `x-request-id`.
        fields: of the completion request.
        reads_from: if given, nothing of the answer's body is read before it is set.
    """

    def __init__(self, url: str, name: str, fields: dict[str, Any], *, reads_from: asyncio.Event | None = None) -> None:
        self.name = name
        self.streams = bool(fields.get("stream"))
        self.answer = Answer()
        self._reads_from = reads_from
        self._url = url
        self._fields = fields
        self.task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Closes the connection, wherever the request is."""
        self.answer.left = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)] if self._reads_from else None
        transport = httpx.AsyncHTTPTransport(socket_options=small)
        try:
            async with (
                httpx.AsyncClient(transport=transport, timeout=TIMEOUT_S) as http,
                http.stream(
                    "POST",
                    f"{self._url}/v1/completions",
                    json={"model": MODEL, **self._fields},
                    headers={"x-request-id": self.name},
                ) as response,
            ):
                await self._read(response)
        except httpx.TransportError as error:
            self.answer.broken = type(error).__name__

    async def _read(self, response: httpx.Response) -> None:
        answer = self.answer
        answer.status = response.status_code
        if self._reads_from is not None:
            await self._reads_from.wait()
            _widen(response)
        kind = response.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    answer.done = True
                elif line.startswith("data: "):
                    answer.take(json.loads(line.removeprefix("data: ")))
        else:
            body = await response.aread()
            if kind.startswith("application/json"):
                answer.take(json.loads(body))
            else:
                answer.error = body.decode()
        answer.num_bytes = response.num_bytes_downloaded


def _widen(response: httpx.Response) -> None:
    """From here on the answer is read as fast as it comes."""
    connection: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
