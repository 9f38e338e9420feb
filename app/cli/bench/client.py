"""The client of `manta bench serve`: streams over kept connections, and the times at which they bring tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, Self

import aiohttp

from engine.sampling_params import InvalidParameter

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

LOOK_UP_S = 30.0
"""How long the question for the models may take."""

KEEP_ALIVE_S = 4.0
"""A connection that was idle for longer is not used again: uvicorn closes it after five seconds."""

REASON_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Call:
    """One request, ready to be sent.

    Attributes:
        arrival: seconds after the first one.
    """

    body: bytes
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. All times are in seconds, on one clock.

    Attributes:
        token_times: when each event arrived that brought tokens, one or several.
        ended_at: when the stream ended, or failed.
        failure: why the answer does not count; None where it does.
        cached_tokens: of the prompt, that the service says it had in a cache.
    """

    sent_at: float
    ended_at: float
    token_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None
    cached_tokens: int = 0


class StreamReader:
    """Reads one stream of server-sent events as its bytes come.

    Attributes:
        token_times: see Answer. A role alone is no token, and neither is the event that tells the end unless the
            stream had none before it.
        failure: what the service said of an error within the stream.
    """

    def __init__(self) -> None:
        self.token_times: list[float] = []
        self.failure: str | None = None
        self._usage: dict[str, Any] = {}
        self._rest = b""
        self._is_complete = False

    def feed(self, data: bytes, now: float) -> None:
        """Takes the bytes that arrived at this moment; events may begin and end anywhere in them."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def answer(self, sent_at: float, ended_at: float) -> Answer:
        """The whole answer, once the stream has ended."""
        failure = self.failure
        if failure is None and not self._is_complete:
            failure = "the stream broke off"
        return Answer(
            sent_at,
            ended_at,
            tuple(self.token_times),
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            output_tokens=self._usage.get("completion_tokens", len(self.token_times)),
            failure=failure,
            cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                self.failure = _error_message(event)
                return
            if usage := event.get("usage"):
                self._usage = dict(usage)
            for choice in event.get("choices", ()):
                is_last = choice.get("finish_reason") is not None
                if _brings_tokens(choice, is_last) or (is_last and not self.token_times):
                    self.token_times.append(now)
                self._is_complete = self._is_complete or is_last
        except (ValueError, TypeError, AttributeError):
            self.failure = f"not an event of OpenAI's interface: {_shortened(data.decode(errors='replace'))}"


class ServiceClient:
    """Sends calls to one endpoint of a service; used within one event loop."""

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        timeout: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            url: of the service, without a path; see `app.cli.service.service_url`.
            timeout: seconds that an answer may take from first to last.
        """
        self._url = url + PATHS[endpoint]
        # Compressed chunks would wait for each other.
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            **_authorization(api_key),
        }
        self._timeout = timeout
        self._clock = clock

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(),
            trust_env=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def send(self, call: Call) -> Answer:
        """One answer, to its end; whatever goes wrong is its failure."""
        reader = StreamReader()
        sent_at = self._clock()
        try:
            async with asyncio.timeout(self._timeout), self._http.post(self._url, data=call.body) as response:
                if response.status == HTTPStatus.OK:
                    async for data in response.content.iter_any():
                        reader.feed(data, self._clock())
                else:
                    reader.failure = _status_reason(response.status, await response.read())
        except TimeoutError:
            reader.failure = f"no end within {self._timeout:g} s"
        except aiohttp.ClientError as error:
            reader.failure = _transport_reason(error)
        return reader.answer(sent_at, self._clock())


def served_models(url: str, api_key: str | None) -> dict[str, int | None]:
    """The models of a service, to their contexts in tokens where it says them.

    Raises:
        InvalidParameter: no service of this kind answers there.
    """
    try:
        status, content = asyncio.run(_get(f"{url}/v1/models", api_key))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise InvalidParameter("base_url", f"no service answers at {url} ({_transport_reason(error)})") from None
    if status != HTTPStatus.OK:
        raise InvalidParameter("base_url", f"{url}/v1/models: {_status_reason(status, content)}")
    try:
        return {each["id"]: each.get("max_model_len") for each in json.loads(content)["data"]}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidParameter("base_url", f"{url}/v1/models is no list of models") from None


async def _get(url: str, api_key: str | None) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=LOOK_UP_S)
    async with (
        aiohttp.ClientSession(headers=_authorization(api_key), timeout=timeout, trust_env=True) as session,
        session.get(url) as response,
    ):
        return response.status, await response.read()


def _brings_tokens(choice: dict[str, Any], is_last: bool) -> bool:
    """A completion's text may be empty, where a token is half a character; the end alone has no text either."""
    if "delta" in choice:
        return any(value for name, value in choice["delta"].items() if name != "role")
    return bool(choice.get("text")) or not is_last


def _authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def _status_reason(status: int, body: bytes) -> str:
    try:
        message = _error_message(json.loads(body))
    except ValueError:
        message = body.decode(errors="replace")
    return f"status {status}: {_shortened(message)}"


def _error_message(content: Any) -> str:
    """Of OpenAI's error object, or of what stands in its place."""
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message", error) if isinstance(error, dict) else error
    return _shortened(str(message))


def _transport_reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _shortened(text: str) -> str:
    return text if len(text) <= REASON_LENGTH else text[:REASON_LENGTH] + " …"
